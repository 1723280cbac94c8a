"""The built-in model learns a game of several turns: supervised, its head adapted, then GRPO."""

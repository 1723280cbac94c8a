"""Training of the built-in model on a game of several turns: supervised, then its head adapted, then GRPO."""

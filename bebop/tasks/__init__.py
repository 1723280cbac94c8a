"""Tasks: prompts, rewards and environments."""

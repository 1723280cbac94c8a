"""Heads of SmolLM2 at the entropies of the paper: rollouts, training and evaluation at low temperatures."""

"""Acceptance against entropy: Fig 12 and the slopes of Figs 1a and 8 of the paper, on the built-in model."""

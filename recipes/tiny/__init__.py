"""Training of the built-in model from scratch."""

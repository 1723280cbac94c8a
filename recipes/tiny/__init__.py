"""Makes the built-in model."""

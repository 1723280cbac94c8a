"""Example environments to read and to copy."""

"""Environments to read and to copy."""

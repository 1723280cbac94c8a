"""Environments of agents."""

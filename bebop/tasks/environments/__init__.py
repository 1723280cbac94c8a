"""Environments in which a policy acts in several turns."""

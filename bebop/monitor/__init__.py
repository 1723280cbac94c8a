"""The acceptance monitor."""

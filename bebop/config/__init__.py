"""Settings with types: their meaning, limits and resume rules in one place, checked once."""

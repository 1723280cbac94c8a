"""Settings: typed, checked once, with their meaning, limits and resume rules in one place."""

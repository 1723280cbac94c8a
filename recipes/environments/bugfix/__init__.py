"""``bugfix``: fix a small Python package with commands in a sandbox."""

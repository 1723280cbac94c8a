"""Keeping rejected drafts that a classifier finds harmless (PAD): what it gains and what it costs, beside controls."""

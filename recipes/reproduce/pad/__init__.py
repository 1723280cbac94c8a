"""PAD keeps rejected drafts that a classifier finds harmless: its gain and its cost, beside controls."""

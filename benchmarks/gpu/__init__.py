"""One run on a lent GPU: what the card can do, whether everything is right on it, and what takes how long."""

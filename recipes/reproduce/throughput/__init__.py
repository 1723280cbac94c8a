"""Tokens per second of the real engine against acceptance (Fig 9b), and beside the cost model."""

"""Tokens per second of the real engine, against acceptance (Fig 9b) and against the cost model."""

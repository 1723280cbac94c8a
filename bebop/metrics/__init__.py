"""Metrics: totals with counts, the registry of all names, and the sinks that record them."""

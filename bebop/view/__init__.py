"""Viewer of runs: a browser page, from a run's curves down to how each token of a completion was decoded."""

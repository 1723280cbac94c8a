"""A viewer of runs: a page in the browser, from a run's curves to how each token of a completion came about."""

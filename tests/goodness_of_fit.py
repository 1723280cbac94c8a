"""Pearson's chi-square test of counts against a distribution, wherever tests draw."""

import numpy as np
from scipy.stats import chi2


def p_value(counts: np.ndarray, probs: np.ndarray) -> float:
    """Of counts in any number of cells under their probabilities; 0 if something impossible was drawn.

    Cells that expect fewer than five draws are merged into one, and that into its neighbour if it is still too small.
    """
    probs, observed = probs.ravel() / probs.sum(), counts.ravel()
    if observed[probs == 0].sum():
        return 0.0
    expected = probs * observed.sum()
    small = expected < 5
    expected = np.append(expected[~small], expected[small].sum())
    observed = np.append(observed[~small], observed[small].sum())
    if expected[-1] < 5 and len(expected) > 1:
        expected[-2] += expected[-1]
        observed[-2] += observed[-1]
        expected, observed = expected[:-1], observed[:-1]
    if len(expected) == 1:
        return 1.0
    return float(chi2.sf(((observed - expected) ** 2 / expected).sum(), len(expected) - 1))

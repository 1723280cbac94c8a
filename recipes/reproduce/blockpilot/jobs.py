"""Measurements of one seed; each part is kept on disk, so a stopped study resumes where it was."""

from recipes.reproduce.blockpilot import costs, marker, protocol, sweeps
from recipes.reproduce.blockpilot.decoding import Array


def best_fixed(swept: sweeps.Swept, seed: int) -> int:
    """Return the candidate size with the most tokens per cycle over the training prompts of the first split."""
    train, _, _ = protocol.fifths(swept.tasks, seed)[0]
    return sweeps.CANDIDATES[int(swept.candidates().tau[train].mean(0).argmax())]


def run(seed: int) -> tuple[sweeps.Swept, int, costs.Costs, marker.Planted, Array]:
    """Return the sweep, the best size for its training prompts, the times, the planted marker and the null test."""
    swept = sweeps.sweep(seed)
    best = best_fixed(swept, seed)
    return swept, best, costs.timed((seed, best)), marker.planted(seed), sweeps.twice(seed)

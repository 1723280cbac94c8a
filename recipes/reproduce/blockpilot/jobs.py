"""What is measured for one seed; each part is kept on disk, so the study goes on where it stopped."""

from recipes.reproduce.blockpilot import costs, marker, protocol, sweeps
from recipes.reproduce.blockpilot.decoding import Array


def best_fixed(swept: sweeps.Swept, seed: int) -> int:
    """The candidate of the most tokens a cycle over the training prompts of the first split."""
    train, _, _ = protocol.fifths(swept.tasks, seed)[0]
    return sweeps.CANDIDATES[int(swept.candidates().tau[train].mean(0).argmax())]


def run(seed: int) -> tuple[sweeps.Swept, int, costs.Costs, marker.Planted, Array]:
    """The sweep, the size that is best for its training prompts, times, the planted marker, the null test."""
    swept = sweeps.sweep(seed)
    best = best_fixed(swept, seed)
    return swept, best, costs.timed((seed, best)), marker.planted(seed), sweeps.twice(seed)

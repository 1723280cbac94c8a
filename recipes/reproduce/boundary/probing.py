"""One head of one seed on held-out text: the jobs that run side by side."""

from bebop.adaptation.probe import probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.boundary.sides import Sides, sides
from recipes.reproduce.study import DEPTH, HELD_OUT, Arm, head, policy, text

HEADS = ("start", "hard_ce", "ce", "tv", "e2e_tv", "nla", "rkl")

Key = tuple[str, int]  # head, seed


def run(key: Key) -> Sides:
    """Train (or find) a head and probe it."""
    name, seed = key
    model = policy() if name == "start" else head(Arm(objective=name, seed=seed))
    return sides(probe(model, text(seed, HELD_OUT), DEPTH, Sampling()))

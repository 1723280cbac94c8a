"""Comparison of ways to choose a block size, on prompts that they have not seen (SPEC 5.6).

Prompts are split by task into fifths. Each fifth is the test set once, the next one the validation set, and the other
three the training set. Results of an arm are pooled over the fifths, so every prompt counts once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from bebop.systems.block.losses import CLOSE, Sweep, best, fit, goals, labels, score
from bebop.systems.block.network import FEATURES, BlockLengthNetwork
from recipes.reproduce.blockpilot.decoding import Array, Counts, loaded
from recipes.reproduce.blockpilot.sweeps import RADIUS, SIZES, TRAINED, Swept
from recipes.reproduce.study import QUICK

FIFTHS = 5
TARGETS = ("classify", "regress")
VARIANTS = tuple((kind, target) for kind in FEATURES for target in TARGETS)
PAPER = ("logits", "classify")
STEPS = 10 if QUICK else 300
DRAWS = 200  # draws of pure noise

Split = tuple[Counts, Counts, Counts]  # rows for training, validation, test


def fifths(tasks: Sequence[str], seed: int) -> list[Split]:
    """Return the five splits, with each fifth as the test set once; a fifth holds a fifth of every task's prompts."""
    dealt, numbers = np.zeros(len(tasks), int), np.random.default_rng(seed)
    for task in dict.fromkeys(tasks):
        own = np.flatnonzero([one == task for one in tasks])
        dealt[numbers.permutation(own)] = np.arange(len(own)) % FIFTHS
    parts = [np.flatnonzero(dealt == part) for part in range(FIFTHS)]
    return [
        (np.concatenate([parts[(i + j) % FIFTHS] for j in (2, 3, 4)]), parts[(i + 1) % FIFTHS], parts[i])
        for i in range(FIFTHS)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Choices of the arms for N prompts of a seed, and their scores."""

    values: dict[str, Array]  # arm -> [N] tokens a cycle, or a second
    chosen: Counts  # [N] index of the predicted size
    label: Counts  # [N] index of the best size
    second: Counts  # [N] index of the predictor's second choice

    def __getitem__(self, arm: str) -> Array:
        return self.values[arm]


def compare(swept: Swept, seed: int, seconds: Array | None, sizes: tuple[int, ...]) -> Compared:
    """Compare all arms; scores are tokens per second if ``seconds`` [C] of a cycle are given, else tokens per cycle."""
    sweeps = {kind: swept.candidates(kind, sizes) for kind in FEATURES}
    table = sweeps["logits"]
    values, label = score(table, seconds), labels(table, seconds)
    arms: dict[str, Array] = {"oracle": values.max(1), "random": values.mean(1)}
    arms["fixed B"] = values[:, sizes.index(TRAINED)]
    chosen, second = np.zeros(len(values), int), np.zeros(len(values), int)
    names = ["best fixed", "per task", "majority", "predictor", "permuted", "on validation", *map(" ".join, VARIANTS)]
    arms |= {name: np.zeros(len(values)) for name in names}
    for number, (train, valid, test) in enumerate(fifths(swept.tasks, seed)):
        fixed = int(values[train].mean(0).argmax())
        arms["best fixed"][test] = values[test, fixed]
        arms["per task"][test] = [values[row, _of_task(swept.tasks, values, train, row, fixed)] for row in test]
        arms["majority"][test] = values[test, np.bincount(label[train]).argmax()]
        worth = {}
        for kind, target in VARIANTS:
            ranked = predict(sweeps[kind], train, target, seconds, 10 * seed + number)
            arms[f"{kind} {target}"][test] = values[test, ranked[test, 0]]
            worth[f"{kind} {target}"] = values[valid, ranked[valid, 0]].mean()
            if (kind, target) == PAPER:
                chosen[test], second[test] = ranked[test, 0], ranked[test, 1]
        arms["on validation"][test] = arms[max(worth, key=worth.__getitem__)][test]
        order = np.random.default_rng(seed).permutation(len(values))
        blind = Sweep(
            sizes=sizes, tokens=table.tokens, cycles=table.cycles, features=table.features[torch.from_numpy(order)]
        )
        ranked = predict(blind, train, "classify", seconds, 10 * seed + number)
        arms["permuted"][test] = values[test, ranked[test, 0]]
    arms["predictor"] = arms[" ".join(PAPER)]
    with torch.no_grad():
        arms["shipped"] = values[np.arange(len(values)), shipped(sizes)(table.features).argmax(1).numpy()]
    return Compared(values=arms, chosen=chosen, label=label, second=second)


@cache
def shipped(sizes: tuple[int, ...]) -> BlockLengthNetwork:
    """Return the network shipped with the built-in model, trained for tokens per cycle on prompts of another stream."""
    network = loaded().parts["block_length"]
    assert isinstance(network, BlockLengthNetwork) and network.candidates == sizes
    return network


def _of_task(tasks: Sequence[str], values: Array, train: Counts, row: int, fixed: int) -> int:
    """Return the index of the best size over the training prompts of a prompt's task; ``fixed`` if there are none."""
    own = [i for i in train if tasks[i] == tasks[row]]
    return int(values[own].mean(0).argmax()) if own else fixed


def predict(table: Sweep, train: Counts, target: str, seconds: Array | None, seed: int) -> Counts:
    """Return indices of sizes [N, C] for all prompts, predicted best first, by a network that saw ``train`` only."""
    network = trained(table, train, target, seconds, seed)
    with torch.no_grad():
        ranked: Counts = network(table.features).argsort(dim=1, descending=True, stable=True).numpy()
    return ranked


def trained(
    table: Sweep, train: Counts, target: str, seconds: Array | None, seed: int, kind: str = "logits"
) -> BlockLengthNetwork:
    """Train a network on the rows ``train`` of a sweep; its default size is the best one for these rows."""
    part, count = table.part(train), table.features.shape[1]
    torch.manual_seed(seed)
    default = table.sizes[int(score(part, seconds).mean(0).argmax())]
    network = BlockLengthNetwork(inputs=count, candidates=table.sizes, default=default, features=kind)
    fit(network, part.features, goals(part, target, seconds), steps=STEPS, lr=1e-3, batch=64, seed=seed)
    return network.requires_grad_(False)


def share(arm: Array, fixed: Array, oracle: Array) -> float:
    """Return an arm's share of the oracle's gain over the best fixed size."""
    return float((arm - fixed).sum() / max((oracle - fixed).sum(), CLOSE))


def noise_gain(values: Array, seed: int) -> float:
    """Return the oracle's gain over the best fixed size if a prompt's sizes differed only by noise.

    Sizes keep their means [C]. The residuals of ``values`` [N, C], after the means of sizes and prompts, are replaced
    by normal draws of the same standard deviation. The gain is a mean over draws.
    """
    rows, columns = values.mean(1, keepdims=True), values.mean(0)
    rest = values - rows - columns + values.mean()
    free = (values.shape[0] - 1) * (values.shape[1] - 1)
    sd = np.sqrt((rest**2).sum() / max(free, 1))
    drawn = columns + np.random.default_rng(seed).normal(0, sd, (DRAWS, *values.shape))
    return float((drawn.max(2).mean(1) - drawn.mean(1).max(1)).mean())


def transfer(first: Array, second: Array) -> tuple[float, float, float]:
    """Judge sizes chosen on one table [N, C] by another table.

    Return (gain, apparent gain, agreement). The gain over the best fixed size of the first table is measured on the
    second table, the apparent gain on the first. Agreement is how often both have the same best size. Gains are
    relative.
    """
    known = np.isfinite(first).all(1) & np.isfinite(second).all(1)
    first, second = first[known], second[known]
    rows, chosen, fixed = np.arange(len(first)), best(first), int(first.mean(0).argmax())
    gains = [float(t[rows, chosen].mean() / t[:, fixed].mean() - 1) for t in (second, first)]
    return gains[0], gains[1], float((chosen == best(second)).mean())


def local(swept: Swept) -> float:
    """Return how often the best size of the whole sweep lies within B +- ``RADIUS``."""
    tau = swept.tokens / swept.cycles
    found = np.array(SIZES)[best(tau[np.isfinite(tau).all(1)])]
    return float((np.abs(found - TRAINED) <= RADIUS).mean())


def tied(values: Array) -> float:
    """Return how often more than one size is best."""
    return float(((values >= values.max(1, keepdims=True) - CLOSE).sum(1) > 1).mean())


def described(compared: Compared) -> Mapping[str, float]:
    """Return accuracy, top-2 accuracy and regret of the predictor."""
    hit = compared.chosen == compared.label
    return {
        "accuracy": float(hit.mean()),
        "top 2": float((hit | (compared.second == compared.label)).mean()),
        "regret": float((compared["oracle"] - compared["predictor"]).mean()),
    }

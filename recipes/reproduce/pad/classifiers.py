"""Classifiers trained for each seed, and their scores of pivots on prompts that they have not seen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bebop.metrics.intervals import Array, Interval, resampled
from bebop.systems.pad.labels import Bools, Definition, Floats, auc
from bebop.systems.pad.network import Features, PivotNetwork, Position
from bebop.systems.pad.training import Examples, PivotTrainer, scores
from recipes.reproduce.pad.labels import PROMPTS, ROLLOUTS, TOL, Labelled, joined, labelled
from recipes.reproduce.study import QUICK, SEEDS

STEPS, ROWS, EVERY = 20 if QUICK else 400, 64, 10
LR, DECAY = 1e-3, 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Settings of one kind of classifier: its training data, features and labels, such as Kind(features="hidden")."""

    train: tuple[str, ...] = ("head", "skewed")  # whose candidates it learns from
    features: Features = "all"
    layer: int = 8
    position: Position = "pred"
    definition: Definition = "residual"
    k: int = ROLLOUTS  # continuations that its labels are made of; it is judged by labels of all
    tol: float = TOL


def fit(kind: Kind, seed: int) -> PivotNetwork:
    """Train the classifier of one seed. The seed sets its training and validation prompts and its initial weights."""
    parts = [_split(kind, labelled(name), seed) for name in kind.train]
    train, validation = (parts[0][i] if len(parts) == 1 else joined(parts[0][i], parts[1][i]) for i in (0, 1))
    torch.manual_seed(seed)
    network = PivotNetwork(size=train.hidden.shape[1], layer=kind.layer, position=kind.position, features=kind.features)
    trainer = PivotTrainer(network, train, validation, lr=LR, weight_decay=DECAY, seed=seed)
    while trainer.version < STEPS:
        trainer.update(ROWS)
        if trainer.version % EVERY == 0:
            trainer.evaluate()
    trainer.take_best()
    return network.eval()


def _split(kind: Kind, own: Labelled, seed: int) -> tuple[Examples, Examples]:
    labels = own.labels(kind.definition, kind.k, kind.tol)
    examples = own.examples(labels, kind.layer, kind.position)
    return examples.of(own.within("train", seed)), examples.of(own.within("validation", seed))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Scores of one kind of classifier on the test prompts of each seed: n candidates per seed."""

    scores: Mapping[int, Floats]
    labels: Mapping[int, Bools]
    prompts: Mapping[int, Array]

    def area(self) -> Interval:
        """Return the AUC, mean over seeds. It is resampled by prompt, with the same prompts for all seeds."""
        return resampled(self.areas, PROMPTS)

    def areas(self, weights: Array) -> Array:
        """Return the mean AUC over seeds [R], for prompt weights [R, prompts]."""
        found = [
            [auc(self.scores[s], self.labels[s], row[self.prompts[s].astype(int)]) for s in SEEDS] for row in weights
        ]
        return np.array(found).mean(1)

    def seed_area(self, seed: int) -> float:
        """Return the AUC of one seed."""
        return auc(self.scores[seed], self.labels[seed])


def tested(kind: Kind, on: str, networks: Mapping[int, PivotNetwork]) -> HeldOut:
    """Score the test candidates of ``on`` with one classifier of ``kind`` per seed; label them as ``kind`` defines."""
    own = labelled(on)
    labels = own.labels(kind.definition, ROLLOUTS, kind.tol)
    examples = own.examples(labels, kind.layer, kind.position)
    chosen = {seed: own.within("test", seed) for seed in SEEDS}
    return HeldOut(
        scores={s: scores(networks[s], examples.of(c)) for s, c in chosen.items()},
        labels={s: labels[c] for s, c in chosen.items()},
        prompts={s: own.prompts[c] for s, c in chosen.items()},
    )


def fitted(kind: Kind) -> dict[int, PivotNetwork]:
    """Train one classifier per seed."""
    return {seed: fit(kind, seed) for seed in SEEDS}


def difference(one: HeldOut, other: HeldOut) -> Interval:
    """Return the AUC of ``one`` minus the AUC of ``other``, on the same prompts."""
    return resampled(lambda w: one.areas(w) - other.areas(w), PROMPTS)


def agreement(first: Bools, second: Bools, prompts: Array) -> Interval:
    """Return Cohen's kappa of two label sets, resampled by prompt."""

    def by_prompt(values: Bools) -> Array:
        return np.bincount(prompts.astype(int), values.astype(float), minlength=PROMPTS)

    ones = by_prompt(np.ones_like(first))

    def kappas(weights: Array) -> Array:
        agreed, a, b = ((weights @ by_prompt(v)) / (weights @ ones) for v in (first == second, first, second))
        chance = a * b + (1 - a) * (1 - b)
        return np.asarray((agreed - chance) / (1 - chance))

    return resampled(kappas, PROMPTS)


def mean_score_bins(one: HeldOut, bins: int = 5) -> list[tuple[float, Interval, int]]:
    """Return mean score, share of pivots (resampled by prompt) and number of candidates in each bin, over all seeds."""
    given = np.concatenate([one.scores[s] for s in SEEDS])
    labels = np.concatenate([one.labels[s] for s in SEEDS]).astype(float)
    prompts = np.concatenate([one.prompts[s] for s in SEEDS]).astype(int)
    place = np.minimum((given * bins).astype(int), bins - 1)
    return [
        (float(given[place == i].mean()), _share(labels[place == i], prompts[place == i]), int((place == i).sum()))
        for i in range(bins)
        if (place == i).any()
    ]


def _share(values: Array, prompts: Sequence[int] | Array) -> Interval:
    totals, counts = (np.bincount(prompts, w, minlength=PROMPTS) for w in (values, np.ones_like(values)))
    with np.errstate(invalid="ignore", divide="ignore"):
        return resampled(lambda w: (w @ totals) / (w @ counts), PROMPTS)

"""Stored labels: candidates of 350 prompts with their continuations, and the hidden states that a classifier reads.

``python -m bebop.adapt part=pivot`` made them (README.md has the commands). They are stored unchanged.
"""

import gzip
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bebop.adaptation.candidates import layer_states
from bebop.systems.pad.labels import Bools, Definition, Floats, Rollouts, loss_of_value, pivots, split_of
from bebop.systems.pad.network import Position
from bebop.systems.pad.training import Examples
from recipes.reproduce.study import FOLDER, QUICK, policy

STORED = Path(__file__).parent / "labels"
PROMPTS = 350  # numbers 0 .. 349
FEWEST = 60 if QUICK else PROMPTS  # prompts whose labels are used
LAYERS = (2, 5, 8, 11)  # of 12, counted from 0; 8 is the default
ROLLOUTS, TOL = 12, 0.1
POSITIONS: tuple[Position, ...] = ("pred", "cand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """Candidates of one kind of draft and their hidden states; makes training examples from both."""

    rows: list[Rollouts]
    states: Tensor  # [n, layers, 2, d]

    @property
    def prompts(self) -> Floats:
        """Return the prompt number of each candidate [n]."""
        return np.array([row.prompt for row in self.rows], dtype=np.float64)

    def losses(self, definition: Definition = "residual", k: int = ROLLOUTS) -> Floats:
        """Return the loss in value of each candidate [n], by the first ``k`` continuations."""
        return loss_of_value(self.rows, definition, 0, k)

    def labels(self, definition: Definition = "residual", k: int = ROLLOUTS, tol: float = TOL) -> Bools:
        """Mark the candidates [n] that are pivots."""
        return pivots(self.losses(definition, k), tol, np.array([row.judged for row in self.rows], dtype=bool))

    def examples(self, labels: Bools, layer: int = 8, position: Position = "pred") -> Examples:
        """Return the inputs and labels of a classifier for this layer and position."""
        return Examples(
            hidden=self.states[:, LAYERS.index(layer), POSITIONS.index(position)],
            p=torch.tensor([row.p for row in self.rows]),
            entropy=torch.tensor([row.entropy for row in self.rows]),
            pivots=torch.from_numpy(labels).long(),
        )

    def within(self, split: str, seed: int) -> Bools:
        """Mark the candidates [n] that belong to a split; each seed splits the prompts anew."""
        return np.array([split_of(row.prompt, seed) == split for row in self.rows], dtype=bool)


def joined(one: Examples, other: Examples) -> Examples:
    """Concatenate two sets of examples."""
    fields = ("hidden", "p", "entropy", "pivots")
    return Examples(**{name: torch.cat([getattr(one, name), getattr(other, name)]) for name in fields})


def stored(name: str) -> list[Rollouts]:
    """Read the rows of a stored file: ``head``, ``head_again`` (the second, independent set) or ``skewed``."""
    with gzip.open(STORED / f"{name}.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [Rollouts(**{**row, "prefix": tuple(row["prefix"])}) for row in rows if row["prompt"] < FEWEST]


@cache
def labelled(name: str) -> Labelled:
    """Return candidates with their states; the states are computed once and kept under ``runs/reproduce``."""
    rows = stored(name)
    path = FOLDER / "pad" / f"{name}-{len(rows)}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(layer_states(policy(), [(*row.prefix, row.token) for row in rows], LAYERS), path)
    return Labelled(rows=rows, states=torch.load(path, weights_only=True))


def prepare(name: str) -> None:
    """Compute the states once, so that no two processes compute them at the same time."""
    labelled(name)

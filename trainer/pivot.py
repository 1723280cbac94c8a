"""Training of the pivot classifier (SPEC 4.2): cross-entropy weighted by class, the best on validation is kept."""

import copy
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from bebop.model.pivot import PivotNetwork
from bebop.trainer.chains import rows_of_step
from bebop.trainer.pivot_labels import Bools, Floats, auc


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """n candidates: what the network sees of each, and whether it is a pivot."""

    hidden: Tensor  # [n, d]
    p: Tensor  # [n] probability under the target
    entropy: Tensor  # [n] of the target, nats
    pivots: Tensor  # [n] 0 or 1

    def of(self, chosen: Bools) -> Self:
        """Some of them."""
        mask = torch.from_numpy(chosen)
        return type(self)(
            hidden=self.hidden[mask], p=self.p[mask], entropy=self.entropy[mask], pivots=self.pivots[mask]
        )

    def __len__(self) -> int:
        return len(self.pivots)


class PivotTrainer:
    """AdamW on a training split; ``version`` counts updates."""

    def __init__(
        self, network: PivotNetwork, train: Examples, validation: Examples, *, lr: float, weight_decay: float, seed: int
    ) -> None:
        """Both splits need pivots and others; features are standardised by the first."""
        self.network, self.train, self.validation, self.seed = network, train, validation, seed
        network.standardise(train.hidden, train.p, train.entropy)
        counts = torch.bincount(train.pivots, minlength=2).float()
        self.weights = len(train) / (2 * counts)  # of a class, inverse to its frequency
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=weight_decay)
        self.version = 0
        self.best: tuple[float, int, dict[str, Tensor]] = (-1.0, 0, copy.deepcopy(network.state_dict()))

    def update(self, rows: int) -> float:
        """One step on ``rows`` examples, epoch after epoch in orders of their own; its loss."""
        chosen = torch.tensor(rows_of_step(len(self.train), rows, self.seed, self.version))
        train = self.train
        logits = self.network(train.hidden[chosen], train.p[chosen], train.entropy[chosen])
        loss = cross_entropy(logits, train.pivots[chosen], weight=self.weights)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.version += 1
        return float(loss.detach())

    def evaluate(self) -> float:
        """AUC on the validation split; weights with the best so far are kept."""
        found = auc(scores(self.network, self.validation), self.validation.pivots.numpy().astype(bool))
        if found > self.best[0]:
            self.best = (found, self.version, copy.deepcopy(self.network.state_dict()))
        return found

    def take_best(self) -> tuple[float, int]:
        """Put the best weights into the network; their AUC and version."""
        self.network.load_state_dict(self.best[2])
        return self.best[0], self.best[1]

    def state_dict(self) -> dict[str, Any]:
        """All that an exact resume needs."""
        return {
            "version": self.version,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": list(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a ``state_dict``."""
        self.version = state["version"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        found, version, weights = state["best"]
        self.best = (found, version, weights)


@torch.no_grad()
def scores(network: PivotNetwork, examples: Examples) -> Floats:
    """Pivot scores [n]."""
    encoded = network.encode(examples.hidden)
    return np.asarray(network.score(encoded, examples.p, examples.entropy).double().numpy())

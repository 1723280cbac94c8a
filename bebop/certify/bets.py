"""Bets on directions: for each, ln e of every share, what it would move, and what it would have shown."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.directions import FLOOR, Direction
from bebop.certify.evidence import SHARES, Array, log_mean_exp, share_bound, visible_share

SAMPLE = 64  # of so many positions one is enumerated, to learn how fast a fault would show
WORST = 16  # positions that are kept of each direction


class Bets:
    """Running bets on named directions, for R parallel runs."""

    def __init__(self, names: Sequence[str], runs: int) -> None:
        self.names = tuple(names)
        self.tested: set[str] = set()
        self._at = {name: i for i, name in enumerate(self.names)}
        self._logs = np.zeros((len(names), runs, len(SHARES)))
        self._moved = np.zeros(len(names))  # total variation between direction and claim, summed over positions
        self._growth = np.zeros((2, len(names), len(SHARES)))  # ln(1 + share (r/p - 1)) and its square, under the fault
        self._sampled = np.zeros(len(names))  # positions that those are sums of
        self._worst: dict[str, list[tuple[float, int, int]]] = {}  # r/p, request, position

    def add(self, names: Sequence[str], masks: Array, ratio: Array, tv: Array, places: NDArray[np.int64]) -> None:
        """Bet on one direction at subsets of positions: ``masks`` [names, n], ``ratio`` r(x)/p(x) [R, n], ``tv`` [n].

        ``places`` [n, 2]: request and position, to find the worst again.
        """
        own = [self._at[name] for name in names]
        excess = ratio - 1
        for e, share in enumerate(SHARES):
            self._logs[own, :, e] += masks @ np.log1p(share * excess).T
        self._moved[own] += masks @ tv
        for name, mask in zip(names, masks, strict=True):
            if mask.any():
                self.tested.add(name)
                self._keep(name, np.where(mask > 0, ratio[0], 0.0), places)

    def learn(self, names: Sequence[str], masks: Array, direction: Direction, p: Tensor) -> None:
        """How fast a fault towards this direction shows, by enumeration of rows: ``p`` [n, M], ``masks`` [names, n]."""
        cells = torch.arange(p.shape[1], device=p.device).expand(len(p), -1)
        excess = direction.at(cells) / p.clamp_min(FLOOR) - 1
        shares = torch.tensor(SHARES, dtype=p.dtype, device=p.device)[:, None, None]
        own = [self._at[name] for name in names]
        grown = shares * excess  # [shares, n, M]
        logs = torch.log1p(grown)
        grown.add_(1).mul_(p).mul_(logs)
        for moment in (0, 1):
            self._growth[moment, own] += masks @ grown.sum(-1).T.cpu().numpy()
            grown.mul_(logs)
        self._sampled[own] += len(p)

    def _keep(self, name: str, ratio: Array, places: NDArray[np.int64]) -> None:
        best = np.argsort(-ratio, kind="stable")[:WORST]
        new = [(float(ratio[i]), int(places[i, 0]), int(places[i, 1])) for i in best]
        self._worst[name] = sorted(self._worst.get(name, []) + new, reverse=True)[:WORST]

    def log_es(self) -> Array:
        """ln e of every direction and run, mixed over shares: [names, R]."""
        return log_mean_exp(self._logs)

    def bound(self, name: str, tokens: int, run: int = 0) -> tuple[float, float]:
        """Upper bound of the share of a direction, and of the total variation per token that comes from it."""
        share = share_bound(self._logs[self._at[name], run])
        return share, share * float(self._moved[self._at[name]]) / max(tokens, 1)

    def enumerated(self, name: str) -> bool:
        """Whether it is known how fast a fault towards it would show."""
        return bool(self._growth[1, self._at[name]].any())

    def visible(self, name: str, tokens: int, weight: float, alpha: float) -> tuple[float, float]:
        """The smallest share that shows with 90 %, and its total variation per token (``evidence.visible_share``)."""
        at = self._at[name]
        growth, square = self._growth[:, at] / max(self._sampled[at], 1)
        share = visible_share(tokens, growth, square, weight, alpha)
        return share, share * float(self._moved[at]) / max(tokens, 1)

    def worst(self, name: str) -> list[tuple[int, int, float]]:
        """Request, position, and what its token gave in ln e at the likeliest share, the most first; of run 0."""
        share = SHARES[int(self._logs[self._at[name], 0].argmax())]
        return [(request, at, float(np.log1p(share * (r - 1)))) for r, request, at in self._worst.get(name, [])]

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "names": self.names,
            "tested": sorted(self.tested),
            "logs": self._logs.copy(),
            "moved": self._moved.copy(),
            "growth": self._growth.copy(),
            "sampled": self._sampled.copy(),
            "worst": {name: list(kept) for name, kept in self._worst.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written; ``ValueError`` if it knows other directions."""
        if tuple(state["names"]) != self.names or np.shape(state["logs"]) != self._logs.shape:
            raise ValueError("the checkpoint's evidence is of other directions or runs: start the evidence anew")
        self.tested = set(state["tested"])
        self._logs, self._moved = np.array(state["logs"]), np.array(state["moved"])
        self._growth, self._sampled = np.array(state["growth"]), np.array(state["sampled"])
        self._worst = {name: [tuple(one) for one in kept] for name, kept in state["worst"].items()}

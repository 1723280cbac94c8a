"""A direction that is learned: p(x) exp(w · f(x)) / z, where w fits the tokens of earlier cohorts.

For faults that nobody thought of: whatever makes tokens likelier by a smooth function of what is known of them. w is
one Newton step from 0 on the log-likelihood: (F + ridge)^-1 S, with the score S = sum of f(x) - E f, and for the Fisher
information F the sum of outer products of the same, whose expectation under the claim is F itself.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.directions import Rows
from bebop.certify.evidence import Array, log_mean_exp

FEATURES = ("log p", "row before", "bigram", "draft", "seen", "repeat", "stop", "place among ids")
RIDGE = 100.0  # about as many tokens
LARGEST = 1.0  # weight
STEPS = (0.25, 0.5, 1.0)  # of w, mixed with equal weights; each twice the one before
CLAMP = 6.0  # of features, so that no rare token decides


class Tilt:
    """Bets on the tilted claim; nothing in the first cohort, for it has learned nothing."""

    def __init__(self, runs: int) -> None:
        size = len(FEATURES)
        self._logs = np.zeros((runs, len(STEPS)))
        self._score = np.zeros((runs, size))
        self._fisher = np.zeros((runs, size, size))
        self._new: list[Array] = []  # deviations [R, n, F] of this cohort

    def log_es(self) -> Array:
        """ln e [R]."""
        return log_mean_exp(self._logs)

    def weights(self) -> Array:
        """w [R, F] from earlier cohorts."""
        solved = np.linalg.solve(self._fisher + RIDGE * np.eye(len(FEATURES)), self._score[..., None])
        return np.clip(solved[..., 0], -LARGEST, LARGEST)

    def add(self, rows: Rows, cells: Tensor) -> Array:
        """Bet on tokens with columns ``cells`` [n, R]; what each of run 0 gave, [n]."""
        p, w = rows.p, torch.from_numpy(self.weights()).to(rows.p.device)
        found = features(rows)
        apart = [None if f is None else f - (p * f).sum(-1, keepdim=True) for f in found]
        nothing = torch.zeros_like(cells, dtype=torch.float64)
        own = torch.stack([nothing if one is None else one.gather(1, cells) for one in apart], -1)  # [n, R, F]
        self._new.append(own.transpose(0, 1).cpu().numpy())
        gain = np.zeros(len(p))
        for run in range(w.shape[0] if bool(w.any()) else 0):
            lean = torch.zeros_like(p)
            for weight, one in zip(w[run].tolist(), apart, strict=True):
                if one is not None:
                    lean.add_(one, alpha=weight)
            gains = _gains(p, lean, own[:, run] @ w[run])
            self._logs[run] += gains.sum(0)
            gain = gains[:, int(self._logs[0].argmax())] if run == 0 else gain
        return gain

    def close(self) -> None:
        """Learn from the cohort that is over."""
        for own in self._new:
            self._score += own.sum(1)
            self._fisher += np.einsum("rni,rnj->rij", own, own)
        self._new = []

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """What a checkpoint keeps."""
        return {"logs": self._logs.copy(), "score": self._score.copy(), "fisher": self._fisher.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self._logs, self._score = np.array(state["logs"]), np.array(state["score"])
        self._fisher, self._new = np.array(state["fisher"]), []


def _gains(p: Tensor, lean: Tensor, taken: Tensor) -> Array:
    """ln of tilted claim over claim at each step of w, [n, STEPS]: of tokens whose tilt is ``taken`` [n]."""
    grown = (STEPS[0] * lean).exp_()  # and its square and fourth power: one exponential for all steps
    found = []
    for step in STEPS:
        found.append(step * taken - (p * grown).sum(-1).log())
        grown = grown * grown
    gains: Array = torch.stack(found, -1).cpu().numpy()
    return gains


def features(rows: Rows) -> list[Tensor | None]:
    """Functions of the columns [n, M] that are known beforehand; None: not here."""
    p, part = rows.p, rows.part
    log_p = p.clamp_min(1e-9).log()

    def against(other: Tensor | None) -> Tensor | None:
        return None if other is None else (other.clamp_min(1e-9).log() - log_p).clamp_(-CLAMP, CLAMP)

    stops = None
    if part.stops:
        stops = (~rows.without(rows.stops())).double()
    return [
        log_p.clamp(-CLAMP, CLAMP),
        against(part.before),
        against(rows.bigram),
        against(part.draft),
        None if part.seen is None else part.seen.double(),
        (~rows.without(rows.column(part.last[:, None]))).double(),
        stops,
        rows.middle(),
    ]

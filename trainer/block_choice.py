"""Labels, training and evaluation of a choice of block sizes, from a table of what each size gave (SPEC 5.2, 5.6)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss

from bebop.intervals import Interval, ratio, resampled
from bebop.model.block_length import BlockLengthNetwork

Array = NDArray[np.float64]
CLOSE = 1e-9  # values nearer to one another than this are a tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """N prompts answered with each of C block sizes, and what a choice may look at."""

    sizes: tuple[int, ...]  # [C] rising
    tokens: Array  # [N, C] emitted; what follows the end of an answer in its last cycle is not
    cycles: Array  # [N, C]
    features: Tensor  # [N, F] of each prompt, see ``bebop.model.block_length.FEATURES``

    @property
    def tau(self) -> Array:
        """Tokens a cycle [N, C]."""
        return self.tokens / self.cycles

    def part(self, chosen: Sequence[int] | NDArray[np.int64]) -> "Sweep":
        """Some of the prompts."""
        rows = np.asarray(chosen)
        return Sweep(
            sizes=self.sizes,
            tokens=self.tokens[rows],
            cycles=self.cycles[rows],
            features=self.features[torch.from_numpy(rows)],
        )


def best(values: Array) -> NDArray[np.int64]:
    """Index [N] of the largest value of each row [N, C]; of those that tie, the first, which is the smallest block."""
    return (values >= values.max(1, keepdims=True) - CLOSE).argmax(1)


def labels(sweep: Sweep, seconds: Array | None = None) -> NDArray[np.int64]:
    """The best size of each prompt [N], as an index: by tau, or by tokens per time where ``seconds`` [C] a cycle of
    each size takes are given (SPEC 5.2: the paper's labels are the former, its claim is about the latter)."""
    return best(score(sweep, seconds))


def score(sweep: Sweep, seconds: Array | None = None) -> Array:
    """What a size is judged by [N, C]: tokens a cycle, or tokens a second."""
    return sweep.tau if seconds is None else sweep.tau / seconds


def split(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Numbers 0..count-1 in three parts, 60 / 20 / 20, for training, choosing and testing."""
    order = np.random.default_rng(seed).permutation(count)
    first, second = round(0.6 * count), round(0.8 * count)
    return order[:first], order[first:second], order[second:]


def goals(sweep: Sweep, target: str, seconds: Array | None = None) -> Tensor:
    """What a network is trained on: the best size of each prompt [N], or the score of every size [N, C], standardised
    as a whole, which leaves the best of a row the best."""
    if target == "classify":
        return torch.from_numpy(labels(sweep, seconds))
    values = score(sweep, seconds)
    return torch.from_numpy((values - values.mean()) / max(values.std(), CLOSE)).float()


def fit(
    network: BlockLengthNetwork, features: Tensor, wanted: Tensor, *, steps: int, lr: float, batch: int, seed: int
) -> float:
    """Train on ``goals``, by cross-entropy or squared error; the mean loss of the last tenth of the steps."""
    loss_of = mse_loss if wanted.is_floating_point() else cross_entropy
    numbers = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    network.train()
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(wanted), (min(batch, len(wanted)),), generator=numbers)
        loss = loss_of(network(features[chosen]), wanted[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    network.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A choice on prompts it has not seen, beside those that it has to beat."""

    accuracy: float  # how often it is the best size
    tau: dict[str, Interval]  # arm -> tokens a cycle
    share: Interval  # of the oracle's gain over the best fixed size

    def summary(self) -> dict[str, object]:
        """Plain data for JSON."""
        arms = {arm: [i.value, i.low, i.high] for arm, i in self.tau.items()}
        return {"accuracy": self.accuracy, "tau": arms, "share": [self.share.value, self.share.low, self.share.high]}


def evaluate(sweep: Sweep, choice: NDArray[np.int64], fixed: int, seconds: Array | None = None) -> Evaluated:
    """Compare a choice [N] (indices of sizes) with a fixed one and with the best of each prompt.

    ``fixed``: index of the size that was best on the training prompts; ``seconds`` as for ``labels``: then the score is
    tokens per time, else tokens a cycle. Scores are means over prompts, intervals resample prompts.
    """
    values = score(sweep, seconds)
    rows, oracle = np.arange(len(values)), best(values)
    arms = {
        "predicted": values[rows, choice],
        "best_fixed": values[rows, np.full_like(choice, fixed)],
        "oracle": values[rows, oracle],
        **{f"fixed_{size}": values[:, i] for i, size in enumerate(sweep.sizes)},
    }
    ones = np.ones(len(rows))
    gained, possible = arms["predicted"] - arms["best_fixed"], arms["oracle"] - arms["best_fixed"]

    def share(weights: Array) -> Array:
        return (weights @ gained) / np.maximum(weights @ possible, CLOSE)

    return Evaluated(
        accuracy=float((choice == oracle).mean()),
        tau={name: ratio(own, ones) for name, own in arms.items()},
        share=resampled(share, len(rows)),
    )

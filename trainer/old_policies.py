"""The policy's last few versions, kept to compare each token with the weights that produced it.

Engine and trainer can only be compared under the same weights. With ``rollout.staleness`` > 0 most completions were
begun under older weights than the trainer's. So at most steps no token at all is of the current weights: tokens of
version v have to be scored under version v. Every completion begins with tokens whose whole context is of one version,
at most ``staleness`` updates old. With that many versions kept, each step has tokens to compare, whatever the timing of
engine and trainer, and whether keys and values are kept or recomputed.

The price has three parts. Host memory holds ``staleness`` times the trained weights in the model's dtype, those of an
adapter in fp32 (each rank keeps its shard). Each step copies the weights once. And there are passes over a few
completions (``monitor.check_completions``, and those of the certificate). Checkpoints do not hold old versions: after a
resume, completions that were finished before it are not compared.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from bebop.metrics.metrics import Metrics, merge
from bebop.trainer.losses import same_weights_metrics
from bebop.trainer.packing import PackedRows
from bebop.trainer.scorer import Scorer, reshard

T = TypeVar("T")


class OldPolicies:
    """Weights of the last ``count`` versions, by version, on the CPU. All ranks make the same calls."""

    def __init__(self, scorer: Scorer, count: int, dtype: torch.dtype | None = None) -> None:
        """Start without versions; ``dtype`` is that of the weights sent to engines; None: that of the trainer's."""
        self.scorer, self.count, self.dtype = scorer, count, dtype
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, version: int) -> None:
        """Store the current weights as ``version``; drop versions too old for the next update's completions."""
        if self.count:
            self._kept = {v: weights for v, weights in self._kept.items() if v > version - self.count}
            self._kept[version] = self._copies(self.dtype)

    def forget(self) -> None:
        """Drop all versions, because other weights were loaded."""
        self._kept = {}

    @property
    def versions(self) -> list[int]:
        """Return the stored versions, in order."""
        return sorted(self._kept)

    @torch.no_grad()
    def compare(self, packed: Sequence[PackedRows], versions: Collection[int]) -> Metrics:
        """Compare log-probs of this rank's rows under each stored one of ``versions`` with the engine's.

        Metrics are those of ``same_weights_metrics``.
        """

        def under(version: int) -> Metrics:
            return merge(*[same_weights_metrics(rows, self.scorer(rows)[0], version) for rows in packed])

        return merge(*self.visit([v for v in self.versions if v in versions], under))

    def visit(self, versions: Sequence[int], read: Callable[[int], T]) -> list[T]:
        """Return ``read(version)`` for each of some stored versions, each called under that version's weights.

        Afterwards the policy has its own weights again.
        """
        if not versions:
            return []
        own = self._copies()
        try:
            return [self._read(version, read) for version in versions]
        finally:
            self._load(own)

    def _read(self, version: int, read: Callable[[int], T]) -> T:
        self._load(self._kept[version])
        return read(version)

    @torch.no_grad()
    def _copies(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Return copies of this rank's part of each trained parameter, on the CPU, in pinned memory if from a GPU."""
        cuda = self.scorer.policy.device.type == "cuda"
        found = []
        for part in self._parts():
            own = part.to(dtype or part.dtype)  # on the GPU, where it is fast
            found.append(torch.empty(own.shape, dtype=own.dtype, pin_memory=cuda).copy_(own, non_blocking=True))
        if cuda:
            torch.cuda.synchronize()
        return found

    @torch.no_grad()
    def _load(self, weights: Sequence[Tensor]) -> None:
        for part, tensor in zip(self._parts(), weights, strict=True):
            part.copy_(tensor)

    def _parts(self) -> list[Tensor]:
        """Return the parts of the trained parameters on this rank, not copies."""
        reshard(self.scorer)  # else some are whole, and changes of those would be lost
        trained = (p for p in self.scorer.parameters() if p.requires_grad)  # frozen ones are the same in all versions
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in trained]


def evenly_spaced(items: Sequence[T], count: int) -> list[T]:
    """Return ``count`` of the items (all, if there are fewer), evenly spaced."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]

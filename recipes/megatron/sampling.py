"""Sampling distributions whose vocabulary is split over tensor ranks; the objectives of ``bebop.trainer`` take them as
such."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from bebop.errors import UserError
from bebop.megatron_job.parallel import Place
from bebop.trainer.objectives import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSampling(Sampling):
    """A distribution over shards of logits, in the order of the group's ranks."""

    group: dist.ProcessGroup | None = None  # None: the vocabulary is whole

    def options(self) -> dict[str, Any]:
        """As the losses take them."""
        names = ("temperature", "target_top_p", "target_top_k", "group")
        return {name: getattr(self, name) for name in names}


def split_sampling(sampling: Sampling, place: Place) -> SplitSampling:
    """``sampling`` over the tensor ranks; truncated distributions need whole rows."""
    group = place.tensor_group if place.tensors > 1 else None
    if group is not None and (sampling.target_top_p < 1 or sampling.target_top_k > 0):
        raise UserError("data.sampling: top_p and top_k need the whole vocabulary in one place: set parallel.tensor=1")
    return SplitSampling(
        temperature=sampling.temperature,
        target_top_p=sampling.target_top_p,
        target_top_k=sampling.target_top_k,
        group=group,
    )

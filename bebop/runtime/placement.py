"""Reserves CPUs and GPUs for the actors of a job: a Ray placement group for the trainer and one for the rollout."""

import math
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.rollout.engines import engine_module

WAIT_SECONDS = 60.0  # for a reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal shares of a cluster, one for each actor; a share lies on one machine."""

    name: str
    count: int
    cpus: int
    gpus: float
    strategy: str  # Ray's; STRICT_PACK puts all shares on one machine


def pools(config: JobConfig, gpus: float) -> tuple[Pool, Pool]:
    """Return the pools of trainer and rollout for a cluster with that many GPUs.

    Engines that span several GPUs do not share them.
    """
    rollout, trainer = config.rollout, config.trainer
    each, left = engine_module(config).gpus(config), gpus
    if config.model.device == "cpu" or not gpus:
        each = share = 0.0
    elif each >= 1 and gpus - each * rollout.workers >= 1:
        left = gpus - each * rollout.workers
        share = _share(left, trainer.ranks)
    elif each > 1:
        wanted = each * rollout.workers + 1
        raise UserError(f"rollout.sglang.tensor_parallel={each:.0f} is not possible: {wanted:.0f} of {gpus:.0f} GPUs")
    elif each:
        each = share = _share(gpus, trainer.ranks + rollout.workers)
    else:
        share = _share(gpus, trainer.ranks)
    return (
        Pool(name="trainer", count=trainer.ranks, cpus=trainer.threads, gpus=share, strategy="STRICT_PACK"),
        Pool(name="rollout", count=rollout.workers, cpus=rollout.threads, gpus=each, strategy="PACK"),
    )


def reserve(pool: Pool) -> list[dict[str, Any]]:
    """Reserve a pool and return Ray's options for each of its actors; ``UserError`` if the cluster has no room."""
    bundle = {"CPU": float(pool.cpus)} | ({"GPU": pool.gpus} if pool.gpus else {})
    group = placement_group([bundle] * pool.count, strategy=pool.strategy)
    if not group.wait(WAIT_SECONDS):
        offered = {name: value for name, value in ray.available_resources().items() if name in bundle}
        where = "on one machine" if pool.strategy == "STRICT_PACK" else "in the cluster"
        raise UserError(f"the {pool.name} needs {pool.count} times {bundle} {where}; free in all are {offered}")
    return [
        {
            "num_cpus": pool.cpus,
            "num_gpus": pool.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
        }
        for place in range(pool.count)
    ]


def _share(gpus: float, processes: int) -> float:
    """Return the part of a GPU that each process gets."""
    return 1 / max(1, math.ceil(processes / gpus))

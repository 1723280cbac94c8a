"""Search for better settings: another split of the GPUs, with a simulation each, or another draft length or batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bebop.config.simulate import SimulateConfig
from bebop.simulation.costs import Costs, emitted
from bebop.simulation.run import Simulated, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Split of GPUs between trainer and rollouts, with its simulation."""

    trainer_gpus: int
    workers: int
    result: Simulated


def splits(config: SimulateConfig) -> Iterator[tuple[int, SimulateConfig]]:
    """Yield sensible splits of the same GPUs as (GPUs of the trainer, configuration).

    The time of an update is assumed to be inversely proportional to the trainer's GPUs. In practice each further GPU
    gains less, since they exchange data.
    """
    fleet, costs = config.fleet, config.costs
    total = fleet.trainer_gpus + fleet.workers * fleet.gpus_per_worker
    tried = {max(1, round(total * share / 16)) for share in range(1, 16)} | {fleet.trainer_gpus}
    for trainer in sorted(tried):
        workers = (total - trainer) // fleet.gpus_per_worker
        if workers < 1:
            continue
        faster = fleet.trainer_gpus / trainer
        update = replace(costs, update=costs.update * faster, update_token=costs.update_token * faster)
        yield trainer, replace(config, fleet=replace(fleet, workers=workers, trainer_gpus=trainer), costs=update)


def best_splits(config: SimulateConfig) -> list[Split]:
    """Simulate all splits and return them with their results."""
    return [
        Split(trainer_gpus=trainer, workers=other.fleet.workers, result=simulate(other))
        for trainer, other in splits(config)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speed-up of a full batch with K drafts: its tokens a second over those of plain decoding at the same batch."""

    draft_tokens: int
    batch: int
    accept_length: float
    gain: float


def speculation(config: SimulateConfig) -> list[Speculation]:
    """Compute the gain at every draft length with a rate, and at batches up to the slots, without a simulation."""
    found = []
    answers = config.completions
    batches = sorted({1 << i for i in range(20) if 1 << i < config.fleet.slots} | {config.fleet.slots})
    plain = Costs(config.costs, 0, config.grain)
    for drafts in range(len(answers.accept_rates) + 1):
        costs, (length, _) = Costs(config.costs, drafts, config.grain), emitted(replace(answers, draft_tokens=drafts))
        found += [
            Speculation(
                draft_tokens=drafts, batch=n, accept_length=length, gain=length * plain.cycle(n) / costs.cycle(n)
            )
            for n in batches
        ]
    return found

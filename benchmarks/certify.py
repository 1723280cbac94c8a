"""Cost of the certificate in a job: the trainer's readings, against its updates.

Times are processor seconds of this process, so that other work on the machine matters little. The trainer's time is the
least that a step takes. Readings are timed alone; updates with and without a reading also take turns, which gives the
same with more noise. Completions come from the previous weights, as in an asynchronous job: a reading has to load these
weights, too.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.monitor import decode, grouped, percent, step_requests
from bebop.bench.record import noted
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.monitor.certified import chosen, untestable
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer.certify import Certifier
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Trajectory


def run(config: JobConfig, rounds: int) -> list[dict[str, Any]]:
    """Return the seconds of an update, and the seconds that a reading every ``monitor.certify_every`` steps adds.

    Raises ``UserError`` if there is no reading.
    """
    every = config.monitor.certify_every
    if not every or untestable(config):
        raise UserError(f"monitor.certify_every={every}: {untestable(config) or 'give 1 or more'}")
    policy = load_policy(config.model, need_head=True)
    source = PromptSource(config.task, chat_encoder(policy.tokenizer), 1024)
    answered = grouped(config, source, decode(config, policy, step_requests(config, policy, source), False)[1])
    bench = _Bench(config, PolicyTrainer(policy, config), answered)
    with tqdm(total=2 * rounds, desc="certify") as progress:
        for turn in range(rounds + 1):
            for reads in (True, False) if turn % 2 else (False, True):
                bench.step(reads, counts=turn > 0)  # the first turn warms up
                progress.update(turn > 0)
    update, reading = float(np.median(bench.steps[False])), float(np.median(bench.readings))
    added = {name: value / every for name, value in percent(bench.steps).items()}

    def row(part: str, seconds: float) -> dict[str, Any]:
        return {"part": part, "s/update": update, "added s": seconds, "added %": 100 * seconds / update}

    timed = row(f"certificate, each {every} steps, timed", reading / every)
    timed |= {"s/reading": reading, "tokens/reading": bench.tokens}
    return [timed, row(f"certificate, each {every} steps, in turns", added["added %"] / 100 * update) | added]


class _Bench:
    """Trainer that learns from the same completions repeatedly, with or without a reading before each update."""

    def __init__(self, config: JobConfig, trainer: PolicyTrainer, groups: Sequence[Group]) -> None:
        self.trainer, self.groups = trainer, groups
        self.certifier = Certifier(trainer.scorer, trainer.old_policies, config)
        self.steps: dict[bool, list[float]] = {True: [], False: []}
        self.readings: list[float] = []
        self.tokens = 0  # of a reading

    def step(self, reads: bool, counts: bool) -> None:
        """Make one update; time it if ``counts``."""
        version = self.trainer.version
        batch = Batch(groups=tuple(written(self.groups, max(0, version - 1))))
        self.certifier.begin(0)  # answers that come again are no evidence
        started = time.process_time()
        said = self.certifier.read(chosen(batch.groups), 0, version) if reads else None
        read = time.process_time()
        self.trainer.update(batch)
        if counts:
            self.steps[reads].append(time.process_time() - started)
            noted({"reads": reads, "s/update": self.steps[reads][-1], "s/reading": read - started if reads else None})
        if counts and said is not None:
            self.readings.append(read - started)
            self.tokens = said.tokens


def written(groups: Sequence[Group], version: int) -> list[Group]:
    """Return the same completions as if sampled by ``version``; every other one gets a reward."""

    def one(answer: Completion, number: int) -> Trajectory:
        versions = np.full(len(answer.token_ids), version)
        return Trajectory.single(
            completion=dataclasses.replace(answer, versions=versions, contexts=None), reward=number % 2
        )

    return [
        dataclasses.replace(
            group, trajectories=tuple(one(t.completion, number) for number, t in enumerate(group.trajectories))
        )
        for group in groups
    ]

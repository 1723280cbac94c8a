"""What the certificate costs a job: readings of the trainer's, against its updates.

Processor seconds of this process, so that other work on the machine counts little. The trainer's time is the least that
a step takes. Readings are timed by themselves, and updates with and without them in turns, which says the same with
more noise. Answers are of two versions of the weights, as those of an asynchronous job are: the dearer case.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.monitor import decode, grouped, percent, step_requests
from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.monitor.certified import chosen, untestable
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer.certify import Certifier
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Trajectory


def run(config: JobConfig, rounds: int) -> list[dict[str, Any]]:
    """Seconds of an update, and what a reading each ``monitor.certify_every`` steps adds. ``UserError`` if there is
    none."""
    every = config.monitor.certify_every
    if not every or untestable(config):
        raise UserError(f"monitor.certify_every={every}: {untestable(config) or 'give 1 or more'}")
    policy = load_policy(config.model, need_head=True)
    source = PromptSource(config.task, chat_encoder(policy.tokenizer), 1024)
    groups = grouped(config, source, decode(config, policy, step_requests(config, policy, source), False)[1])
    trainer = PolicyTrainer(policy, config)
    certifier = Certifier(trainer.scorer, trainer.past, config)
    updates: dict[bool, list[float]] = {True: [], False: []}
    readings: list[float] = []
    tokens = 0
    with tqdm(total=2 * rounds, desc="certify") as progress:
        for turn in range(rounds + 1):
            for on in (True, False) if turn % 2 else (False, True):
                spent = 0.0
                for step in range(every if turn else 1):  # the first turn warms up
                    batch = Batch(groups=tuple(straddling(groups, trainer.version)))
                    if on and not step:
                        certifier.begin(0)  # answers that come again are no evidence
                        started = time.process_time()
                        said = certifier.read(chosen(batch.groups), 0, trainer.version)
                        readings.append(time.process_time() - started)
                        assert said is not None
                        tokens, spent = tokens + said.tokens, spent + readings[-1]
                    started = time.process_time()
                    trainer.update(batch)
                    spent += time.process_time() - started
                if turn:
                    updates[on].append(spent / every)
                    progress.update()
    update, reading = float(np.median(updates[False])), float(np.median(readings[1:]))
    added = percent(updates)

    def row(part: str, seconds: float) -> dict[str, Any]:
        return {"part": part, "s/update": update, "added s": seconds, "added %": 100 * seconds / update}

    timed = row(f"certificate, each {every} steps, timed", reading / every)
    timed |= {"s/reading": reading, "tokens/reading": tokens / len(readings)}
    return [timed, row("certificate, on against off", added["added %"] / 100 * update) | added]


def straddling(groups: Sequence[Group], version: int) -> list[Group]:
    """The same answers, their second halves written by ``version``, all of what they saw computed again then."""

    def one(answer: Completion) -> Completion:
        versions = np.full(len(answer.token_ids), version)
        versions[: len(versions) // 2] = max(0, version - 1)
        return dataclasses.replace(answer, versions=versions, contexts=versions)

    return [
        dataclasses.replace(
            group,
            trajectories=tuple(Trajectory(completion=one(t.completion), reward=i % 2) for i, t in enumerate(own)),
        )
        for group in groups
        for own in [group.trajectories]
    ]

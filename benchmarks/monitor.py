"""Cost of monitoring: statistics of drafts, the monitor's own work, and readings of the probe set.

Statistics are timed where they are computed; decoding with and without them in turns gives the same with more noise.

Times are processor seconds of this process, so that other work on the machine matters little. The share is of the
rollout time of a step: the time to decode as many completions without statistics.
"""

import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.record import noted, timed
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.metrics.intervals import resampled
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.monitor.watch import JobMonitor, choose
from bebop.rollout.decoding import draft_verify
from bebop.rollout.engine import Request
from bebop.rollout.engines import engine_module
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Completion, Group, SamplingParams, Trajectory


def run(config: JobConfig, rounds: int) -> list[dict[str, Any]]:
    """Return one row per part of the monitor: seconds per step without it, and the seconds that it adds.

    Raises ``UserError`` if nothing drafts.
    """
    if not engine_module(config).EMBEDDED or not SYSTEMS[config.decoding.system].drafts:
        what = f"rollout.engine={config.rollout.engine} decoding.system={config.decoding.system}"
        raise UserError(f"{what} cannot be measured here: give the embedded engine and a system that drafts")
    policy = load_policy(config.model, need_head=True)
    source = PromptSource(config.task, chat_encoder(policy.tokenizer), 1024)
    spent: dict[bool, list[float]] = defaultdict(list)
    inside: list[float] = []
    answers: list[Completion] = []
    progress = tqdm(total=2 * rounds, desc="monitor")
    for turn in range(rounds + 1):
        for measure in (True, False) if turn % 2 else (False, True):
            asked = step_requests(config, policy, source)
            with timed(draft_verify, "_compare") as taken:
                seconds, completions = decode(config, policy, asked, measure)
            if turn:  # the first turn warms up
                spent[measure].append(seconds)
                noted({"turn": turn, "statistics of drafts": measure, "s/step": seconds, "timed s": sum(taken)})
                inside += [sum(taken)] if measure else []
                progress.update()
            answers = completions if measure else answers
    progress.close()
    plain = float(np.median(spent[False]))
    groups = grouped(config, source, answers)
    watching, added = _watching(config, groups), percent(spent)

    def row(part: str, seconds: float) -> dict[str, Any]:
        return {"part": part, "s/step": plain, "added s": seconds, "added %": 100 * seconds / plain}

    rows = [
        row("statistics of drafts, timed", float(np.median(inside))),
        row("statistics of drafts, on against off", added["added %"] / 100 * plain) | added,
        row("monitor", watching),
    ]
    if every := config.monitor.probe_every:
        rows.append(row(f"bank, each {every} steps", _reading(config, policy, groups) / every))
    return rows


def step_requests(config: JobConfig, policy: Policy, source: PromptSource) -> list[Request]:
    """Return the requests of one step."""
    size, sampling = config.trainer.group_size, config.rollout.sampling
    return [
        Request(
            id=number,
            token_ids=source.prompt(number // size).token_ids,
            params=SamplingParams(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=policy.eos_token_ids,
                seed=number,
            ),
        )
        for number in range(size * config.trainer.groups_per_step)
    ]


def decode(
    config: JobConfig, policy: Policy, asked: Sequence[Request], measure: bool
) -> tuple[float, list[Completion]]:
    """Decode one step's completions; return processor seconds. Tokens are the same with and without statistics."""
    engine = TorchEngine(
        policy, config.decoding, slots=config.rollout.slots, max_length=config.rollout.max_length, measure=measure
    )
    started = time.process_time()
    answers = generate(engine, asked)
    return time.process_time() - started, answers


def grouped(config: JobConfig, source: PromptSource, answers: Sequence[Completion]) -> list[Group]:
    """Return the completions of one step as the trainer gets them, all with the same reward."""
    size = config.trainer.group_size
    return [
        Group(
            prompt=source.prompt(i // size),
            trajectories=tuple(Trajectory.single(completion=a, reward=0.0) for a in answers[i : i + size]),
        )
        for i in range(0, len(answers), size)
    ]


def _watching(config: JobConfig, groups: Sequence[Group], steps: int = 20) -> float:
    """Return the seconds per step to collect, estimate, explain and write.

    The median is over the last half of the steps, which have all windows.
    """
    with tempfile.TemporaryDirectory() as folder:
        watch, seconds = JobMonitor(config, Path(folder)), []
        for number in range(1, steps + 1):
            started = time.process_time()
            watch.observe(number, groups, number - 1)
            seconds.append(time.process_time() - started)
        watch.close()
    return float(np.median(seconds[steps // 2 :]))


def _reading(config: JobConfig, policy: Policy, groups: Sequence[Group]) -> float:
    """Return the seconds of one later reading of the probe set, without the sweep."""
    trainer, texts = PolicyTrainer(policy, config), choose(groups, config.monitor.probe_completions)
    seconds = []
    for _ in range(4):
        started = time.process_time()
        trainer.read_probe_set(texts)
        seconds.append(time.process_time() - started)
    return float(np.median(seconds[1:]))


def percent(spent: dict[bool, list[float]]) -> dict[str, float]:
    """Return the total with over the total without, as added percent, with rounds resampled."""
    on, off = np.array(spent[True]), np.array(spent[False])
    ratio = resampled(lambda weights: (weights @ on) / (weights @ off), len(on))
    return {"added %": 100 * (ratio.value - 1), "low %": 100 * (ratio.low - 1), "high %": 100 * (ratio.high - 1)}

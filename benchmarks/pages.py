"""KV cache in pages against slots: the speed of both, and the number of requests that the same bytes hold.

Speed: the arms answer the same requests in turns, in processor time, and are compared within a turn. On a CPU attention
over pages copies the entries that it reads.

Requests in flight: the lengths of completions are lognormal, cut at ``LONGEST``, and more requests wait than can run.
Slots hold ``SLOTS`` requests of the longest kind. Pages have the same bytes, and four times as many slots.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.record import noted
from bebop.bench.rollout import load_with_parts
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams

SLOTS, LONGEST, PROMPT = 8, 448, 32  # requests, tokens of a completion, tokens of a prompt
MEDIAN, SIGMA = 60, 1.0  # of the lognormal lengths, before they are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesBench:
    """Settings of the benchmark."""

    model: ModelConfig
    systems: tuple[str, ...] = ("autoregressive", "bebop")
    batches: tuple[int, ...] = (1, 8, 32)
    rounds: int = 8
    tokens: int = 96  # of a completion, where speed is measured
    requests: int = 160  # of lognormal lengths


def run(bench: PagesBench) -> list[dict[str, Any]]:
    """Return one row for each system, batch and arm, then one for each arm with requests in flight."""
    policy = load_with_parts(bench.model, bench.systems)
    rows = []
    progress = tqdm(total=len(bench.systems) * len(bench.batches) * (bench.rounds + 1), desc="pages")
    for system in bench.systems:
        for batch in bench.batches:
            rows += _speeds(policy, bench, system, batch, progress)
    progress.close()
    return rows + _in_flight(policy, bench.requests)


def _speeds(policy: Policy, bench: PagesBench, system: str, batch: int, progress: "tqdm[Any]") -> list[dict[str, Any]]:
    """Return a row for slots and one for pages. The first turn warms up and does not count."""
    config = DecodingConfig(system=system, draft_tokens=SYSTEMS[system].draft_tokens if SYSTEMS[system].drafts else 0)
    engines = {
        arm: TorchEngine(policy, config, slots=batch, max_length=512, paged=arm == "pages")
        for arm in ("slots", "pages")
    }
    speeds: dict[str, list[float]] = {arm: [] for arm in engines}
    for turn in range(bench.rounds + 1):
        for arm in list(engines)[:: 1 - 2 * (turn % 2)]:
            started = time.process_time()
            answers = generate(engines[arm], _requests(policy, [bench.tokens] * batch))
            speed = sum(len(answer.token_ids) for answer in answers) / (time.process_time() - started)
            speeds[arm] += [speed] * (turn > 0)
            noted({"system": system, "batch": batch, "arm": arm, "turn": turn, "tokens/s": speed})
        progress.update()
    rows = []
    for arm, own in speeds.items():
        ratios = sorted(a / b for a, b in zip(own, speeds["slots"], strict=True))
        row = {"system": system, "batch": batch, "arm": arm, "tokens/s": statistics.median(own)}
        rows.append(row | {"x slots": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]})
    return rows


def _in_flight(policy: Policy, count: int) -> list[dict[str, Any]]:
    """Return, for each arm, the mean number of running requests while others wait, and the number of preemptions."""
    lengths = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, count).clip(1, LONGEST).astype(int).tolist()
    plain = DecodingConfig(system="autoregressive", draft_tokens=0)
    length = PROMPT + LONGEST
    slots = TorchEngine(policy, plain, slots=SLOTS, max_length=length, paged=False)
    # The pool has more pages than its tokens need: those that a cycle writes, and one that belongs to no request.
    room = SLOTS * slots.slots.capacity - 64
    paged = TorchEngine(policy, plain, slots=4 * SLOTS, max_length=length, paged=True, cache_tokens=room)
    rows = []
    for arm, engine in (("slots", slots), ("pages", paged)):
        running = []
        for request in _requests(policy, lengths):
            engine.add(request)
        while engine.waiting:
            engine.step()
            running.append(len(engine.active))
        engine.abort()
        row = {"system": "autoregressive", "arm": arm, "cache MiB": engine.slots.caches["target"].keys.nbytes / 2**19}
        rows.append(row | {"requests in flight": statistics.mean(running), "preempted": engine.preempted})
    return rows


def _requests(policy: Policy, lengths: Sequence[int]) -> list[Request]:
    """Return requests with random prompts, each with a completion of the given length."""
    numbers = np.random.default_rng(1)
    return [
        Request(
            id=i,
            token_ids=tuple(numbers.integers(policy.vocab_size, size=PROMPT).tolist()),
            params=replace(SamplingParams(), max_new_tokens=length, seed=i),
        )
        for i, length in enumerate(lengths)
    ]

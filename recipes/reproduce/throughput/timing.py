"""Timed decoding: all arms take turns in one process, so that the machine is the same for all.

The process has one thread, and its processor time counts: other work on the machine distorts it little. On a GPU
wall-clock time counts, taken after the device is synchronized.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bebop.adaptation.corpus import sampling_params
from bebop.bench.rollout import split
from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion, DecodeStats, Prompt
from recipes.reproduce.study import QUICK, prompts, settings
from recipes.reproduce.throughput.heads import BEST, DRAFTS, HEADS, TRAINED, Bench

BATCHES = {1: 1, 4: 4} if QUICK else {1: 16, 32: 96}  # answers side by side -> answers in a timed run
ROUNDS = 1 if QUICK else 2
LENGTHS = (1, 2, 3, 4, 5)  # K
REPEATS = 5 if QUICK else 30  # passes of each kind in a round, of which the median counts
MAX_LENGTH = 512  # tokens of prompt and answer

TimedArm = tuple[str, str, int]  # head, system, K
PLAIN: TimedArm = ("start", "autoregressive", 0)
ARMS: tuple[TimedArm, ...] = (
    PLAIN,
    *((name, "bebop", DRAFTS) for name in HEADS),
    *((name, "target_only", DRAFTS) for name in ("start", *TRAINED)),
    *((BEST, "bebop", k) for k in LENGTHS if k != DRAFTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Speed and acceptance of one arm in one round."""

    speed: float  # tokens per second of processor time; on a GPU as ``wall``
    wall: float  # tokens per second by the clock on the wall
    cycles: int
    accepted: float  # drafts
    shares: dict[
        str, float
    ]  # part of the wall time in prefill, verify and draft (with the head's pass over kept tokens)

    @property
    def accept_length(self) -> float:
        """Return accepted drafts per cycle + 1."""
        return 1 + self.accepted / self.cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Costs of single passes, in units of the target's pass over one token."""

    draft: float  # c: one draft step, from logits to the next hidden state
    verify: dict[int, float]  # v(K): the target's pass over K + 1 tokens
    step: float = math.nan  # that pass over one token in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All rounds of one seed and batch size."""

    rounds: list[dict[TimedArm, Timed]]
    costs: list[Costs]  # one a round

    def ratio(self, arm: TimedArm, base: TimedArm) -> float:
        """Return the median over rounds of the ratio of speeds within a round."""
        return float(np.median([r[arm].speed / r[base].speed for r in self.rounds]))

    def typical(self, arm: TimedArm, name: str = "speed") -> float:
        """Return the median over rounds of ``speed`` or ``wall``."""
        return float(np.median([getattr(r[arm], name) for r in self.rounds]))

    def accept_length(self, arm: TimedArm) -> float:
        """Return the accept length of all rounds together."""
        return 1 + sum(r[arm].accepted for r in self.rounds) / sum(r[arm].cycles for r in self.rounds)

    def share(self, arm: TimedArm, part: str) -> float:
        """Return one part's share of the wall time, median over rounds."""
        return float(np.median([r[arm].shares.get(part, 0.0) for r in self.rounds]))

    def draft_cost(self) -> float:
        """Return c, the cost of a draft step, median over rounds."""
        return float(np.median([c.draft for c in self.costs]))

    def verify_cost(self, length: int) -> float:
        """Return v(K), the cost of a verification, median over rounds."""
        return float(np.median([c.verify[length] for c in self.costs]))


def measure(bench: Bench, seed: int, progress: Callable[[], Any]) -> dict[int, Measured]:
    """Time all arms at every batch size.

    Each round samples new completions; within it every arm uses the same random numbers.
    """
    asked = prompts(seed, max(BATCHES.values()))
    measured = {batch: Measured(rounds=[], costs=[]) for batch in BATCHES}
    decode(bench, PLAIN, requests(bench.model, asked[:2], 0, seed), 2)  # the first passes of a process are slow
    for turn in range(ROUNDS):
        for batch, count in BATCHES.items():
            wanted = requests(bench.model, asked[:count], 1 + turn, seed)
            measured[batch].rounds.append(dict(_turns(bench, wanted, batch, turn, progress)))
            measured[batch].costs.append(costs(bench.use(BEST), wanted, batch))
    return measured


def _turns(
    bench: Bench, wanted: Sequence[Request], batch: int, turn: int, progress: Callable[[], Any]
) -> Iterator[tuple[TimedArm, Timed]]:
    """Time all arms once; each round begins with another arm."""
    first = turn * len(ARMS) // ROUNDS
    for arm in (*ARMS[first:], *ARMS[:first]):
        yield arm, decode(bench, arm, wanted, batch)
        progress()


def requests(model: Policy, asked: Sequence[Prompt], turn: int, seed: int) -> list[Request]:
    """Turn the prompts into requests; ``turn`` chooses the random numbers."""
    sampling = settings(seed).data.sampling
    first = (100 * seed + turn) << 20
    return [
        Request(id=i, token_ids=p.token_ids, params=sampling_params(model, sampling, first + i))
        for i, p in enumerate(asked)
    ]


def decode(bench: Bench, arm: TimedArm, wanted: Sequence[Request], batch: int) -> Timed:
    """Decode the requests with one arm, ``batch`` at a time."""
    name, system, drafts = arm
    return timed(bench.use(name), DecodingConfig(system=system, draft_tokens=drafts), wanted, batch)


def stopwatch(device: torch.device) -> Callable[[], float]:
    """Return a clock in seconds: processor time, or on a GPU wall-clock time after synchronizing the device.

    Ask for it before an engine is made: on a GPU it first frees the caches of those before.
    """
    if device.type != "cuda":
        return time.process_time

    gc.collect()  # an engine's drafter and cache hold each other

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return now


def timed(model: Policy, config: DecodingConfig, wanted: Sequence[Request], batch: int) -> Timed:
    """Decode the requests, ``batch`` at a time.

    On a GPU the parts are timed in a second run: timing a part waits for the device, which the engine does only once a
    cycle.
    """
    clock = stopwatch(model.device)
    engine = TorchEngine(model, config, slots=batch, max_length=MAX_LENGTH)
    if model.device.type == "cuda":
        answers, wall, busy = _decoded(engine, wanted, clock)
        with split(engine) as seconds:
            _, whole, _ = _decoded(engine, wanted, clock)
    else:
        with split(engine) as seconds:
            answers, wall, busy = _decoded(engine, wanted, clock)
        whole = wall
    stats = DecodeStats.total(a.stats for a in answers)
    return Timed(
        speed=stats.tokens / busy,
        wall=stats.tokens / wall,
        cycles=stats.cycles,
        accepted=float(stats.accepted.sum()),
        shares={part: spent / whole for part, spent in seconds.items()},
    )


def _decoded(
    engine: TorchEngine, wanted: Sequence[Request], clock: Callable[[], float]
) -> tuple[list[Completion], float, float]:
    """Return the completions, the wall-clock seconds, and the seconds by ``clock``."""
    began, busy = time.perf_counter(), clock()
    answers = generate(engine, wanted)
    busy = clock() - busy
    return answers, time.perf_counter() - began, busy


@torch.inference_mode()
def costs(
    model: Policy, wanted: Sequence[Request], batch: int, lengths: Sequence[int] = LENGTHS, repeats: int = REPEATS
) -> Costs:
    """Time single passes over the engine's own caches, in mid-completion; kinds take turns and medians count."""
    config = DecodingConfig(system="bebop", draft_tokens=max(lengths))
    clock = stopwatch(model.device)
    engine = TorchEngine(model, config, slots=batch, max_length=MAX_LENGTH)
    for request in wanted[:batch]:
        engine.add(request)
    for _ in range(5):
        engine.step()
    decoder = engine.decoder
    assert isinstance(decoder, DraftVerify) and isinstance(decoder.drafter, MTPDrafter)
    target, drafter, rows = decoder.target, decoder.drafter, Rows(engine.slots, len(engine.active), max(engine.fed))
    tokens = rows.last[:, None].expand(-1, max(lengths) + 1).contiguous()
    hidden = drafter.hidden[: rows.batch].clone()

    def draft() -> None:
        model.logits(hidden)
        drafter.step(rows, 0, tokens[:, 0], hidden)

    def verify(width: int) -> None:
        model.logits(target.verify(rows, tokens[:, :width])[0])

    spent: dict[int, list[float]] = {n: [] for n in (0, 1, *(k + 1 for k in lengths))}  # 0: a draft step
    for _ in range(repeats):
        for n, times in spent.items():
            began = clock()
            draft() if n == 0 else verify(n)
            times.append(clock() - began)
    typical = {n: float(np.median(times)) for n, times in spent.items()}
    verified = {k: typical[k + 1] / typical[1] for k in lengths}
    return Costs(draft=typical[0] / typical[1], verify=verified, step=typical[1])

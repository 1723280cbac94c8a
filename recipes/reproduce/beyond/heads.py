"""Jobs that run side by side: train heads, then decode with them and probe them as the questions require."""

import statistics
import time
from dataclasses import dataclass, field

from bebop.adaptation.corpus import token_rows
from bebop.adaptation.evaluation import measure
from bebop.adaptation.probe import probe
from bebop.config.job import DecodingConfig, HeadConfig
from bebop.model.backbone import Policy
from bebop.trainer.chains import rows_of_step
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from recipes.reproduce.beyond.estimators import Sums, sums
from recipes.reproduce.beyond.on_text import TextSampling, accept_lengths
from recipes.reproduce.beyond.recording import record
from recipes.reproduce.study import (
    DEPTH,
    HELD_OUT,
    QUICK,
    Arm,
    backbone_states,
    corpus,
    head,
    policy,
    prepare,
    prompts,
    settings,
    text,
    untrained,
)

COUNT = 6 if QUICK else 64  # prompts to decode
ENGINE = (0.0, 0.5, 1.0) if QUICK else (0.0, 0.5, 0.75, 1.0)  # draft temperatures decoded with
GRID = (0.0, 0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)  # draft temperatures computed on text
TOP_P = 0.9
TRUNCATION = f"data.sampling.top_p={TOP_P}"
WATCHED = ("hard_ce", "e2e_tv")  # heads for estimators and draft temperatures
PAIRS = 2 if QUICK else 12  # updates that are timed

Job = tuple[str, int, int]  # name of the head, seed, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """Measurements of one head; those that its questions do not need are empty."""

    accept_length: float  # on text at temperature 1
    overlap: float
    estimates: Sums | None = None
    engine: dict[float, float] = field(default_factory=dict)  # draft temperature -> accept length counted
    on_text: dict[float, float] = field(default_factory=dict)  # draft temperature -> accept length on text
    truncated: dict[str, float] = field(default_factory=dict)  # how rollouts with top_p were measured -> accept length


def arm(name: str, seed: int, steps: int) -> Arm:
    """Return the training of a named head: an objective, or ``... on top_p``.

    The latter learns the truncated distribution, from text sampled with it.
    """
    sampling = Sampling(target_top_p=TOP_P) if name.endswith("top_p") else Sampling()
    return Arm(objective=name.split()[0], seed=seed, steps=steps, sampling=sampling)


def prepare_all(seed: int) -> None:
    """Run ``prepare`` for text from the whole distribution and from the one truncated by top_p."""
    prepare(seed)
    prepare(seed, TRUNCATION)


def run(job: Job) -> HeadResult:
    """Train or load a head and return its measurements."""
    name, seed, steps = job
    chosen = arm(name, seed, steps)
    model = head(chosen)
    plain = probe(model, text(seed, HELD_OUT), DEPTH, Sampling())
    watched = name in WATCHED and steps == Arm(objective=name, seed=seed).steps
    return HeadResult(
        accept_length=float(plain.accept.mean()),
        overlap=plain.mean(plain.numbers["overlap"][:, 0]).value,
        estimates=estimates(model, seed) if watched else None,
        engine={t: decoded(model, seed, t) for t in ENGINE} if watched else {},
        on_text=tempered(model, seed) if watched else {},
        truncated=truncated(model, seed) if name.startswith("e2e_tv") and "corrected" not in name else {},
    )


def estimates(model: Policy, seed: int) -> Sums:
    """Return the totals for every estimate of E[A], from one decoding and from its completions as text."""
    asked = prompts(seed, COUNT)
    cycles, answers = record(model, asked, settings(seed).data, DEPTH, seed + 2)
    return sums(cycles, probe(model, token_rows(asked, answers), DEPTH, Sampling()))


def decoded(model: Policy, seed: int, temperature: float | None, *overrides: str) -> float:
    """Return the accept length that the engine counts."""
    decoding = DecodingConfig(system="bebop", draft_tokens=DEPTH, draft_temperature=temperature)
    measured = measure(model, prompts(seed, COUNT), settings(seed, *overrides).data, decoding, seed + 1)
    return measured.interval("accept_length").value


def tempered(model: Policy, seed: int) -> dict[float, float]:
    """Return the accept length on text for drafts of every temperature of ``GRID``."""
    lengths = accept_lengths(model, text(seed, HELD_OUT), DEPTH, [TextSampling(t) for t in GRID], TextSampling())
    return dict(zip(GRID, lengths, strict=True))


def truncated(model: Policy, seed: int) -> dict[str, float]:
    """Return accept lengths when rollouts use top_p: counted, and on text with truncated or full drafts."""
    rows = text(seed, HELD_OUT, TRUNCATION)
    cut, whole = accept_lengths(model, rows, DEPTH, [TextSampling(1, TOP_P), TextSampling()], TextSampling(1, TOP_P))
    return {"engine": decoded(model, seed, None, TRUNCATION), "text": cut, "text, draft not truncated": whole}


def step_seconds(names: tuple[str, str], seed: int = 0) -> tuple[float, float]:
    """Return processor seconds of an update with each objective, timed in turn on the same rows.

    The second is the first times the median ratio of pairs.
    """
    rows = corpus(seed)[: 16 * PAIRS]
    size = min(16, len(rows))
    states = backbone_states(policy(), rows)
    config = HeadConfig(depth=DEPTH, max_tokens=2048)
    trainers = [HeadTrainer(FSDPBackend(untrained(policy()), Sampling()), config) for _ in names]
    seconds: list[tuple[float, float]] = []
    for step in range(PAIRS):
        chosen = rows_of_step(len(rows), size, seed, step)
        pair = [0.0, 0.0]
        for which in (0, 1) if step % 2 else (1, 0):
            began = time.process_time()
            trainers[which].update([rows[i] for i in chosen], names[which], [states[i] for i in chosen])
            pair[which] = time.process_time() - began
        seconds.append((pair[0], pair[1]))
    first = statistics.median(a for a, _ in seconds[1:])  # the first pair warms up
    return first, first * statistics.median(b / a for a, b in seconds[1:])


def equal_time(seconds: tuple[float, float], steps: int) -> tuple[int, int]:
    """Return the steps of two objectives that take the time of ``steps`` of the faster one."""
    fastest = min(seconds)
    first, second = (max(1, round(steps * fastest / s)) for s in seconds)
    return first, second

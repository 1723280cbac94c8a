"""Runs of a live engine: cohort after cohort, until a fault is proved or the budget is spent."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from bebop.certify.answers import Answer
from bebop.certify.certificate import cause
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.evidence import Evidence
from bebop.certify.ledger import Ledger
from bebop.certify.model_reference import ModelReference
from bebop.config.job import TaskConfig
from bebop.rollout.engine import Request
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams
from recipes.reproduce.certificate.faults import SLOTS, Planted, live, trusted

ALPHA = 1e-4
COHORT, TOKENS = 16, 160  # concurrent requests, maximal tokens of a completion

SHOWN = 3  # directions that are kept of each run
assert COHORT <= SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Outcome of a run under one box."""

    planted: Planted
    seed: int
    found: int | None  # tokens after which the fault was proved, within the budget
    tokens: int
    log_e: float
    highest: float
    cause: str  # the cause that the evidence names, sufficient or not
    strongest: tuple[tuple[str, float], ...]  # direction, ln of its share of the evidence
    acceptance: float
    history: tuple[tuple[int, float], ...]  # tokens, ln E

    @property
    def alarm(self) -> bool:
        """Return whether the evidence ever sufficed, even beyond the budget."""
        return self.highest >= math.log(1 / ALPHA)


@cache
def prompts() -> PromptSource:
    """Return questions of the built-in model's own task."""
    return PromptSource(TaskConfig(), chat_encoder(trusted().tokenizer), 256)


def cohorts(engine: EmbeddedEngine, heat: float, seed: int) -> Iterator[tuple[SamplingParams, list[Answer]]]:
    """Yield cohorts of completions without end: two of each prompt, every request with a seed of its own."""
    source, stops = prompts(), trusted().eos_token_ids
    params = SamplingParams(temperature=heat, max_new_tokens=TOKENS, stop_token_ids=stops)
    first = 0
    while True:
        asked = [
            Request(
                id=i,
                token_ids=source.prompt(100_000 * seed + i // 2).token_ids,
                params=dataclasses.replace(params, seed=(seed << 32) + i),
            )
            for i in range(first, first + COHORT)
        ]
        yield params, engine.sample(asked, lambda tokens: None)
        first += COHORT


def black_box(planted: Planted, budget: int, seed: int) -> Look:
    """Run the black box, which sees only completions and log-probs."""
    engine, reference = live(planted, seed), ModelReference(trusted())
    ledger = Ledger(reference.policy.vocab_size, alpha=ALPHA, seed=seed)
    counts = np.zeros(2)
    found = None
    for params, answers in cohorts(engine, planted.heat, seed):
        block = reference.block(answers, params)
        if ledger.tokens and ledger.tokens + len(block) > budget:
            break
        ledger.update(dataclasses.replace(block, declared=block.logprobs))
        counts += _drafts(answers)
        if ledger.log_e >= math.log(1 / ALPHA):
            found = ledger.tokens
            break
    return _look(planted, seed, found, ledger.tokens, ledger.log_e, ledger.highest, ledger.evidence(),
                 float(counts[0] / max(1, counts[1])), ledger.history)  # fmt: skip


def white_box(planted: Planted, budget: int, seed: int) -> Look:
    """Run the white box, which sees the inputs and decisions of verification."""
    engine = live(planted, seed, inside=True)
    box = engine.white_box
    assert box is not None
    history: list[tuple[int, float]] = []
    counts = np.zeros(2)
    for _, answers in cohorts(engine, planted.heat, seed):
        history.append((box.tokens, box.log_e))
        counts += _drafts(answers)
        if box.found is not None or box.tokens >= budget:
            break
    found = box.found if box.found is not None and box.found <= budget else None
    return _look(
        planted,
        seed,
        found,
        box.tokens,
        box.log_e,
        box.highest,
        box.evidence(),
        float(counts[0] / max(1, counts[1])),
        history,
    )


def watched(planted: Planted, tokens: int, seed: int) -> tuple[Look, Look]:
    """Run both boxes on the same completions to the end, for engines that should raise no alarm."""
    engine, reference = live(planted, seed, inside=True), ModelReference(trusted())
    box, ledger = engine.white_box, Ledger(reference.policy.vocab_size, alpha=ALPHA, seed=seed)
    assert box is not None
    history: list[tuple[int, float]] = []
    counts = np.zeros(2)
    for params, answers in cohorts(engine, planted.heat, seed):
        block = reference.block(answers, params)
        ledger.update(dataclasses.replace(block, declared=block.logprobs))
        history.append((box.tokens, box.log_e))
        counts += _drafts(answers)
        if ledger.tokens >= tokens:
            break
    share = float(counts[0] / max(1, counts[1]))
    highest = ledger.highest
    first = next((n for n, log_e in ledger.history if log_e >= math.log(1 / ALPHA)), None)
    outside = _look(
        planted, seed, first, ledger.tokens, ledger.log_e, highest, ledger.evidence(), share, ledger.history
    )
    return outside, _look(planted, seed, box.found, box.tokens, box.log_e, box.highest, box.evidence(), share, history)


def _drafts(answers: Sequence[Answer]) -> NDArray[np.float64]:
    """Return the counts of accepted and of tested drafts [2]."""
    return np.sum([answer.accepted or (0, 0) for answer in answers], 0).astype(float)


def _look(
    planted: Planted,
    seed: int,
    found: int | None,
    tokens: int,
    log_e: float,
    highest: float,
    evidence: list[Evidence],
    acceptance: float,
    history: list[tuple[int, float]],
) -> Look:
    strongest = tuple((f"{one.group}: {one.name}", one.merged) for one in evidence[:SHOWN])
    return Look(
        planted=planted,
        seed=seed,
        found=found,
        tokens=tokens,
        log_e=log_e,
        highest=highest,
        cause=cause(evidence).name,
        strongest=strongest,
        acceptance=acceptance,
        history=tuple(history),
    )

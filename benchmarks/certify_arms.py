"""Cost of a certificate's statistics, and its detection of faults beside Token-DiFR.

``speed`` times the black and the white box on random distributions, without an engine: p of softened normal logits, q a
noisy copy of it. ``against`` names a checkout of an earlier commit, on which the same code times the same rows.

``difr`` plants faults in a sampler of a table and asks two judges. Token-DiFR (Karvonen et al. 2025, arXiv 2511.20621)
knows the seed: it draws the Gumbel noise g of every token again, and scores a token by how far it falls behind the
winner, max(z + g) - (z + g)[token], cut off at ``CUT``. The certificate knows no seed; it is asked with and without the
log-probs that the engine reports. DiFR's score is a mean. It counts as found if it lies 3.7 standard errors above that
of an intact engine with the same rounding, which has a chance of 1e-4 at a look fixed beforehand. The certificate has
that chance for all looks together.

``timed`` uses only ``bebop.certify.answers``, ``ledger`` and ``white_box``, which earlier commits also have.
"""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.certify.answers import Block, cells, narrow
from bebop.certify.ledger import Ledger
from bebop.certify.white_box import WhiteBox
from bebop.errors import UserError

COLUMNS = 4096  # that references keep of a large vocabulary, see ``model_reference.COLUMNS``
DRAFTS = 3
LENGTH = 16  # tokens of a completion
Rows = list[dict[str, Any]]


# ---- speed


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedBench:
    """Settings of the speed benchmark: ``vocabulary`` V, ``tokens`` for each box, and a checkout to compare with."""

    vocabulary: int = 152_000
    tokens: int = 48
    against: str | None = None


def run_speed(bench: SpeedBench) -> Rows:
    """Return processor seconds of each box, for 20,000 tokens and per token; raise ``UserError`` without a checkout."""
    rows = timed(bench.vocabulary, bench.tokens)
    if bench.against is None:
        return rows
    if not (Path(bench.against) / "bebop" / "certify").is_dir():
        raise UserError(f"--against {bench.against}: it is no checkout of bebop: give the root of one")
    program = [sys.executable, __file__, str(bench.vocabulary), str(bench.tokens)]
    earlier = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": bench.against}, check=True, capture_output=True, text=True
    )
    before = {row["what"]: row for row in json.loads(earlier.stdout)}
    for row in rows:
        old = before[row["what"]]
        row |= {"before, s": old["s/20,000 tokens"], "ratio": old["s/20,000 tokens"] / row["s/20,000 tokens"]}
        row["off"] = max(abs(one - other) for one, other in zip(row["evidence"], old["evidence"], strict=True))
    for row in rows:
        del row["evidence"]
    return rows


def timed(vocabulary: int, tokens: int) -> Rows:
    """Return a row for each box: processor seconds on one thread, and ln e of its directions."""
    torch.set_num_threads(1)
    numbers = torch.Generator().manual_seed(0)
    whole = [_block(vocabulary, max(8, tokens // 2), numbers, first=1000 * i) for i in range(2)]
    columns = min(COLUMNS, vocabulary)
    found = [_black("black box, all columns", vocabulary, whole)]
    if columns < vocabulary:
        found.append(_black(f"black box, {columns:,} columns", vocabulary, [_narrowed(one, columns) for one in whole]))
    return [*found, _white(vocabulary, tokens, numbers)]


def _row(what: str, seconds: float, tokens: int, log_es: list[float]) -> dict[str, Any]:
    ms = 1000 * seconds / tokens
    return {"what": what, "ms/token": ms, "s/20,000 tokens": 20 * ms, "tokens": tokens, "evidence": log_es}


def _black(what: str, vocabulary: int, blocks: list[Block]) -> dict[str, Any]:
    ledger, seconds = Ledger(vocabulary), 0.0
    for i, one in enumerate(blocks):
        started = time.process_time()
        ledger.update(one)
        seconds = time.process_time() - started if i else 0.0  # the first has no bigrams, and warms up
    evidence = [one.log_e for one in sorted(ledger.evidence(), key=lambda one: one.name)]
    return _row(what, seconds, len(blocks[-1]), evidence)


def _white(vocabulary: int, tokens: int, numbers: torch.Generator) -> dict[str, Any]:
    cycles = max(1, tokens // 2)
    p = _softened(numbers, cycles, DRAFTS + 1, vocabulary)
    q = _beside(p[:, :-1], numbers)
    y = torch.multinomial(q.flatten(0, 1), 1, generator=numbers).view(cycles, DRAFTS)
    box = WhiteBox()
    accepted, following = _verified(p, q, y, numbers)
    started = time.process_time()
    box.update(y, q, p, accepted, following, stops=(1, 3))
    seconds = time.process_time() - started
    evidence = [one.log_e for one in sorted(box.evidence(), key=lambda one: (one.group, one.name))]
    return _row("white box, all columns", seconds, box.tokens, evidence)


def _softened(numbers: torch.Generator, *shape: int) -> Tensor:
    """Return distributions [..., V] with about the entropy of text at temperature 2."""
    return (2.5 * torch.randn(*shape, generator=numbers, dtype=torch.float64)).softmax(-1)


def _beside(p: Tensor, numbers: torch.Generator) -> Tensor:
    """Return a distribution such as a draft head might give for p."""
    return (p.log() + 0.5 * torch.randn(p.shape, generator=numbers, dtype=torch.float64)).softmax(-1)


def _block(
    vocabulary: int, count: int, numbers: torch.Generator, *, first: int = 0, probs: Tensor | None = None
) -> Block:
    """Return a cohort with tokens drawn from its rows, and all facts that the directions need."""
    p = _softened(numbers, count, vocabulary) if probs is None else probs
    tokens = torch.multinomial(p, 1, generator=numbers)[:, 0]
    return _with_tokens(p, tokens, _beside(p, numbers), numbers, first)


def _with_tokens(p: Tensor, tokens: Tensor, draft: Tensor, numbers: torch.Generator, first: int) -> Block:
    place = torch.arange(len(p))
    begins = (place % LENGTH == 0)[:, None]
    return Block(
        tokens=tokens,
        cells=tokens,
        probs=p,
        logprobs=p.gather(1, tokens[:, None])[:, 0].log(),
        request=first + place // LENGTH,
        position=place % LENGTH,
        last=torch.where(begins[:, 0], 0, tokens.roll(1)),
        stops=(1, 3),
        before=torch.where(begins, p, p.roll(1, 0)),
        draft=draft,
        seen=torch.rand(p.shape, generator=numbers) < 0.01,
        cycle=place % (DRAFTS + 1),
    )


def _narrowed(block: Block, columns: int) -> Block:
    """Return the block over its likeliest columns and one for all others, as a reference stores it."""
    assert block.before is not None and block.draft is not None and block.seen is not None
    likely = (block.probs + block.before + block.draft).topk(columns - 1, -1).indices.sort(-1).values
    ids = torch.cat([likely, torch.full_like(likely[:, :1], -1)], 1)
    own = {name: getattr(block, name) for name in block.__slots__}
    own |= {name: narrow(own[name], ids) for name in ("probs", "before", "draft")}
    own["seen"] = block.seen.gather(1, ids.clamp_min(0)) & (ids >= 0)
    return Block(**own | {"ids": ids, "cells": cells(ids, block.tokens)})


def _verified(p: Tensor, q: Tensor, y: Tensor, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return how many of the drafts [B, K] are accepted, and the token after them, by rejection sampling."""
    u = torch.rand(y.shape, generator=numbers, dtype=torch.float64)
    stands = u * q.gather(-1, y[..., None])[..., 0] < p[:, :-1].gather(-1, y[..., None])[..., 0]
    accepted = stands.long().cumprod(1).sum(1)
    rows = torch.arange(len(p))
    left = (p[rows, accepted] - torch.cat([q, torch.zeros_like(q[:, :1])], 1)[rows, accepted]).clamp_min(0)
    return accepted, torch.multinomial(left, 1, generator=numbers)[:, 0]


# ---- beside Token-DiFR

CUT = 3.0  # nats of a score, so that no single token decides
Z = 3.719  # standard errors that an intact engine exceeds with probability 1e-4
ROUNDING = 0.01  # nats, standard deviation of an intact engine's logits around the reference's
TOLERANCE = 6 * ROUNDING  # nats that a reported log-prob may be off
COHORT, LOOKS = 200, 50  # tokens of a cohort, and between two looks of DiFR


@dataclass(frozen=True, slots=True, kw_only=True)
class DifrBench:
    """Settings of the comparison: ``vocabulary`` V, ``tokens`` at most, ``runs`` of each fault with their own seeds."""

    vocabulary: int = 96
    tokens: int = 8000
    runs: int = 3


Logits = Callable[[Tensor, torch.Generator], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """Fault in the distribution that tokens are sampled from; if ``seeded`` is false, DiFR cannot redraw the noise."""

    logits: Logits
    exact: bool = False  # the distribution is the claimed one
    seeded: bool = True  # each token is argmax(z + g) of its position's seed; else drafts are verified by rejection
    other_seed: bool = False
    draw: Callable[[Tensor, Tensor, torch.Generator], Tensor] | None = None  # (p, q) -> tokens, where not seeded


def _sometimes(share: float, other: Logits) -> Logits:
    def logits(z: Tensor, numbers: torch.Generator) -> Tensor:
        return torch.where(torch.rand(len(z), 1, generator=numbers) < share, other(z, numbers), z)

    return logits


def _hidden_top_p(z: Tensor, numbers: torch.Generator) -> Tensor:
    p, order = z.softmax(-1).sort(-1, descending=True)
    cut = torch.zeros_like(z, dtype=torch.bool).scatter(-1, order, p.cumsum(-1) - p >= 0.95)
    return z.masked_fill(cut, -math.inf)


def _rejection(p: Tensor, q: Tensor, numbers: torch.Generator) -> Tensor:
    y = torch.multinomial(q, 1, generator=numbers)
    accepted, following = _verified(torch.stack([p, p], 1), q[:, None], y, numbers)
    return torch.where(accepted > 0, y[:, 0], following)


def _no_residual(p: Tensor, q: Tensor, numbers: torch.Generator) -> Tensor:
    y = torch.multinomial(q, 1, generator=numbers)
    accepted, _ = _verified(torch.stack([p, p], 1), q[:, None], y, numbers)
    return torch.where(accepted > 0, y[:, 0], torch.multinomial(p, 1, generator=numbers)[:, 0])


def _same(z: Tensor, numbers: torch.Generator) -> Tensor:
    return z


PLANTED: Mapping[str, Planted] = {
    "none": Planted(logits=_same, exact=True),
    "none, drafts that match the target's draw": Planted(logits=_same, exact=True),
    "none, another seed": Planted(logits=_same, exact=True, other_seed=True),
    "none, drafts verified by rejection": Planted(logits=_same, exact=True, seeded=False, draw=_rejection),
    "temperature 10 % too high": Planted(logits=lambda z, numbers: z / 1.1),
    "temperature 3 % too high": Planted(logits=lambda z, numbers: z / 1.03),
    "hidden top-p .95": Planted(logits=_hidden_top_p),
    "row before, 3 % of tokens": Planted(logits=_sometimes(0.03, lambda z, numbers: z.roll(1, 0))),
    "one token forced, 1 %": Planted(
        logits=_sometimes(0.01, lambda z, numbers: z + 50 * (torch.arange(z.shape[1]) == 7))
    ),
    "weights off by .03 nats": Planted(logits=lambda z, numbers: z + 0.03 * torch.randn(z.shape, generator=numbers)),
    "weights off by .1 nats": Planted(logits=lambda z, numbers: z + 0.1 * torch.randn(z.shape, generator=numbers)),
    "residual is p, drafts verified by rejection": Planted(logits=_same, seeded=False, draw=_no_residual),
}


def run_difr(bench: DifrBench, names: Sequence[str] = tuple(PLANTED)) -> Rows:
    """Return a row per named fault: tokens to detection by either judge, and their ms per token."""
    mean, spread = _intact_scores(bench)
    rows = []
    for name in names:
        planted = PLANTED[name]
        runs = [_judged(bench, planted, seed, mean, spread) for seed in range(bench.runs)]
        rows.append({
            "fault": name,
            "exact": planted.exact,
            "tokens alone": _median([run["tokens"] for run in runs]),
            "runs": sum(run["tokens"] is not None for run in runs),
            "with log-probs": _median([run["log-probs"] for run in runs]),
            "runs with log-probs": sum(run["log-probs"] is not None for run in runs),
            "DiFR, tokens": _median([run["difr"] for run in runs]) if planted.seeded else None,
            "DiFR, runs": sum(run["difr"] is not None for run in runs) if planted.seeded else None,
            "of runs": bench.runs,
            "certificate, ms/token": sum(run["tokens ms"] for run in runs) / bench.runs,
            "DiFR, ms/token": sum(run["difr ms"] for run in runs) / bench.runs,
        })  # fmt: skip
    return rows


def _median(found: list[int | None]) -> int | None:
    """Return the median, or None if the median run did not find the fault."""
    ranked = sorted(found, key=lambda one: math.inf if one is None else one)
    return ranked[len(ranked) // 2]


def _gumbel(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the Gumbel noise of a seed."""
    numbers = torch.Generator().manual_seed(seed)
    return -torch.empty(shape, dtype=torch.float64).exponential_(generator=numbers).log()


def _scores(z: Tensor, noise: Tensor, tokens: Tensor) -> Tensor:
    """Return Token-DiFR's score of each token [N]: how far it falls behind the winner of z + g [N, V]."""
    noised = z + noise
    return (noised.amax(-1) - noised.gather(1, tokens[:, None])[:, 0]).clamp_max(CUT)


def _drawn(planted: Planted, z: Tensor, q: Tensor, noise: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Sample tokens [N]; return them with the log-probs [N] that the engine reports."""
    numbers = torch.Generator().manual_seed(seed + 1)
    rounded = z + ROUNDING * torch.randn(z.shape, generator=numbers, dtype=torch.float64)
    if planted.draw is not None:
        own, tokens = rounded, planted.draw(rounded.softmax(-1), q, numbers)
    else:
        own = planted.logits(rounded, numbers)
        tokens = (own + (_gumbel(tuple(z.shape), seed + 2) if planted.other_seed else noise)).argmax(-1)
    return tokens, own.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _cohort(bench: DifrBench, seed: int) -> tuple[Tensor, Tensor, torch.Generator]:
    numbers = torch.Generator().manual_seed(seed)
    p = _softened(numbers, COHORT, bench.vocabulary)
    return p.log(), _beside(p, numbers), numbers


def _intact_scores(bench: DifrBench) -> tuple[float, float]:
    """Return mean and standard deviation of the scores of an intact engine."""
    parts = []
    for i in range(max(4, bench.tokens // 100)):
        z, q, _ = _cohort(bench, 10_000 + 10 * i)
        noise = _gumbel(tuple(z.shape), 10_003 + 10 * i)
        parts.append(_scores(z, noise, _drawn(PLANTED["none"], z, q, noise, 10_004 + 10 * i)[0]))
    scores = torch.cat(parts)
    return float(scores.mean()), float(scores.std())


def _judged(bench: DifrBench, planted: Planted, run: int, mean: float, spread: float) -> dict[str, Any]:
    """Return the tokens at which each judge found a fault (None: never), and the time that it needed."""
    ledgers = {
        name: Ledger(bench.vocabulary, enumerate_rows=False, tolerance=TOLERANCE) for name in ("tokens", "log-probs")
    }
    scores = torch.zeros(0, dtype=torch.float64)
    judges = [*ledgers, *(["difr"] if planted.seeded else [])]
    found: dict[str, Any] = dict.fromkeys((*ledgers, "difr"))
    spent = dict.fromkeys(found, 0.0)
    cohort = 0
    while cohort * COHORT < bench.tokens and any(found[judge] is None for judge in judges):
        seed = 1_000_000 * (run + 1) + 10 * cohort
        z, q, numbers = _cohort(bench, seed)
        noise = _gumbel(tuple(z.shape), seed + 3)
        tokens, reported = _drawn(planted, z, q, noise, seed + 4)
        block = _with_tokens(z.softmax(-1), tokens, q, numbers, 1000 * cohort)
        for name, ledger in ledgers.items():
            own = replace(block, reported=reported, declared=block.logprobs) if name == "log-probs" else block
            started = time.process_time()
            ledger.update(own)
            spent[name] += time.process_time() - started
            if found[name] is None and ledger.log_e >= math.log(1 / ledger.alpha):
                found[name] = ledger.tokens
        started = time.process_time()
        scores = torch.cat([scores, _scores(z, _gumbel(tuple(z.shape), seed + 3), tokens)])
        spent["difr"] += time.process_time() - started
        if found["difr"] is None and planted.seeded:
            found["difr"] = _first(scores, mean, spread)
        cohort += 1
    return found | {f"{name} ms": 1000 * seconds / (cohort * COHORT) for name, seconds in spent.items()}


def _first(scores: Tensor, mean: float, spread: float) -> int | None:
    """Return the first look at which the mean score is too high, or None if there is none yet."""
    counts = torch.arange(LOOKS, len(scores) + 1, LOOKS)
    means = scores.cumsum(0)[counts - 1] / counts
    late = torch.nonzero(means > mean + Z * spread / counts.sqrt())
    return int(counts[late[0, 0]]) if len(late) else None


if __name__ == "__main__":  # of another checkout, see ``run_speed``
    sys.stdout.write(json.dumps(timed(int(sys.argv[1]), int(sys.argv[2]))))

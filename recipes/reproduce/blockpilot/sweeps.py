"""Decoding of every prompt with every block size: greedy for the full sweep, sampled for the null test."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bebop.adaptation.corpus import question_streams
from bebop.config.job import DecodingConfig
from bebop.systems.block.losses import Sweep
from bebop.systems.block.network import FEATURES
from bebop.systems.block.training import prompt_ends
from bebop.trajectory import Prompt
from recipes.reproduce.blockpilot.decoding import Answers, Array, Counts, decode, loaded, once
from recipes.reproduce.study import QUICK, policy, settings

TRAINED = 8  # B, slots of a block in the training of the shipped drafter
RADIUS = 2  # candidates are B - RADIUS .. B + RADIUS, as in the paper
CANDIDATES = tuple(range(TRAINED - RADIUS, TRAINED + RADIUS + 1))
SIZES = tuple(range(5, 11)) if QUICK else tuple(range(2, 13))  # the full sweep
PROMPTS = 10 if QUICK else 60
FULL = 5 if QUICK else 18  # the first prompts are decoded with every size; the others with the candidates
DRAWN = 3 if QUICK else 6  # prompts of the null test
DRAWS = 1 if QUICK else 4  # completions per prompt and size in each of the two sets
CYCLES = 24  # cycles of a completion that are recorded separately
TIMES = {"draft": 0.2, "verify": 0.03}  # cost ratios for block_ema: a drafter pass, one more position, in plain steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """N prompts of a seed with S sizes at temperature 0; NaN where a prompt was not decoded with a size."""

    tasks: tuple[str, ...]  # N
    tokens: Array  # [N, S] tokens of the completions, up to their end
    whole: Array  # [N, S] the same with tokens of the last cycle beyond the end
    cycles: Array  # [N, S]
    halves: Array  # [2, N, S] tokens a cycle in the first and in the second half of an answer's cycles
    by_cycle: Counts  # [S, CYCLES, 2] tokens, and completions that have such a cycle
    features: dict[str, Array]  # kind -> [N, F]
    ema: Answers  # decoded with sizes chosen by EMA
    same: float  # share of the first FULL completions whose tokens are the same with every size

    def candidates(self, kind: str = "logits", sizes: tuple[int, ...] = CANDIDATES) -> Sweep:
        """Return the sweep over some of the sizes, with one kind of features."""
        at = [SIZES.index(size) for size in sizes]
        return Sweep(
            sizes=sizes,
            tokens=self.tokens[:, at],
            cycles=self.cycles[:, at],
            features=torch.from_numpy(self.features[kind]),
        )


def held_out(seed: int, count: int) -> list[Prompt]:
    """Return the first held-out prompts of a seed."""
    return question_streams(settings(seed, f"evaluation.prompts={count}"), policy())[1]


def sweep(seed: int) -> Swept:
    """Return the sweep of a seed; it is loaded if it was made before."""
    return once("sweep", (seed, PROMPTS, FULL, SIZES, TIMES), lambda: _sweep(seed))


def _sweep(seed: int) -> Swept:
    model, prompts = loaded(), held_out(seed, PROMPTS)
    answers = [decode(model, prompts if size in CANDIDATES else prompts[:FULL], size) for size in SIZES]
    adaptive = DecodingConfig(
        system="block_ema", draft_tokens=max(CANDIDATES) - 1, cost_ratio=TIMES["draft"], verify_ratio=TIMES["verify"]
    )
    ends = prompt_ends(model, prompts)
    return Swept(
        tasks=tuple(p.task for p in prompts),
        tokens=columns([a.tokens for a in answers]),
        whole=columns([a.emitted.sum(1) for a in answers]),
        cycles=columns([a.cycles for a in answers]),
        halves=np.stack([columns([halves(a)[i] for a in answers]) for i in (0, 1)]),
        by_cycle=np.stack([np.stack([a.kept[:, :CYCLES].sum(0), (a.kept[:, :CYCLES] > 0).sum(0)], 1) for a in answers]),
        features={kind: of(ends).numpy() for kind, of in FEATURES.items()},
        ema=decode(model, prompts, adaptive),
        same=float(np.mean([len(set(ids)) == 1 for ids in zip(*(a.ids for a in answers), strict=False)])),
    )


def columns(listed: Sequence[NDArray[Any]]) -> Array:
    """Return the arrays as columns [PROMPTS, len(listed)], filled with NaN where they are shorter."""
    table = np.full((PROMPTS, len(listed)), np.nan)
    for i, column in enumerate(listed):
        table[: len(column), i] = column
    return table


def halves(answers: Answers) -> Array:
    """Return tokens per cycle [2, N] in the first half of the cycles, rounded down, and in the rest.

    Entries without a cycle are NaN.
    """
    at, half = np.arange(answers.kept.shape[1]), (answers.cycles // 2)[:, None]
    first = np.where(at < half, answers.kept, 0).sum(1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.stack([first / half[:, 0], (answers.tokens - first) / (answers.cycles - half[:, 0])])


def twice(seed: int) -> Array:
    """Return tokens per cycle [2, N, C] of the candidates at temperature 1, in two sets of completions per prompt."""
    return once("twice", (seed, DRAWN, DRAWS, CANDIDATES), lambda: _twice(seed))


def _twice(seed: int) -> Array:
    model, prompts = loaded(), held_out(seed, DRAWN)
    sums = np.zeros((2, 2, DRAWN, len(CANDIDATES)))
    for i, size in enumerate(CANDIDATES):
        for draw in range(2 * DRAWS):
            answers = decode(model, prompts, size, temperature=1.0, draw=1 + draw)
            sums[draw // DRAWS, :, :, i] += np.stack([answers.tokens, answers.cycles])
    return sums[:, 0] / sums[:, 1]

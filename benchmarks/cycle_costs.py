"""Seconds of a cycle of the embedded engine, alone, by drafts and rows, as the simulator takes them (``costs.cycles``).

A wave of answers leaves one row after another, so that one run sees all sizes. Sizes seen less than ``ENOUGH`` times do
not count: between two others the simulator goes on a straight line. Straight lines in all would not do: on a processor
a batch of 64 rows costs no more than one of 56.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from bebop.config import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams

DRAFTS = (0, 1, 3)
SLOTS = (8, 32, 64)
LONGEST = 160  # tokens of an answer
ENOUGH = 5  # cycles


class Size(NamedTuple):
    """Of a cycle."""

    drafts: int
    rows: int
    admitted: int


def measured(rounds: int) -> tuple[list[tuple[int, int, float]], float]:
    """Median seconds of (drafts, rows), and of what each admission adds; the arms in turns, after a wave to warm up."""
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(), need_head=True, needs=[])
    source = PromptSource(TaskConfig(), chat_encoder(policy.tokenizer), 1024)
    arms = [(drafts, slots) for drafts in DRAFTS for slots in SLOTS]
    seen: list[tuple[Size, float]] = []
    _wave(policy, source, *arms[0])
    for drafts, slots in tqdm(arms * rounds, desc="cycles"):
        seen += _wave(policy, source, drafts, slots)
    return medians(seen)


def medians(seen: Sequence[tuple[Size, float]]) -> tuple[list[tuple[int, int, float]], float]:
    """Of cycles without admissions by (drafts, rows), and of what an admission adds to such a cycle."""
    by_size: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    for size, seconds in seen:
        if not size.admitted:
            by_size[size.drafts, size.rows].append(seconds)
    known = {size: float(np.median(spent)) for size, spent in by_size.items() if len(spent) >= ENOUGH}
    added = [
        (seconds - known[size.drafts, size.rows]) / size.admitted
        for size, seconds in seen
        if size.admitted and (size.drafts, size.rows) in known
    ]
    if not added:
        raise ValueError(f"no size was seen {ENOUGH} times beside one with admissions")
    return [(*size, seconds) for size, seconds in sorted(known.items())], max(0.0, float(np.median(added)))


def _wave(policy: Policy, source: PromptSource, drafts: int, slots: int) -> list[tuple[Size, float]]:
    """Twice as many answers as slots, until the last has ended."""
    config = DecodingConfig(system="bebop" if drafts else "autoregressive", draft_tokens=drafts)
    engine = TorchEngine(policy, config, slots=slots, max_length=512)
    for i in range(2 * slots):
        params = SamplingParams(max_new_tokens=LONGEST, stop_token_ids=policy.eos_token_ids, seed=i)
        engine.add(Request(id=i, token_ids=source.prompt(i // 4).token_ids, params=params))
    spent = []
    while engine.unfinished:
        admitted = min(slots - len(engine.active), len(engine.waiting))
        size = Size(drafts, len(engine.active) + admitted, admitted)
        started = time.perf_counter()
        engine.step()
        spent.append((size, time.perf_counter() - started))
    return spent

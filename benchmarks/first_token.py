"""Time to the first token of a completion: the cost of reading a prompt, by its length, one request at a time.

The tokens of a prompt do not matter for this, so they are random. The arms take turns, prompt by prompt, and are
compared within a turn. ``admit`` reads many prompts of a long-tailed distribution of lengths at once.
"""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from bebop.bench.record import noted
from bebop.bench.rollout import load_with_parts
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenBench:
    """Settings of the benchmark."""

    model: ModelConfig
    systems: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of a prompt
    rounds: int


def run(bench: FirstTokenBench) -> list[dict[str, Any]]:
    """Return one row per arm and length of the prompt."""
    return measure(load_with_parts(bench.model, bench.systems), bench)


def measure(policy: Policy, bench: FirstTokenBench) -> list[dict[str, Any]]:
    """Measure a loaded policy.

    ``ms`` and ``x plain`` (plain over arm, turn by turn) are medians over the rounds, with their 5th and 95th percent;
    ``entries`` is the number of cache entries after the first token. The first turn warms up and does not count.
    """
    rows, arms = [], bench.systems
    plain = next((arm for arm in arms if not SYSTEMS[arm].drafts), arms[0])
    progress = tqdm(total=len(bench.lengths) * (bench.rounds + 1) * len(arms), desc="first token")
    for length in bench.lengths:
        spent: dict[str, list[float]] = {arm: [] for arm in arms}
        entries: dict[str, int] = {}
        for turn in range(bench.rounds + 1):
            for arm in arms:
                seconds, entries[arm] = first_token(policy, arm, length, turn)
                spent[arm] += [1000 * seconds] * (turn > 0)
                noted({"prompt tokens": length, "arm": arm, "turn": turn, "ms": 1000 * seconds})
                progress.update()
        for arm, times in spent.items():
            ratios = [base / own for base, own in zip(spent[plain], times, strict=True)]
            row: dict[str, Any] = {"prompt tokens": length, "arm": arm, "entries": entries[arm]}
            rows.append(row | _spread("ms", times) | _spread("x plain", ratios))
    progress.close()
    return rows


def first_token(policy: Policy, system: str, length: int, seed: int) -> tuple[float, int]:
    """Return the seconds from a request of random tokens to its first token, and the cache entries then.

    The seconds are processor time, or wall-clock time on a GPU.
    """
    decoding = DecodingConfig(system=system, draft_tokens=SYSTEMS[system].draft_tokens if SYSTEMS[system].drafts else 0)
    engine = TorchEngine(policy, decoding, slots=1, max_length=length + 32)
    tokens = torch.randint(policy.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    request = Request(id=0, token_ids=tuple(tokens), params=SamplingParams(max_new_tokens=32, seed=seed))
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    started = clock()
    engine.add(request)
    engine.step()  # it waits for the device
    return clock() - started, engine.fed[0]


# ---- many prompts at once

MEDIAN, SIGMA, SHORTEST = 300, 1.0, 50  # tokens of a prompt: log-normal, cut off


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionBench:
    """Settings of the benchmark: one admission of many prompts, with pass budgets that take turns."""

    model: ModelConfig
    prompts: int
    longest: int  # tokens of a prompt
    budgets: tuple[int, ...]  # values of ``rollout.torch.prefill_tokens``
    rounds: int


def admit(policy: Policy, bench: AdmissionBench) -> list[dict[str, Any]]:
    """Return one row per budget, the first one a pass over all prompts, padded to the longest.

    ``computed``: positions of the target, padding included, as counted in its passes; ``padding %``: those above
    ``tokens``, in percent of ``tokens``. Every turn has lengths of its own, and all arms read the same prompts. The
    first turn warms up and does not count.
    """
    arms = {f"at most {budget}" if i else "one pass": budget for i, budget in enumerate((2**40, *bench.budgets))}
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    counts: dict[str, list[int]] = {arm: [0, 0] for arm in arms}  # passes, positions
    total = 0
    for turn in tqdm(range(bench.rounds + 1), desc="admission"):
        chance = random.Random(turn)
        lengths = [
            min(bench.longest, max(SHORTEST, round(chance.lognormvariate(0, SIGMA) * MEDIAN)))
            for _ in range(bench.prompts)
        ]
        total += (sum(lengths) - len(lengths)) * (turn > 0)  # the first cycle feeds the last token
        for arm, budget in arms.items():
            spent, passes, computed = admission(policy, lengths, budget)
            noted({"turn": turn, "arm": arm, "ms": 1000 * spent, "passes": passes, "computed": computed})
            if turn:
                seconds[arm].append(1000 * spent)
                counts[arm] = [counts[arm][0] + passes, counts[arm][1] + computed]
    rows: list[dict[str, Any]] = []
    for arm, times in seconds.items():
        passes, computed = counts[arm]
        row = {"arm": arm, "passes": passes / bench.rounds, "tokens": total, "computed": computed}
        row["padding %"] = 100 * (computed / total - 1)
        ratios = [base / own for base, own in zip(seconds["one pass"], times, strict=True)]
        rows.append(row | _spread("ms", times) | _spread("x one pass", ratios))
    return rows


def admission(policy: Policy, lengths: Sequence[int], budget: int) -> tuple[float, int, int]:
    """Admit prompts of ``lengths`` tokens; return the seconds, the passes, and the positions that they compute.

    The tokens are random, so that no two prompts are equal.
    """
    engine = TorchEngine(
        policy, DecodingConfig(system="autoregressive", draft_tokens=0), slots=len(lengths),
        max_length=max(lengths) + 1, prefill_tokens=budget,
    )  # fmt: skip
    chance, passes, computed = torch.Generator().manual_seed(len(lengths)), 0, 0
    for number, length in enumerate(lengths):
        tokens = torch.randint(policy.vocab_size, (length,), generator=chance).tolist()
        engine.add(Request(id=number, token_ids=tuple(tokens), params=SamplingParams(max_new_tokens=1)))
    prefill = engine.decoder.prefill

    def counted(first: int, contexts: Sequence[Sequence[Any]], starts: Sequence[int] = ()) -> None:
        nonlocal passes, computed
        passes += 1
        widths = [len(context) - 1 - start for context, start in zip(contexts, starts, strict=True)]
        computed += len(widths) * max(widths)
        prefill(first, contexts, starts)

    engine.decoder.prefill = counted  # type: ignore[method-assign]
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    started = clock()
    engine.step()  # it waits for the device
    return clock() - started, passes, computed


def _spread(name: str, values: list[float]) -> dict[str, float]:
    """Return the median, and the 5th and 95th percent."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.95))
    return {name: statistics.median(values), f"{name}, 5 %": low, f"{name}, 95 %": high}

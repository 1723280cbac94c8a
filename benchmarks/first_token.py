"""Time to the first token of an answer: what reading a prompt costs, by its length, one request at a time.

Which tokens a prompt has makes no difference to that, so they are random. The arms take turns, prompt by prompt, and
are compared within a turn.
"""

import statistics
import time
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
    """What is measured."""

    model: ModelConfig
    systems: tuple[str, ...]
    lengths: tuple[int, ...]  # tokens of a prompt
    rounds: int


def run(bench: FirstTokenBench) -> list[dict[str, Any]]:
    """Return one row per arm and length of the prompt."""
    return measure(load_with_parts(bench.model, bench.systems), bench)


def measure(policy: Policy, bench: FirstTokenBench) -> list[dict[str, Any]]:
    """Measure a policy that is there.

    ``ms`` and ``x plain`` (plain over arm, turn by turn) are medians over the rounds, with their 5th and 95th percent;
    ``entries`` is how many a cache has after the first token. The first turn warms up and does not count.
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
    """Return the seconds from a request of random tokens to its first, and the entries of a cache then.

    Processor time, or on a GPU that of the clock.
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


def _spread(name: str, values: list[float]) -> dict[str, float]:
    """Median, and the 5th and 95th percent."""
    ordered = sorted(values)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.05, 0.95))
    return {name: statistics.median(values), f"{name}, 5 %": low, f"{name}, 95 %": high}

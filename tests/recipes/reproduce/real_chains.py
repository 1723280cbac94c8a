"""Files of an evaluation of the real study that never ran: synthetic chains of heads, as the stage writes them."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bebop.adaptation.probe import NUMBERS, Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.evaluation import Evaluated, write_chains
from recipes.reproduce.real.heads import DONE

PLAIN = Sampling()
KINDS = ("story", "chain_sum", "list", "code")
PROMPTS, DEPTH = 24, 3


def synthetic(
    seed: int, sampling: Sampling = PLAIN, lift: float = 0.0, greedy: float = -0.02, prompts: int = PROMPTS
) -> Probe:
    """Chains whose acceptance falls with the target's entropy: .7 + ``lift`` - .1 per nat, greedy by ``greedy`` more.

    Contexts depend on nothing but the sampling, so that all heads are looked at on the same ones; ``seed`` moves a head
    by some hundredths as a whole and adds noise of its own.
    """
    world, own = np.random.default_rng(11), np.random.default_rng([12, seed])
    lengths = world.integers(4, 9, prompts)
    row, place = np.repeat(np.arange(prompts), lengths), np.concatenate([np.arange(n) * 2 for n in lengths])
    kind = np.arange(prompts) % len(KINDS)
    shape = (len(row), DEPTH)
    base = world.gamma(2.0, 0.5, shape) + 0.3 * kind[row][:, None]
    entropy = base * sampling.temperature * (0.8 if sampling.target_top_p < 1 else 1.0)
    # Kinds of high entropy are easy: between prompts of all kinds acceptance would seem to rise.
    level = 0.7 + lift + 0.06 * kind[row][:, None] - 0.1 * entropy + own.normal(0, 0.005)
    overlap = level + own.normal(0, 0.02, shape)
    target_only = overlap + greedy + own.normal(0, 0.03, shape)
    draft_entropy = 0.9 * entropy + 0.1 + own.normal(0, 0.1, shape)
    numbers = dict.fromkeys(NUMBERS, overlap) | {
        "target_only": target_only, "target_entropy": entropy, "draft_entropy": draft_entropy,
    }  # fmt: skip
    last = place == np.array([place[row == r].max() for r in range(prompts)])[row]
    numbers = {
        name: np.where(last[:, None] & (np.arange(DEPTH) == DEPTH - 1), np.nan, v) for name, v in numbers.items()
    }
    accept, accept_greedy = (1 + np.nan_to_num(numbers[n]).cumprod(1).sum(1) for n in ("overlap", "target_only"))
    return Probe(
        row=row, place=place, task=np.array(KINDS)[kind[row]], numbers=numbers, accept=accept,
        accept_greedy=accept_greedy,
    )  # fmt: skip


def write_head(
    place: Path, name: str, chains: Probe, at: str = "best", sampling: Sampling = PLAIN, split: str = "test"
) -> None:
    """As if a run had been looked at."""
    asked = Evaluated(head=name, file=f"{at}.safetensors", sampling=sampling, split=split)
    answers = [SimpleNamespace(number=i) for i in range(int(chains.row.max()) + 1)]
    write_chains(asked.path(place), chains, cast(Any, SimpleNamespace(answers=answers)))


def end(place: Path, name: str, flat: bool = True) -> None:
    """As if a run had ended."""
    folder = place / "heads" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DONE).write_text(json.dumps({"ended": "flat" if flat else "steps", "flat": flat}))


def write_arm(
    place: Path,
    objective: str,
    make: Callable[[int, Sampling], Probe],
    samplings: tuple[Sampling, ...] = (PLAIN,),
    seeds: tuple[int, ...] = (0, 1, 2),
    flat: bool = True,
) -> None:
    """All heads of a loss at several samplings."""
    for seed in seeds:
        end(place, f"{objective}-{seed}", flat)
        for sampling in samplings:
            write_head(place, f"{objective}-{seed}", make(seed, sampling), sampling=sampling)

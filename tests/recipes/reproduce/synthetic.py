"""Results of studies that nobody ran: numbers that confirm rules, and files of evaluations as stages write them."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from bebop.adaptation.probe import NUMBERS, Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce import record, rule_hash
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.pages import within
from recipes.reproduce.real.evaluation import Evaluated, write_chains
from recipes.reproduce.real.heads import DONE
from recipes.reproduce.verdicts import Need, Part, Rule


def number(value: float, half: float = 0.002, seeds: int = 40) -> Number:
    return Number(value=value, low=value - half, high=value + half, seeds=seeds)


def value(part: Part, side: int = 1) -> float:
    """Return a value well on the side that confirms a part (1), or on the other (-1)."""
    if part.kind in ("above", "below"):
        return part.bound + 0.4 * side * (1 if part.kind == "above" else -1)
    far = part.bound + 0.6  # from 0
    return far if (part.kind == "differs") == (side > 0) else 0.0


def fulfilled(need: Need, by: float = 0.4) -> float:
    """Return a value with which an arm does what its name says; not, if ``by`` is negative."""
    return need.bound + (by if need.kind in ("above", "not below") else -by)


def confirming(rules: tuple[Rule, ...]) -> dict[str, Number]:
    """Return a number for all that rules ask for, such that each is confirmed; arms are of little noise."""
    needs = {need.number: fulfilled(need) for rule in rules for need in rule.needs}
    parts = [part for rule in rules for group in rule.any_of for part in group]
    found = {name: number(level) for name, level in needs.items()}
    for arm in (arm for part in parts for arm in part.arms):
        level = needs.get(arm, 0.5)
        found[arm] = over_seeds([level, level + 0.001, level - 0.001])
    return found | {part.number: number(value(part)) for part in parts}


def keep(root: Path, study: str) -> Path:
    """Results of a study below ``root``, judged by its rules as they stand."""
    folder, rules = within(root, study), record.rules_of(study)
    figure = folder / "figures" / "a.svg"
    figure.parent.mkdir(parents=True)
    figure.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    place = {"device": "some <processor>", "torch": "2.13", "commit": "abc1234def", "dirty": False, "command": "c"}
    started = record.Started(name=study, origin={}, code=rule_hash.of_study(study), rules=rules, at=0.0)
    record.keep(folder, started, confirming(rules), {}, {figure.name: "A <figure>."}, {})
    content = record.read(folder / "results.json")
    assert content is not None
    record.write(folder / "results.json", content | {"seconds": 90, "processor_seconds": 60, "place": place})
    return folder


def check_names(study: str, names: Iterable[str]) -> None:
    """Assert that a study computes all that its rules ask for, or tell: else hours later it would be 'not measured'."""
    found, rules = set(names), record.rules_of(study)
    asked = {n for r in rules for group in r.any_of for part in group for n in (part.number, *part.arms)}
    asked |= {need.number for r in rules for need in r.needs}
    asked |= {n for r in rules for n in re.findall(r"\{([^}]+)\}", r.evidence)}
    assert asked and asked <= found, asked - found


# ---- files of an evaluation on the real model

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

"""The runs of the museum and their rules, which were written before the runs; each run is kept, so a study resumes.

A run samples cohorts from an engine with a fault until both boxes have proved it or its budget is used. The fault's
exact damage decides the budget: the temperature at which it moves more gets ``BUDGET`` tokens, the other one ``OTHER``.
If not even the exact likelihood ratio finds it in four of five runs of ``BUDGET`` tokens, inside or outside, one run
of ``OTHER`` tokens is made. A fault is misnamed if a run found it and named a wrong cause.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bebop.certify.ledger import FAMILY
from bebop.run_dir.machine import commit
from recipes.certify.museum import damage as damages
from recipes.certify.museum.damage import Cycles, Damage
from recipes.certify.museum.engines import ALPHA, BoxResult, RunResult, examine, recorded
from recipes.certify.museum.exhibits import ATTACKS, CLEAN, EXHIBITS, LOOK_ALIKES, Exhibit

HEATS = (1.0, 2.0)
SEEDS, NEEDED = 5, 4  # runs of an exhibit at a temperature, and how many of them have to find it
BUDGET, OTHER = 50_000, 10_000  # tokens of a run: see above
NAMED = 0.8  # of the runs that found a fault, to be named rightly
CLEAN_RUNS, CLEAN_TOKENS = 250, 3_000  # of intact engines, half at each temperature
LOOK_ALIKE_TOKENS = 3_000
FIRST = 20_000  # of the seeds, and with them of the prompts
VERSION = 1  # of how runs are made; another one makes them anew
VERSIONS: dict[str, int] = {}  # of single exhibits, which a new direction bears on


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run: Job(exhibit=..., temperature=1.0, seed=20100, budget=50000)."""

    exhibit: Exhibit
    temperature: float
    seed: int
    budget: int
    whole: bool = False

    @property
    def key(self) -> str:
        """Return a file name that depends on everything the run depends on."""
        version = VERSIONS.get(self.exhibit.name, VERSION)
        depends = [version, self.exhibit.name, self.exhibit.model, dict(self.exhibit.sampling), self.temperature,
                   self.seed, self.budget, self.whole, self.exhibit.fault.size]  # fmt: skip
        text = json.dumps(depends, sort_keys=True)
        return f"{self.exhibit.name}-T{self.temperature:g}-{self.seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Sizes of the study; a smoke run uses tiny ones."""

    seeds: int = SEEDS
    budget: int = BUDGET
    other: int = OTHER
    clean_runs: int = CLEAN_RUNS
    clean_tokens: int = CLEAN_TOKENS
    look_alike_tokens: int = LOOK_ALIKE_TOKENS
    rows: int = 1_000  # tokens of an intact run that damages are computed from
    first: int = FIRST


SMOKE = Plan(seeds=1, budget=1_500, other=500, clean_runs=2, clean_tokens=500, look_alike_tokens=500, rows=300, first=0)


# ---- the damage


@cache
def _cycles(model: str, temperature: float, sampling: tuple[tuple[str, float], ...], rows: int) -> Cycles:
    return recorded(model, temperature, dict(sampling), rows)


def damage_of(exhibit: Exhibit, temperature: float, rows: int) -> Damage:
    """Return the damage of an exhibit at a temperature, computed from the rows of an intact run."""
    cycles = _cycles(exhibit.model, temperature, tuple(sorted(exhibit.sampling.items())), rows)
    assert exhibit.law is not None
    return damages.damage(
        cycles, exhibit.law, exhibit.bonus, first_alone=exhibit.first_alone, declared=exhibit.declared
    )


def within_reach(one: Damage, budget: int) -> bool:
    """Return whether the exact likelihood ratio, outside or inside, finds it in four of five runs of ``budget``."""
    return min(one.tokens(ALPHA), one.tokens(ALPHA, inside=True)) <= budget


# ---- the runs


def faults(plan: Plan, moved: dict[str, dict[float, Damage]]) -> list[Job]:
    """Return the runs of the exhibits and of the attacks."""
    jobs = []
    for number, exhibit in enumerate((*EXHIBITS, *ATTACKS)):
        seeds = [plan.first + 100 * (number + 1) + run for run in range(plan.seeds)]
        by_heat = moved.get(exhibit.name)
        for heat in HEATS:
            budget, runs = plan.other, seeds
            if by_heat is not None and by_heat[heat].kl >= max(one.kl for one in by_heat.values()):
                budget = plan.budget
            if by_heat is not None and not any(within_reach(one, plan.budget) for one in by_heat.values()):
                budget, runs = plan.other, seeds[:1]
            elif by_heat is not None and not within_reach(by_heat[heat], plan.budget):
                runs = seeds[:1]
            jobs += [Job(exhibit=exhibit, temperature=heat, seed=seed, budget=budget) for seed in runs]

    def order(job: Job) -> tuple[bool, float]:
        by_heat = moved.get(job.exhibit.name)
        need = math.inf if by_heat is None else by_heat[job.temperature].tokens(ALPHA)
        return job.budget != plan.budget, need

    return sorted(jobs, key=order)  # what decides comes first, and short runs before long ones


def look_alikes(plan: Plan) -> list[Job]:
    """Return the runs of exact rules, which use their whole budget."""
    return [
        Job(
            exhibit=exhibit,
            temperature=heat,
            seed=plan.first + 5_000 + 100 * number + run,
            budget=plan.look_alike_tokens,
            whole=True,
        )
        for number, exhibit in enumerate(LOOK_ALIKES)
        for heat in HEATS
        for run in range(plan.seeds)
    ]


def clean(plan: Plan) -> list[Job]:
    """Return the runs of intact engines."""
    return [
        Job(
            exhibit=CLEAN,
            temperature=HEATS[run % len(HEATS)],
            seed=plan.first + 9_000 + run,
            budget=plan.clean_tokens,
            whole=True,
        )
        for run in range(plan.clean_runs)
    ]


def kept(folder: Path, job: Job) -> RunResult | None:
    """Return a run that was made before, or None."""
    path = folder / f"{job.key}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text())

    def box(one: dict[str, Any]) -> BoxResult:
        return BoxResult(**{**one, "evidence": tuple(tuple(row) for row in one["evidence"])})

    return RunResult(black=box(content["black"]), white=box(content["white"]), acceptance=content["acceptance"])


def run_jobs(folder: Path, jobs: Sequence[Job], say: str) -> None:
    """Make the missing runs; each is kept as soon as it is done."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    for job in tqdm(jobs, desc=say, unit="run", disable=None):
        path = folder / f"{job.key}.json"
        if path.is_file():
            continue
        found = examine(job.exhibit, job.temperature, job.budget, job.seed, whole=job.whole)
        scratch = path.with_suffix(".new")
        made = {**commit(), "directions": len(FAMILY), "torch": torch.__version__}
        scratch.write_text(json.dumps({**dataclasses.asdict(found), "made": made}))
        scratch.replace(path)


# ---- the rules


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Judgement of an exhibit: whether and at which temperature it was seen."""

    seen: str  # yes, no test can, missed, not finished, not run
    temperature: float | None  # at which it was seen


def judge(runs: dict[float, list[RunResult]], moved: dict[float, Damage], plan: Plan) -> Verdict:
    """Return whether an exhibit was seen: by either box in four of five seeds at one temperature, within its budget.

    ``no test can``: at no temperature does the exact likelihood ratio find it in four of five runs of the budget.
    ``missed``: the likelihood ratio could, and the certificate did not. ``not finished``: decisive runs are missing.
    """
    for heat, all_runs in runs.items():
        found = sum(run.black.found is not None or run.white.found is not None for run in all_runs)
        if len(all_runs) >= plan.seeds and found >= math.ceil(plan.seeds * NEEDED / SEEDS):
            return Verdict(seen="yes", temperature=heat)
    if not any(within_reach(one, plan.budget) for one in moved.values()):
        return Verdict(seen="no test can", temperature=None)
    if not any(runs.values()):
        return Verdict(seen="not run", temperature=None)
    finished = all(len(runs[heat]) >= plan.seeds for heat, one in moved.items() if within_reach(one, plan.budget))
    return Verdict(seen="missed" if finished else "not finished", temperature=None)

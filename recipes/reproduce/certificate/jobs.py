"""Jobs of the study; each is kept on disk by itself, so a stopped study resumes."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from recipes.reproduce.certificate.clean import Simulated, simulated
from recipes.reproduce.certificate.faults import Planted
from recipes.reproduce.certificate.findings import CASES, HARMLESS, Case, case
from recipes.reproduce.certificate.runs import Look, black_box, watched, white_box
from recipes.reproduce.study import QUICK, everywhere, once

STUDY = "certificate"
HEATS = (1.0, 2.0)
# Cases without a bar: how long detection takes beyond the budget, and with the white box.
BESIDE = (
    case("black", 60_000, 1, "stops filtered", 1, "stop_token"),
    case("white", 10_000, 1, "stops filtered", 1, "draft_draw"),
)
REPEATS = 1 if QUICK else 5  # runs of each fault, with seeds of their own
FEW = 1 if QUICK else 2  # runs of each case without a bar
HARM = 1 if QUICK else 4  # runs of each head
SIMULATED = 4 if QUICK else 125  # at each temperature
COHORTS = 1 if QUICK else 8  # of a simulated run
LIVE = 1 if QUICK else 6  # at each temperature
LONG = 500 if QUICK else 6_000  # tokens of a live run without a fault
FIRST = 0 if QUICK else 10_000  # first seed, which also selects prompts: a smoke run uses none of the study's
SIZES = {"zeroed head": 1.0, "stale head": 1.0}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The work of one process: a case, or an engine that should raise no alarm, with a seed."""

    kind: str  # fault, beside, simulated, live
    place: int  # index of the case, of the temperature, or of the harmless kind, where 0 plants nothing
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Everything:
    """All measurements of the study."""

    faults: dict[str, list[Look]]  # by the name of the case
    beside: dict[str, list[Look]]  # the same for cases without a bar
    simulated: list[Simulated]
    live: dict[str, list[tuple[Look, Look]]]  # by planted kind: black and white box


def plan() -> list[Job]:
    """Return the jobs, long ones first, so that two processes end together."""
    slow = sorted(range(len(CASES)), key=lambda i: -CASES[i].budget)
    faults = [Job(kind="fault", place=i, seed=FIRST + 100 * (i + 1) + run) for i in slow for run in range(REPEATS)]
    simulations = [Job(kind="simulated", place=i, seed=FIRST + 5000 + i) for i in range(len(HEATS))]
    clean = [Job(kind="live", place=0, seed=FIRST + 6000 + run) for run in range(LIVE * len(HEATS))]
    harmless = [
        Job(kind="live", place=1 + i, seed=FIRST + 7000 + 100 * i + run)
        for i in range(len(HARMLESS))
        for run in range(HARM)
    ]
    beside = [
        Job(kind="beside", place=i, seed=FIRST + 8000 + 100 * i + run) for i in range(len(BESIDE)) for run in range(FEW)
    ]
    return [*simulations, *clean, *faults, *harmless, *beside]


def done(job: Job) -> Look | Simulated | tuple[Look, Look]:
    """Return the result of a job, which runs unless its result is stored."""
    torch.set_num_threads(1)
    if job.kind in ("fault", "beside"):
        one = (CASES if job.kind == "fault" else BESIDE)[job.place]
        return _kept(job, (one, job.seed), lambda: _fault(one, job.seed))
    if job.kind == "simulated":
        asked = (HEATS[job.place], SIMULATED, COHORTS, job.seed)
        return _kept(job, asked, lambda: simulated(*asked))
    heat = HEATS[job.seed % len(HEATS)]
    kind = "none" if job.place == 0 else HARMLESS[job.place - 1]
    planted = Planted(kind=kind, size=SIZES.get(kind, 1.0), heat=heat)
    return _kept(job, (planted, LONG, job.seed), lambda: watched(planted, LONG, job.seed))


def everything() -> Everything:
    """Run all jobs in as many processes as ``BEBOP_CERTIFICATE_WORKERS`` says (1 by default)."""
    jobs = plan()
    found = dict(
        zip(
            jobs,
            everywhere(done, jobs, "runs", workers=int(os.environ.get("BEBOP_CERTIFICATE_WORKERS", "1"))),
            strict=True,
        )
    )
    kinds = ("none", *HARMLESS)
    return Everything(
        faults={
            one.name: [r for j, r in found.items() if j.kind == "fault" and j.place == i and isinstance(r, Look)]
            for i, one in enumerate(CASES)
        },
        beside={
            one.name: [r for j, r in found.items() if j.kind == "beside" and j.place == i and isinstance(r, Look)]
            for i, one in enumerate(BESIDE)
        },
        simulated=[r for r in found.values() if isinstance(r, Simulated)],
        live={
            kind: [r for j, r in found.items() if j.kind == "live" and j.place == i and isinstance(r, tuple)]
            for i, kind in enumerate(kinds)
        },
    )


def _fault(one: Case, seed: int) -> Look:
    planted = Planted(kind=one.kind, size=one.size, heat=one.heat)
    return (black_box if one.box == "black" else white_box)(planted, 500 if QUICK else one.budget, seed)


def _kept(job: Job, settings: object, make: Callable[[], T]) -> T:
    return once(STUDY, f"{job.kind}-{job.place}-{job.seed}", settings, make)

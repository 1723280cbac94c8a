"""Which jobs are run, and which faults befall them when: drawn from a seed, so that a run can be had again."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.chaos.faults import FAULTS

SMALL = (
    "trainer.groups_per_step=4", "trainer.group_size=4", "rollout.slots=16", "rollout.sampling.max_new_tokens=96",
    "rollout.workers=2", "rollout.on_update=recompute", "trainer.save_every=1", "trainer.steps=100000",
    "trainer.keep=100000", "monitor.trace=all", "monitor.tensorboard=false", "monitor.plots=false",
    "monitor.ray_metrics=false", "monitor.probe_every=0", "monitor.certify_every=0", "runtime.progress=false",
    "runtime.max_restarts=1000", "runtime.dashboard=false",
)  # fmt: skip
QUICK = "runtime.hang_after=5"
JOBS: dict[str, tuple[str, ...]] = {
    "pull": (QUICK, "rollout.staleness=2"),
    "sync": (QUICK, "rollout.staleness=0"),
    "ranks": (QUICK, "rollout.staleness=1", "trainer.ranks=2"),
    "reward": (QUICK, "rollout.staleness=1", "task.reward=tests.chaos.rewards.score", "task.reward_timeout=3"),
    "disk": (QUICK, "rollout.staleness=1", "trainer.keep=2"),
    "hangs": ("rollout.staleness=1",),  # runtime.hang_after as it is by default
    "sglang": (
        "rollout=sglang", "model=folder", "model.path={folder}/model", "model.device=cpu", "model.dtype=float32",
        "task=file", "task.path={folder}/task.jsonl", "task.reward=tests.chaos.rewards.letters", "task.system=null",
        "rollout.staleness=1", "rollout.workers=1", "rollout.max_length=64", "rollout.sampling.max_new_tokens=8",
        "rollout.sglang.cache_tokens=4096", "rollout.sglang.monitor_every=1", "rollout.sglang.pause=retract",
        "decoding.draft_tokens=2", "runtime.hang_after=10",
    ),
}  # fmt: skip
SHARES = {"pull": 0.4, "sync": 0.2, "ranks": 0.12, "reward": 0.15, "disk": 0.03, "hangs": 0.1}  # of the others: none
A_RUN = 12  # faults of one job
AT_ONCE = 0.15  # of the faults come right after the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One fault."""

    kind: str
    steps: int  # further steps of the job before it happens
    seconds: float  # and seconds after that
    seed: int  # of whom it hits


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One job."""

    name: str
    job: str  # a kind of job; what it is run with
    overrides: tuple[str, ...]
    faults: tuple[Planned, ...]
    steps: int = 0  # of an undisturbed job, which ends by itself
    bug: str = ""  # planted in the job's code: one of ``job.BUGS``

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plans(seed: int, faults: int, kinds: Sequence[str] = (), jobs: Sequence[str] = ()) -> list[Plan]:
    """Jobs with so many faults together; of these kinds alone, upon these jobs alone (all if there are none)."""
    rng = random.Random(seed)
    chosen = {name: fault for name, fault in FAULTS.items() if not kinds or name in kinds}
    shares = {job: SHARES.get(job, 1.0) for job in jobs or SHARES}
    wanted = {job: round(faults * share / sum(shares.values())) for job, share in shares.items()}
    wanted[next(iter(shares))] += faults - sum(wanted.values())
    found = []
    for job, count in wanted.items():
        able = [name for name, fault in chosen.items() if job in fault.jobs]
        if not able:
            continue
        drawn = spread(able, count, rng)
        for begin in range(0, count, A_RUN):
            name = f"{job}-{begin // A_RUN}"
            found.append(Plan(name=name, job=job, overrides=JOBS[job], faults=timed(drawn[begin : begin + A_RUN], rng)))
    rng.shuffle(found)
    return found


def spread(able: list[str], count: int, rng: random.Random) -> list[str]:
    """So many kinds: each as often as its weight says, rounded at random, in any order."""
    total = sum(FAULTS[name].weight for name in able)
    whole = {name: int(count * FAULTS[name].weight / total) for name in able}
    drawn = [name for name, often in whole.items() for _ in range(often)]
    drawn += rng.choices(able, [FAULTS[name].weight for name in able], k=count - len(drawn))
    rng.shuffle(drawn)
    return drawn


def timed(kinds: list[str], rng: random.Random) -> tuple[Planned, ...]:
    """When each happens: most once the one before is over, some on top of it."""
    found = []
    for i, kind in enumerate(kinds):
        able = i > 0 and not FAULTS[kind].ends and not FAULTS[kinds[i - 1]].ends
        steps = -1 if able and rng.random() < AT_ONCE else rng.choice((0, 0, 1))
        found.append(Planned(kind=kind, steps=steps, seconds=rng.uniform(0, 1.5), seed=rng.randrange(1 << 30)))
    return tuple(found)


def reference(job: str, steps: int, number: int = 0) -> Plan:
    """The same job undisturbed."""
    return Plan(name=f"reference-{job}-{number}", job=job, overrides=JOBS[job], faults=(), steps=steps)


def planted(bug: str, number: int) -> Plan:
    """A job with a bug, and the fault that it needs to show."""
    twice = tuple(Planned(kind="report told twice", steps=1, seconds=0.0, seed=0) for _ in range(3))
    name, needs = f"planted-{number}", "twice" in bug
    return Plan(
        name=name, job="pull", overrides=JOBS["pull"], faults=twice if needs else (), steps=0 if needs else 8, bug=bug
    )

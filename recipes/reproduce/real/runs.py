"""Which heads are trained: one that all begin from, and from it every loss, three seeds each; and fresh ones."""

from dataclasses import dataclass
from pathlib import Path

from bebop.trainer.objectives import OBJECTIVES
from recipes.reproduce.real.objectives import COMPARED
from recipes.reproduce.study import QUICK, SEEDS

SHARED = "shared"  # the head that the others go on from
FRESH = ("hard_ce", "ce", "tv", "e2e_tv", "nla", "hybrid")  # losses that are also trained from the beginning


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun:
    """How a head is trained: HeadRun(name="e2e_tv-0", objective="e2e_tv", seed=0, start="shared")."""

    name: str  # of its folder
    objective: str  # of ``objectives.COMPARED``
    seed: int  # of the order of the answers
    start: str  # of ``starts.STARTS``, or the name of another run, whose best head it goes on from
    depth: int = 5
    lr: float = 1e-3
    drops: int = 2  # times that the rate is divided by 4 when the curve is flat; after the last one the run ends
    rows_per_step: int = 16
    every: int = 4  # of a row's chains in one step: each fourth
    most_steps: int = 4000
    most_seconds: float = 6 * 3600.0  # of processor time in updates
    validate_every: int = 50  # steps between validations, and between checkpoints
    validation_chains: int = 8  # validation takes each eighth chain
    patience: int = 300  # steps, see ``curve.py``
    rise: float = 0.005  # tokens
    marks: tuple[int, ...] = (50, 200, 800)  # steps after which the head is kept as well: equal steps
    second_marks: tuple[float, ...] = (150.0, 600.0, 2400.0)  # seconds of processor time: equal time
    mixed: bool = True  # products in bfloat16; the head's own weights and all sums in fp32

    def folder(self, place: Path) -> Path:
        """Where the run keeps all that it has."""
        return place / "heads" / self.name


SMALL = {
    "rows_per_step": 4, "most_steps": 6, "validate_every": 2, "validation_chains": 2, "patience": 2, "marks": (2,),
    "second_marks": (), "mixed": False, "every": 2, "depth": 3,
}  # fmt: skip


def _run(name: str, objective: str, seed: int, start: str, **more: object) -> HeadRun:
    options: dict[str, object] = {**more, **(SMALL if QUICK else {})}
    return HeadRun(name=name, objective=objective, seed=seed, start=start, **options)  # type: ignore[arg-type]


def all_runs() -> list[HeadRun]:
    """Every run, each after the one that it begins from; what the claims need most comes first, seed by seed."""
    seeds = SEEDS[:1] if QUICK else SEEDS
    runs = [_run(SHARED, "ce", 0, "fitted", most_steps=12_000, most_seconds=12 * 3600.0)]
    for seed in seeds:
        runs += [_run(f"{name}-{seed}", name, seed, SHARED, lr=5e-4) for name in OBJECTIVES if name in COMPARED]
    for seed in seeds:
        runs += [_run(f"fresh-{name}-{seed}", name, seed, "fitted", most_steps=800, drops=0) for name in FRESH]
    for seed in seeds:
        runs += [_run(f"{name}-{seed}", name, seed, SHARED, lr=5e-4) for name in COMPARED if name not in OBJECTIVES]
    return runs

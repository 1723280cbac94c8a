"""Training runs of the heads: one shared head, every loss trained from it, and fresh heads. Each has three seeds.

The losses of claims about converged heads have six seeds. These four losses alone run until their curves are flat. All
others are compared after equal steps and stop at the last mark. At equal spread, Student's interval over two seeds is
3.6 times as wide as over three, and that over three 2.4 times as wide as over six.
"""

from dataclasses import dataclass
from pathlib import Path

from recipes.reproduce.real.objectives import TOP_K_LOSSES
from recipes.reproduce.study import QUICK, SEEDS

SHARED = "shared"  # the head that the others start from
CONVERGED = ("ce", "tv", "e2e_tv", "hard_ce")  # losses that are trained until their curves are flat
FRESH = ("ce", "e2e_tv", "hard_ce")  # losses that are also trained from the beginning
BRIEF = ("nla", "hybrid", "e2e_tv_corrected", *TOP_K_LOSSES)  # losses that are compared after equal steps alone
ADDED = (3, 4, 5)  # seeds of the converged losses, added after a first evaluation; see README.md
LAST = 200  # steps at the last mark; no run ends earlier
MARKS = {"marks": (100, LAST), "second_marks": (30.0, 60.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRun:
    """Settings of one head's training: HeadRun(name="e2e_tv-0", objective="e2e_tv", seed=0, start="shared")."""

    name: str  # of its folder
    objective: str  # of ``objectives.COMPARED``
    seed: int  # of the order of the completions
    start: str  # of ``starts.STARTS``, or the name of a run whose best head it continues, or a safetensors file
    depth: int = 5
    lr: float = 1e-3
    drops: int = 2  # times that the rate is divided by 4 when the curve is flat; after the last one the run ends
    rows_per_step: int = 8
    every: int = 8  # of a row's chains in one step: each eighth
    most_steps: int = 4000
    most_seconds: float = 6 * 3600.0  # of processor time in updates
    validate_every: int = 50  # steps between validations, and between checkpoints
    validation_chains: int = 16  # validation takes each 16th chain
    patience: int = 150  # steps, see ``curve.py``
    rise: float = 0.005  # tokens
    marks: tuple[int, ...] = (50, 200, 800)  # steps after which the head is kept as well: equal steps
    second_marks: tuple[float, ...] = (75.0, 300.0, 1200.0)  # seconds of processor time: equal time
    mixed: bool = False  # products in bfloat16 and sums in fp32: slow where processors have none; validation is fp32

    def folder(self, place: Path) -> Path:
        """Return the folder of all files of the run."""
        return place / "heads" / self.name


SMALL = {
    "rows_per_step": 4, "most_steps": 6, "validate_every": 2, "validation_chains": 2, "patience": 2, "marks": (2,),
    "second_marks": (), "every": 2, "depth": 3, "mixed": False,
}  # fmt: skip


# Half of the shared head's completions a step: runs that continue from it take small steps.
LEAN = {**MARKS, "lr": 5e-4, "rows_per_step": 4}
# Until the curve is flat at both rates; a curve that still rises after ``most_steps`` is reported as not flat.
LONG = {**LEAN, "patience": 100, "drops": 1, "most_steps": 1600}
# To the last mark: patience is too long to end the run earlier.
SHORT = {**LEAN, "patience": 2 * LAST, "drops": 0, "most_steps": LAST, "validate_every": 100}


def _run(name: str, objective: str, seed: int, start: str, **more: object) -> HeadRun:
    options: dict[str, object] = {"mixed": True, **more, **(SMALL if QUICK else {})}
    return HeadRun(name=name, objective=objective, seed=seed, start=start, **options)  # type: ignore[arg-type]


def all_runs() -> list[HeadRun]:
    """Return every run, each after the run it starts from.

    The runs that claims need most come first, seed by seed.
    """
    seeds = SEEDS[:1] if QUICK else SEEDS
    runs = [_run(SHARED, "ce", 0, "fitted", validate_every=100, patience=300)]
    for seed in seeds if QUICK else (*SEEDS, *ADDED):
        runs += [_run(f"{name}-{seed}", name, seed, SHARED, **LONG) for name in CONVERGED]
    for seed in seeds:
        runs += [_run(f"fresh-{name}-{seed}", name, seed, "fitted", **{**SHORT, "lr": 1e-3}) for name in FRESH]
    for seed in seeds:
        runs += [_run(f"{name}-{seed}", name, seed, SHARED, **SHORT) for name in BRIEF]
    # Same gradient as ce, computed differently: shows how far rounding alone drives two runs apart. One is enough.
    return [*runs, _run("kl-0", "kl", 0, SHARED, **SHORT)]

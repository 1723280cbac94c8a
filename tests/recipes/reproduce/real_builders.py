"""A study of the real model in small: the built-in one, a few prompts, completions of some tokens."""

from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from bebop.model.backbone import Policy
from recipes.reproduce.real.corpus import make_corpus
from recipes.reproduce.real.plan import Kind, Plan, load
from recipes.reproduce.real.runs import HeadRun
from recipes.reproduce.real.states import Text, make_states, read_text

PLAN = Plan(
    model="tiny",
    kinds=(
        Kind(name="chain_sum", count=12),
        Kind(name="list", count=12, open=True),
        Kind(name="lcm", count=4, seen=False),
    ),
    later=(),
    max_prompt_tokens=80,
    max_new_tokens=12,
    shard=8,
)


def head_run(name: str = "one", **changes: object) -> HeadRun:
    """A run of a few steps with a drop of the learning rate on the way."""
    options: dict[str, object] = {
        "objective": "ce", "seed": 0, "start": "fitted", "depth": 2, "drops": 1, "rows_per_step": 4, "every": 2,
        "most_steps": 8, "validate_every": 2, "validation_chains": 1, "patience": 2, "rise": 1.0, "marks": (3,),
        "second_marks": (), "mixed": False,
    } | changes  # fmt: skip
    return HeadRun(name=name, **options)  # type: ignore[arg-type]


def small_study(folder: Path) -> tuple[Policy, Text]:
    """Return the model, and its completions with their states, which are copied into ``folder``."""
    copytree(_study().name, folder, dirs_exist_ok=True)
    return load(PLAN), read_text(folder, PLAN)


@cache
def _study() -> TemporaryDirectory[str]:
    """Make the completions and states once a process; the folder goes when the process ends."""
    folder, model = TemporaryDirectory(), load(PLAN)
    make_corpus(Path(folder.name), PLAN, model)
    make_states(Path(folder.name), PLAN, model)
    return folder

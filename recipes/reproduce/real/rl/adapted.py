"""Heads that are trained before RL on the task of the runs: completions of the first policy to their questions.

A head trained only on other text could also gain during RL because the task is new to it. That gain could not be told
apart from adaptation to a changed policy.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.adaptation.corpus import backbone_states
from bebop.bench.record import show
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow
from recipes.reproduce.real.corpus import Answer
from recipes.reproduce.real.heads import BEST, DONE, Training
from recipes.reproduce.real.rl.plan import TRAINED, RLPlan
from recipes.reproduce.real.rl.texts import task_texts
from recipes.reproduce.real.runs import SMALL, HeadRun
from recipes.reproduce.real.states import Text, read_states, write_states
from recipes.reproduce.study import QUICK

BATCH = 16  # rows side by side
SETTINGS: Mapping[str, object] = {
    "lr": 5e-4, "drops": 1, "rows_per_step": 16, "every": 4, "most_steps": 1600, "validate_every": 25,
    "validation_chains": 4, "patience": 100, "marks": (), "second_marks": (), "mixed": True,
}  # fmt: skip


def head_runs(plan: RLPlan, origins: Mapping[str, str]) -> list[HeadRun]:
    """Return the settings with which each head is trained until its curve is flat."""
    settings = {**SETTINGS, "depth": plan.depth, **(SMALL | {"depth": plan.depth} if QUICK else {})}
    return [
        HeadRun(name=name, objective=name, seed=0, start=origins[name], **settings)  # type: ignore[arg-type]
        for name in TRAINED
    ]


def task_text(plan: RLPlan, place: Path, model: Policy) -> Text:
    """Return the completions of the task with their states, computed now unless ``place`` has them."""
    rows = task_texts(plan, place, model)
    path = place / "task.npy"
    if not path.is_file():
        write_states(path, backbone_states(model, rows, BATCH))
    held_out = plan.held_out * plan.answers_each
    answers = [_answer(number, row, "validation" if number < held_out else "train") for number, row in enumerate(rows)]
    return Text(answers=tuple(answers), states=read_states(path, [len(row.token_ids) for row in rows]))


def _answer(number: int, row: TokenRow, split: str) -> Answer:
    return Answer(
        number=number, kind=row.task, split=split, seed=number, finish="", prompt=row.prompt, answer=row.answer,
        logprobs=(),
    )  # fmt: skip


def train(runs: Sequence[HeadRun], plan: RLPlan, place: Path, model: Policy) -> None:
    """Train every unfinished head."""
    left = [run for run in runs if not (run.folder(place) / DONE).is_file()]
    if not left:
        return
    text = task_text(plan, place, model)
    for run in left:
        told = Training(run, place, model, text).fit()
        show(f"{run.name}: " + ", ".join(f"{name} {value}" for name, value in told.items()) + "\n")


def trained(place: Path, origins: Mapping[str, str]) -> dict[str, str]:
    """Return the files or starts of the heads with which the runs begin.

    Raises:
        UserError: One of them has not been trained to its end.
    """
    for name in TRAINED:
        if not (place / "heads" / name / DONE).is_file():
            raise UserError(f"the head {name} was not trained yet: run first --stage texts heads")
    return {**origins, **{name: str(place / "heads" / name / BEST) for name in TRAINED}}


def curves(place: Path) -> dict[str, dict[str, object]]:
    """Return the outcome of each head's training, by name."""
    return {name: json.loads((place / "heads" / name / DONE).read_text()) for name in TRAINED}

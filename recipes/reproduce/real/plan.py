"""Plan of the study on a real model: model, prompts and sizes; a smoke run uses the built-in model."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.smollm2 import HEAD
from recipes.reproduce.study import FOLDER, QUICK

SPLITS = ("train", "validation", "test", "unseen")  # unseen: whole kinds of prompts that no head is trained on
SHARES = (0.80, 0.05)  # of the prompts of a kind, to train on and for validation; the rest is for the test


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Kind of prompt: Kind(name="story", count=160, open=True)."""

    name: str  # of reasoning-gym's data set, or of ``open_prompts.KINDS``
    count: int
    open: bool = False  # a question of our own, without a single answer
    seen: bool = True  # whether heads are trained on it


def _kinds() -> tuple[Kind, ...]:
    reasoning = {
        "gsm_symbolic": 240, "family_relationships": 80, "chain_sum": 70, "syllogism": 70, "leg_counting": 70,
        "time_intervals": 70, "basic_arithmetic": 60, "calendar_arithmetic": 60, "aiw": 60, "word_sorting": 60,
        "letter_counting": 60, "sentence_reordering": 60,
    }  # fmt: skip
    questions = {"story": 160, "list": 130, "code": 110, "explain": 110, "dialogue": 100, "letter": 55}
    unseen = {"knights_knaves": 60, "simple_equations": 50, "recipe": 50, "poem": 50}
    return (
        *(Kind(name=name, count=count) for name, count in reasoning.items()),
        *(Kind(name=name, count=count, open=True) for name, count in questions.items()),
        *(Kind(name=n, count=c, open=n in ("recipe", "poem"), seen=False) for n, c in unseen.items()),
    )


def _later() -> tuple[Kind, ...]:
    questions = {"advice": 64, "argue": 60, "describe": 50, "diary": 82}
    return tuple(Kind(name=name, count=count, open=True) for name, count in questions.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All settings that the corpus depends on: another plan is another corpus."""

    model: str = "smollm2"
    kinds: tuple[Kind, ...] = _kinds()
    later: tuple[Kind, ...] = _later()  # kinds by which the corpus grew: prompts that follow those of ``kinds``
    seed: int = 0
    max_prompt_tokens: int = 224  # longer questions are passed over
    max_new_tokens: int = 128
    shard: int = 64  # completions decoded together; a stop in between loses them

    @property
    def prompts(self) -> int:
        """Return the number of prompts."""
        return sum(kind.count for kind in (*self.kinds, *self.later))

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON types, for a file."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return plain


SMOKE = Plan(
    model="tiny",
    kinds=(Kind(name="chain_sum", count=20), Kind(name="gcd", count=20), Kind(name="lcm", count=8, seen=False)),
    later=(),
    max_prompt_tokens=64,
    max_new_tokens=24,
    shard=16,
)
PLAN = SMOKE if QUICK else Plan()
HERE = FOLDER / "real"


def load(plan: Plan, init_mtp: bool = False) -> Policy:
    """Return the plan's model in fp32 on the CPU, and set torch to one thread.

    ``init_mtp``: load it with a head, a fresh one if the model has none.
    """
    torch.set_num_threads(1)
    return load_policy(ModelConfig(path=plan.model, device="cpu", init_mtp=init_mtp))


def require_shipped_head(model: str) -> None:
    """Raise ``UserError`` if SmolLM2's MTP head is not where Bebop ships it: a fresh head would take its place."""
    if model == "smollm2" and not HEAD.is_file():
        raise UserError(f"{HEAD} is missing: this study needs the head that Bebop ships for SmolLM2")


def agree(path: Path, settings: dict[str, Any], what: str) -> None:
    """Write the settings to ``path``, or compare them with those already there.

    Raises:
        UserError: The file has other settings.
    """
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.new")
        scratch.write_text(json.dumps(settings, indent=1) + "\n")
        scratch.replace(path)
        return
    found = json.loads(path.read_text())
    if found != settings:
        name = next(n for n in {**settings, **found} if settings.get(n) != found.get(n))
        raise UserError(
            f"{path.parent} holds {what} made with another {name} ({_short(found.get(name))}, now "
            f"{_short(settings.get(name))}): remove it, or set BEBOP_REPRODUCE to another folder"
        )


def missing(wanted: Sequence[Path], stage: str) -> None:
    """Check that all files are there.

    Raises:
        UserError: A file is missing; the message names the stage to run first.
    """
    lacking = [path for path in wanted if not path.is_file()]
    if lacking:
        raise UserError(
            f"{lacking[0]} is not there ({len(lacking)} of {len(wanted)} files are missing): run first "
            f"python -m recipes.reproduce.real --stage {stage}"
        )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."

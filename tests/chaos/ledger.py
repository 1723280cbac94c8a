"""What a job has to show for itself afterwards, whatever befell it: nothing lost, nothing twice, nothing mislabelled.

Two accounts are held against each other: what the job keeps (``trajectories.sqlite``, ``metrics.jsonl``, checkpoints)
and a journal that the trainer's process writes beside it, of what it really learned from.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import ModelConfig
from bebop.run_dir.checkpoints import DamagedError, Store, verify
from bebop.trainer import checkpoint
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from tests.chaos.job import marked
from tests.chaos.policies import Policies, scored

GROUPS, MEMBERS = 4, 4  # as in ``plan.SMALL``
SAMPLED = 24  # answers whose log-probs are computed again, or more:
OF_EACH = 2  # with tokens of each version
CLOSE = 5e-4  # nats, between the engine's and the ledger's
SIGMAS = 4.0  # standard errors over prompts that rewards may differ by from an undisturbed job


class Finding(NamedTuple):
    """Something that should not be."""

    check: str
    what: str


@dataclass(frozen=True)
class Books:
    """Of one job."""

    folder: Path
    staleness: int

    @property
    def job(self) -> Path:
        """The run folder."""
        return self.folder / "job"

    @cached_property
    def journal(self) -> list[dict[str, Any]]:
        """In the order in which it was written."""
        path = self.folder / "control" / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def faults(self) -> list[dict[str, Any]]:
        """What was done to it."""
        found: list[dict[str, Any]] = json.loads((self.folder / "faults.json").read_text())
        return found

    @cached_property
    def answers(self) -> list[StoredAnswer]:
        """All that are stored, by prompt and member."""
        with Trajectories(self.job / NAME) as stored:
            return stored.answers(range(1, 1 << 30))

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """A row a step."""
        return [json.loads(line) for line in (self.job / "metrics.jsonl").read_text().splitlines()]

    @property
    def kept(self) -> int:
        """Checkpoints that the job keeps."""
        given = json.loads((self.job / "overrides.json").read_text())
        return int(next((o.partition("=")[2] for o in reversed(given) if o.startswith("trainer.keep=")), 3))

    @property
    def store(self) -> Store:
        """Its checkpoints."""
        return checkpoint.store(self.job)

    @property
    def model(self) -> ModelConfig:
        """That it began with."""
        own = self.folder / "model"
        return ModelConfig(path=str(own), device="cpu") if own.exists() else ModelConfig()

    def learned(self, step: int) -> dict[str, Tensor] | None:
        """Weights of a checkpoint; None without one."""
        path = self.weights(step)
        return None if path is None else checkpoint.load(path).trainer["weights"]

    def weights(self, step: int) -> Path | None:
        """The newest sound checkpoint of a step; None if it was not kept."""
        for path in reversed(self.store.all()):
            if self.store.step(path) == step:
                with suppress(DamagedError):
                    verify(path)
                    return path
        return None


def lineage(journal: Sequence[Mapping[str, Any]]) -> tuple[dict[int, Any], int, list[str]]:
    """What the weights of the end were trained on by version, updates that were done again, and what is wrong."""
    found: dict[int, Any] = {}
    again, wrong, pid = 0, [], None
    for row in journal:
        if "loaded" in row:
            again += sum(version > row["loaded"] for version in found)
            found = {version: rows for version, rows in found.items() if version <= row["loaded"]}
            pid = row["pid"]
        elif "trained" in row:
            if row["pid"] != pid and pid is not None:  # a new process without a checkpoint: from the start
                again, found = again + len(found), {}
            pid = row["pid"]
            if row["version"] != len(found) + 1:
                wrong.append(f"version {row['version']} follows {len(found)}")
            found[row["version"]] = row["trained"]
    return found, again, wrong


def order(books: Books) -> list[str]:
    """Every admitted prompt is trained on exactly once, in order, with all its members."""
    trained, _, wrong = lineage(books.journal)
    for version, rows in sorted(trained.items()):
        wanted = list(range((version - 1) * GROUPS, version * GROUPS))
        if [index for index, _ in rows] != wanted:
            wrong.append(f"version {version} learned from prompts {[index for index, _ in rows]}, not {wanted}")
        wrong += [f"prompt {index} has {len(group)} answers" for index, group in rows if len(group) != MEMBERS]
    return wrong


def stored(books: Books) -> list[str]:
    """What is stored is what was trained on: each answer once, under its prompt, member and step."""
    trained, _, _ = lineage(books.journal)
    wanted = {
        (index, member): (version, mark)
        for version, rows in trained.items()
        for index, group in rows
        for member, mark in enumerate(group)
    }
    found = {(one.prompt, one.member): (one.step, marked(one.ids)) for one in books.answers}
    wrong = [f"{key} was trained on and is not stored" for key in sorted(wanted.keys() - found.keys())[:3]]
    wrong += [f"{key} is stored and was not trained on" for key in sorted(found.keys() - wanted.keys())[:3]]
    both = sorted(wanted.keys() & found.keys())
    return wrong + [f"{key} is stored as {found[key]}, not {wanted[key]}" for key in both if found[key] != wanted[key]]


def steps(books: Books) -> list[str]:
    """The log has each step once, in order, and as many as there are versions."""
    found = [row["step"] for row in books.metrics]
    wanted = list(range(1, len(lineage(books.journal)[0]) + 1))
    return [] if found == wanted else [f"steps {found[:3]}...{found[-3:]}, {len(found)} of {len(wanted)}"]


def staleness(books: Books) -> list[str]:
    """No token is older than the bound allows, none comes from weights that were not there, and none goes back."""
    wrong = []
    for one in books.answers:
        age = one.step - 1 - one.versions
        if age.min() < 0 or age.max() > books.staleness or (np.diff(one.versions) < 0).any():
            wrong.append(f"answer {one.id} of step {one.step} has tokens of versions {sorted(set(one.versions))}")
    return wrong


def sampled(answers: Sequence[StoredAnswer], seed: int) -> list[StoredAnswer]:
    """Some answers, and of each version some that have tokens of it: a version may have few."""
    chosen, seen = [], Counter[int]()
    for one in random.Random(seed).sample(answers, len(answers)):
        versions = {int(v) for v in one.versions}
        if len(chosen) < SAMPLED or any(seen[version] < OF_EACH for version in versions):
            chosen.append(one)
            seen.update(versions)
    return chosen


def logprobs(books: Books, seed: int = 0) -> list[str]:
    """The policy of the version that a token names gives the log-prob that the engine gave it.

    Of versions without a checkpoint nothing is known; where that is most tokens since the first update, it is said.
    """
    wrong, policies, looked, missed = [], Policies(books.model, books.learned), 0, 0
    chosen = sampled(books.answers, seed)
    for version in sorted({int(v) for one in chosen for v in one.versions}):
        policy = policies(version)
        for one in chosen:
            own = one.versions == version
            if policy is None:
                missed += own.sum()
            elif own.any():
                looked += own.sum() * (version > 0)
                difference = np.abs(scored(policy, one)[own] - one.logprobs[own]).max()
                if difference > CLOSE:
                    wrong.append(f"answer {one.id}: log-probs of version {version} differ by {difference:.4f}")
    enough = looked > missed or books.kept < len(books.metrics) // 2
    return wrong if enough else [*wrong, f"{missed} of {looked + missed} tokens have no checkpoint of their version"]


def rewards(books: Books, other: Books) -> list[str]:
    """Within the noise of an undisturbed job: means over the same prompts, their difference varying over prompts."""
    ours, theirs = (_by_prompt(one) for one in (books, other))
    both = sorted(ours.keys() & theirs.keys())
    differences = np.array([ours[index] - theirs[index] for index in both])
    if len(both) < 8:
        return [f"only {len(both)} prompts in common"]
    error = differences.std(ddof=1) / np.sqrt(len(both))
    if abs(differences.mean()) <= SIGMAS * max(error, 0.25 / np.sqrt(len(both) * MEMBERS)):
        return []
    return [f"rewards differ by {differences.mean():+.3f}, standard error {error:.3f} over {len(both)} prompts"]


def _by_prompt(books: Books) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for one in books.answers:
        if not one.timed_out:
            found.setdefault(one.prompt, []).append(one.reward)
    return {index: float(np.mean(values)) for index, values in found.items()}


def bits(books: Books, other: Books) -> list[str]:
    """Weights and optimizer of every step are those of the undisturbed job, bit for bit."""
    wrong, compared = [], 0
    for step in range(1, len(books.metrics) + 1):
        mine, its = books.weights(step), other.weights(step)
        if mine is None or its is None:
            continue
        left, right = (_state(path) for path in (mine, its))
        compared += 1
        if left.keys() != right.keys() or not all(torch.equal(left[name], right[name]) for name in left):
            wrong.append(f"step {step} is not that of the undisturbed job")
            break
    able = min(len(books.metrics), len(other.metrics))
    return wrong if wrong or compared > able // 2 else [f"only {compared} of {able} steps could be compared"]


def _state(path: Path) -> dict[str, Tensor]:
    state = checkpoint.load(path).trainer
    return {**state["weights"], **state["optimizer"]}


def refused(books: Books) -> list[str]:
    """Weights that were changed on their way were refused, each time."""
    done = sum(fault["kind"].startswith("weights ") for fault in books.faults)
    found = sum("refused" in row for row in books.journal)
    return (
        [] if found >= done else [f"{found} of {done} times that weights were changed on their way they were refused"]
    )


def noticed(books: Books) -> list[str]:
    """A checkpoint with a changed byte is named, and passed over."""
    done = sum(fault["kind"] == "checkpoint changed" for fault in books.faults)
    found = (books.folder / "out.txt").read_text(errors="replace").count(" is corrupt ")
    return [] if found >= done else [f"{found} of {done} changed checkpoints were noticed"]


def nothing_left(books: Books) -> list[str]:
    """No process and no folder."""
    left = json.loads((books.folder / "left.json").read_text())
    return [f"{what}: {', '.join(found)}" for what, found in left.items() if found]


def went_on(books: Books) -> list[str]:
    """The job went on after every fault, and ended as it was told to."""
    stuck = json.loads((books.folder / "done.json").read_text())["stuck"]
    return [stuck] if stuck else []


ALONE: dict[str, Callable[[Books], list[str]]] = {
    "went on": went_on, "order": order, "stored": stored, "steps": steps, "staleness": staleness,
    "log-probs": logprobs, "refused": refused, "noticed": noticed, "nothing left": nothing_left,
}  # fmt: skip
BESIDE: dict[str, Callable[[Books, Books], list[str]]] = {"rewards": rewards}
EXACT: dict[str, Callable[[Books, Books], list[str]]] = {"bits": bits}


def check(books: Books, reference: Books | None, exact: bool) -> list[Finding]:
    """All that is wrong; ``exact``: the weights must be those of the reference."""
    found = [Finding(name, what) for name, look in ALONE.items() for what in look(books)]
    beside = {**BESIDE, **(EXACT if exact else {})} if reference is not None else {}
    return found + [Finding(n, what) for n, look in beside.items() for what in look(books, reference)]  # type: ignore[arg-type]

"""Training of one head from stored states until its curve is flat; a stopped run resumes from its last validation.

A run's folder holds ``run.json`` (its settings), ``curve.json`` (its validations), ``best.safetensors`` and the heads
at its marks, ``done.json`` once it has ended, and until then a checkpoint. The result depends on the settings and the
corpus alone, so a stopped run ends like one without a stop.
"""

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.part_job import read, store, write
from bebop.adaptation.probe import probe
from bebop.config.job import HeadConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import rows_of_step
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.trainer.optim import whole_copies
from recipes.reproduce.real.curve import Validation, best, flat, rise
from recipes.reproduce.real.objectives import COMPARED
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real.runs import HeadRun
from recipes.reproduce.real.starts import STARTS
from recipes.reproduce.real.states import Text

FIT_ROWS = 256  # completions that ``fitted`` reads
DROP = 0.25  # factor of the learning rate at each drop
BEST, DONE, CURVE = "best.safetensors", "done.json", "curve.json"


class Training:
    """Training run of one head: its weights, its optimizer and its validation curve."""

    def __init__(self, run: HeadRun, place: Path, model: Policy, text: Text) -> None:
        """Begin the run, or resume it from its checkpoint.

        Raises:
            UserError: The folder holds a run of other settings, or the head to start from is missing.
        """
        self.run, self.place, self.folder = run, place, run.folder(place)
        agree(self.folder / "run.json", json.loads(json.dumps(dataclasses.asdict(run))), "a head")
        self.train, self.held_out = text.only("train"), text.only("validation")
        if not self.train.answers or not self.held_out.answers:
            raise UserError(
                "the corpus has no answers to train on, or none for validation: give its kinds more prompts"
            )
        model.backbone.requires_grad_(False)
        self.policy = dataclasses.replace(model, mtp=MTPHead(model.backbone))
        self.config = HeadConfig(objective="ce", depth=run.depth, lr=run.lr, lr_warmup_steps=10)
        self.curve: list[Validation] = []
        self.kept: dict[str, Tensor] = {}  # the head of the best validation
        self.seconds, self.drops, self.since = 0.0, 0, 0  # seconds in updates; drops so far; step of the last drop
        self.losses: list[float] = []  # losses of the steps since the last validation
        found = store(self.folder).newest_sound()
        if found is None:
            self._begin()
        self.trainer = HeadTrainer(WholeBackend(self.policy, Sampling(), mixed=run.mixed), self.config)
        if found is not None:
            self._restore(read(found))

    def _begin(self) -> None:
        """Load the initial weights of the head.

        The result of a start of ``STARTS`` is stored for the other runs.
        """
        if self.run.start not in STARTS:
            found = Path(self.run.start)
            file = found if found.suffix == ".safetensors" else self.place / "heads" / found / BEST
            load_head(self.policy, file, file.parent.name)
            return
        path = self.place / "starts" / f"{self.run.start}.safetensors"
        if not path.is_file():
            STARTS[self.run.start](self.policy, [answer.row for answer in self.train.answers[:FIT_ROWS]])
            assert self.policy.mtp is not None
            save(path, whole_copies(dict(self.policy.mtp.named_parameters())))
        load_head(self.policy, path, self.run.start)

    def fit(self) -> dict[str, Any]:
        """Train to the end; return the content of ``done.json``."""
        objective = COMPARED[self.run.objective]
        if not self.curve:
            self._validate()
        bar = tqdm(desc=self.run.name, total=self.run.most_steps, initial=self.trainer.version, unit="step")
        with bar:
            self._warm_up()
            while (why := self._ended()) is None:
                chosen, hidden = self._rows()
                before, began = self.seconds, time.process_time()
                numbers = self.trainer.update(chosen, objective, hidden, self.run.every)
                self.seconds += time.process_time() - began
                self.losses.append(numbers["head/loss"])
                self._mark(before)
                if self.trainer.version % self.run.validate_every == 0:
                    self._validate()
                    bar.set_postfix_str(
                        f"length {self.curve[-1].length:.3f}, loss {self.curve[-1].loss:.3f}", refresh=False
                    )
                bar.update()
        return self._finish(why)

    # ---- one step

    def _rows(self) -> tuple[list[Any], list[Tensor]]:
        """Return the completions of the next step and their states."""
        count = len(self.train.answers)
        chosen = rows_of_step(count, self.run.rows_per_step, self.run.seed, self.trainer.version)
        return [self.train.answers[i].row for i in chosen], [self.train.states[i] for i in chosen]

    def _warm_up(self) -> None:
        """Run one update and undo it.

        Functions compiled at their first call thus do not count as training time.
        """
        rows, hidden = self._rows()
        state = self.trainer.state_dict()
        self.trainer.update(rows, COMPARED[self.run.objective], hidden, self.run.every)
        self.trainer.load_state_dict(state)

    def _ended(self) -> str | None:
        """Return why the run is over, or None.

        Lowers the learning rate instead where the curve is flat and another drop is left.
        """
        since = [one for one in self.curve if one.step >= self.since]
        at = [dataclasses.replace(one, step=one.step - self.since) for one in since]
        if self.curve[-1].step == self.trainer.version and flat(at, self.run.patience, self.run.rise):
            if self.drops == self.run.drops:
                return "flat"
            self.drops, self.since = self.drops + 1, self.trainer.version
            self._set_rate()
        if self.trainer.version >= self.run.most_steps:
            return "steps"
        return "seconds" if self.seconds >= self.run.most_seconds else None

    def _set_rate(self) -> None:
        self.trainer.config = dataclasses.replace(self.config, lr=self.run.lr * DROP**self.drops)

    def _mark(self, before: float) -> None:
        """Store the head if this step reached a mark; ``before``: seconds of processor time at its start."""
        version = self.trainer.version
        if version in self.run.marks:
            save(self.folder / f"step-{version:05d}.safetensors", self.trainer.weights())
        for mark in self.run.second_marks:
            if before < mark <= self.seconds:
                save(self.folder / f"second-{mark:05.0f}.safetensors", self.trainer.weights())

    # ---- validating and keeping

    def _validate(self) -> None:
        """Validate, keep the head if it is the best so far, and write curve and checkpoint."""
        overlaps = overlaps_of(self.policy, self.held_out, self.run)
        chain = np.nan_to_num(overlaps).cumprod(1).sum(1)
        self.curve.append(
            Validation(
                step=self.trainer.version,
                seconds=round(self.seconds, 2),
                length=1 + float(chain.mean()),
                loss=float(np.mean(self.losses)) if self.losses else math.nan,
                overlaps=tuple(float(value) for value in np.nanmean(overlaps, 0)),
            )
        )
        self.losses = []
        if best(self.curve, self.since) is self.curve[-1]:
            self.kept = self.trainer.weights()
        write(self.folder, self._state(), keep=1)
        self._write(CURVE, {"validations": [dataclasses.asdict(each) for each in self.curve]})

    def _state(self) -> dict[str, Any]:
        return {
            **self.trainer.state_dict(), "best": self.kept, "seconds": self.seconds, "drops": self.drops,
            "since": self.since, "curve": [dataclasses.asdict(each) for each in self.curve],
        }  # fmt: skip

    def _restore(self, state: dict[str, Any]) -> None:
        self.trainer.load_state_dict(state)
        self.kept, self.seconds = state["best"], state["seconds"]
        self.drops, self.since = state["drops"], state["since"]
        self.curve = [Validation(**each) for each in state["curve"]]
        self._set_rate()

    def _finish(self, why: str) -> dict[str, Any]:
        if self.curve[-1].step != self.trainer.version:
            self._validate()
        top = best(self.curve, self.since)
        last = [one for one in self.curve if one.step >= self.since]
        risen = rise([dataclasses.replace(one, step=one.step - self.since) for one in last], self.run.patience)
        told = {
            "ended": why, "flat": why == "flat", "steps": self.trainer.version, "seconds": round(self.seconds, 1),
            "best step": top.step, "best length": top.length, "risen": None if math.isinf(risen) else risen,
        }  # fmt: skip
        save(self.folder / BEST, self.kept)
        self._write(DONE, told)
        shutil.rmtree(store(self.folder).folder)  # some 70 MB a run, no longer needed
        return told

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        scratch = self.folder / f"{name}.new"
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(self.folder / name)


def overlaps_of(policy: Policy, text: Text, run: HeadRun) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the overlap of draft and target at each step of the validation chains [n, K].

    It is in fp32, and NaN where there is no step.
    """
    rows = [answer.row for answer in text.answers]
    found = probe(policy, rows, run.depth, Sampling(), batch=8, states=text.states, every=run.validation_chains)
    return found.numbers["overlap"]


def save(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the weights of a head, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.new")
    save_file(dict(weights), scratch)
    scratch.replace(path)


@torch.no_grad()
def load_head(policy: Policy, path: Path, name: str) -> None:
    """Load the head of another run into a policy.

    Raises:
        UserError: The file is missing.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is not there: train the head {name!r} first, with "
            f"python -m recipes.reproduce.real --stage heads --heads {name}"
        )
    assert policy.mtp is not None
    policy.mtp.load_state_dict(load_file(path))


def done(run: HeadRun, place: Path) -> bool:
    """Return whether a run has ended."""
    return (run.folder(place) / DONE).is_file()

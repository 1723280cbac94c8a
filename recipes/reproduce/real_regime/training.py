"""Training of all heads along one stream of rollouts: sample a shard, compute its states, train every head on it.

Each shard is seen once by each head, so the stream may be as long as time allows. The first shards train
the shared head by soft cross-entropy; all others begin as its copy and see every later shard once, as in the paper,
with the seed of the head as the order within it. So heads of one seed see the same chains in the same order, and
differ by the objective alone.

Life of a head on disk, where the form is resumable::

    heads/e2e_tv-0.pt   {"shards": 12, "trainer": ...}   written after each shard that it was trained on
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm import tqdm

from bebop.config.job import HeadConfig
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.model.smollm2 import HEAD
from bebop.rollout.torch_engine import TorchEngine
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.prompts import RealPrompt
from recipes.reproduce.real.starts import STARTS
from recipes.reproduce.real_regime.plan import DEPTH, RUNS, SHARED, TRAINED_AT, Form, HeadRun
from recipes.reproduce.real_regime.rollouts import kept_shard, kept_states, shard_path

FIT_ROWS = 256  # completions that a fitted start sees
BUILT_IN = "built-in"
Row = dict[str, Any]
Share = tuple[int, int]  # (i, n): of the heads each n-th, beginning with the i-th; the shared one is of every share


class Head:
    """One head with its optimizer, and how many shards of the stream it was trained on."""

    def __init__(self, run: HeadRun, form: Form, model: Policy) -> None:
        """Make a head in the shape of the model's; its weights are for ``begin`` or ``restore`` to set."""
        self.run, self.form, self.shards = run, form, 0
        self.policy = dataclasses.replace(model, mtp=MTPHead(model.backbone))
        shared = run.name == SHARED
        self.rows_per_step = form.shared_rows_per_step if shared else form.rows_per_step
        config = HeadConfig(
            objective="ce",
            depth=DEPTH,
            lr=form.shared_lr if shared else form.lr,
            lr_warmup_steps=10,
            max_tokens=form.max_tokens,
        )
        mixed = form.dtype == "bfloat16"
        self.trainer = HeadTrainer(WholeBackend(self.policy, Sampling(temperature=TRAINED_AT), mixed=mixed), config)

    @torch.no_grad()
    def begin(self, weights: dict[str, Tensor]) -> None:
        """Take over the weights of another head."""
        assert self.policy.mtp is not None
        self.policy.mtp.load_state_dict(weights)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights in fp32 on the CPU."""
        return self.trainer.weights()

    def learn(self, rows: Sequence[TokenRow], states: Sequence[Tensor]) -> float:
        """Train on the next shard; return the mean loss of its steps."""
        passes = self.form.shared_passes if self.run.name == SHARED else 1
        size = min(self.rows_per_step, len(rows))
        losses = []
        for step in range(passes * (len(rows) // size)):
            chosen = rows_of_step(len(rows), size, self.run.seed + 1000 * self.shards, step)
            some, hidden = [rows[i] for i in chosen], [states[i] for i in chosen]
            numbers = self.trainer.update(some, self.run.objective, hidden, self.form.every)
            losses.append(numbers["head/loss"])
        self.shards += 1
        return sum(losses) / len(losses)

    def store(self, folder: Path) -> None:
        """Write all that a resume needs, whole or not at all."""
        path = head_path(folder, self.run.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.new")
        state = {"shards": self.shards, "trainer": self.trainer.state_dict(), "weights": self.weights()}
        torch.save(state, scratch)
        scratch.replace(path)

    def restore(self, folder: Path) -> bool:
        """Go on from what ``store`` wrote; return whether there was anything."""
        path = head_path(folder, self.run.name)
        if not path.is_file():
            return False
        state = torch.load(path, weights_only=True)
        self.begin(state["weights"])
        self.trainer.load_state_dict(state["trainer"])
        self.shards = state["shards"]
        return True


def head_path(folder: Path, name: str) -> Path:
    """Return where a head is kept."""
    return folder / "heads" / f"{name}.pt"


class Stream:
    """The rollouts of a form, shard by shard, and the heads that are trained on them."""

    def __init__(
        self, form: Form, engine: TorchEngine, prompts: Sequence[RealPrompt], place: Path, share: Share = (0, 1)
    ) -> None:
        """Begin, or go on from what ``place`` holds of a resumable form; ``share``: which heads to train."""
        self.form, self.engine, self.prompts, self.place = form, engine, prompts, place
        self.model = model = engine.policy
        model.backbone.requires_grad_(False)
        runs = (HeadRun(name=SHARED, objective="ce", seed=0), *RUNS[share[0] :: share[1]])
        self.heads = {run.name: Head(run, form, model) for run in runs}
        self.tokens = 0  # of the completions of all shards so far
        self.shard = 0  # the next one
        self.finishes: list[bool] = []  # whether each completion ended by itself
        # Names of heads that have weights to go on from.
        self.begun = {name for name, head in self.heads.items() if form.resumable and head.restore(place)}
        if self.shared.shards >= form.shared_shards:
            self._copy_shared()

    @property
    def shared(self) -> Head:
        """Return the shared head."""
        return self.heads[SHARED]

    def _begin_shared(self, rows: Sequence[TokenRow]) -> None:
        """Give the shared head its start: the built-in head, or one that is fitted to rollouts."""
        if self.form.start == BUILT_IN and self.form.plan.model != "tiny":
            self.shared.begin({name: weight.float() for name, weight in load_file(HEAD).items()})
            return
        policy = dataclasses.replace(self.model, mtp=MTPHead(self.model.backbone))
        assert policy.mtp is not None
        STARTS["fitted"](policy, rows[:FIT_ROWS])
        self.shared.begin({name: weight.float() for name, weight in policy.mtp.state_dict().items()})

    def _copy_shared(self) -> None:
        """Let every head that has not begun begin as the shared one."""
        weights = self.shared.weights()
        for name, head in self.heads.items():
            if name not in self.begun and head is not self.shared:
                head.begin(weights)
                head.shards = self.form.shared_shards
                self.begun.add(name)

    def step(self, keep: Callable[[Row], None]) -> None:
        """Sample the next shard and train on it all heads that it is for; ``keep`` takes a row of numbers."""
        seconds, began = {}, time.perf_counter()
        answers = kept_shard(self.form, self.engine, self.prompts, self.place, self.shard)
        rows = [answer.row for answer in answers]
        if SHARED not in self.begun:
            self._begin_shared(rows)
            self.begun.add(SHARED)
        seconds["rollouts"] = time.perf_counter() - began
        owners = self.owners()
        losses: dict[str, float] = {}
        began = time.perf_counter()
        if owners:
            path = shard_path(self.form, self.place, self.shard)
            states = kept_states(self.form, self.model, rows, path)
            seconds["states"] = time.perf_counter() - began
            began = time.perf_counter()
            for head in tqdm(owners, desc="heads", unit="head", leave=False):
                losses[head.run.name] = head.learn(rows, states)
                if self.form.resumable:
                    head.store(self.place)
            seconds["heads"] = time.perf_counter() - began
        self.shard += 1
        self.tokens += sum(len(answer.answer) for answer in answers)
        self.finishes += [answer.finish == "stop" for answer in answers]
        if self.shard == self.form.shared_shards:
            self._copy_shared()
        keep({"shard": self.shard, "tokens": self.tokens, "seconds": seconds, "losses": losses})

    def owners(self) -> list[Head]:
        """Return the heads that have not been trained on the next shard and should be."""
        shared = self.shard < self.form.shared_shards
        return [h for h in self.heads.values() if (h is self.shared) is shared and h.shards <= self.shard]

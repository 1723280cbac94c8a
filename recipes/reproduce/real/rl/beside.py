"""All heads beside one run: each is evaluated and updated on the completions of each step, under the weights of that
step.

Decoding is exact, so the completions of a run do not depend on the drafting head: every arm is evaluated on the same
ones. A stop loses only the work since the last segment and does not change the results. ``looks/step-0006.json`` holds
an evaluation, ``sweep.json`` the fixed texts at other temperatures under the first weights.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import backbone_states
from bebop.adaptation.part_job import read, store, write
from bebop.adaptation.probe import Probe, probe
from bebop.certify.declared import Tolerance, tolerance
from bebop.config.job import HeadConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_backbone
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import TokenRow
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.trainer.probe_set import TEMPERATURES
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from recipes.reproduce.real.heads import load_head
from recipes.reproduce.real.rl.jobs import RUN, weights_of
from recipes.reproduce.real.rl.plan import ARMS, FROZEN, ONLINE, RLPlan
from recipes.reproduce.real.rl.readings import reading, records_of, sweep_of
from recipes.reproduce.real.starts import STARTS

BATCH = 16  # rows side by side


class Beside:
    """Arms of one run, with the trainers of the updated ones. ``model`` is the first policy; its weights change in
    place.
    """

    def __init__(
        self, plan: RLPlan, place: Path, model: Policy, origins: Mapping[str, str], fixed: Sequence[TokenRow]
    ) -> None:
        """Begin, or resume from the newest state in ``place``; ``fixed``: the texts of the direct measure.

        Raises:
            UserError: A head is missing.
        """
        self.plan, self.place, self.model, self.fixed = plan, place, model, fixed
        model.backbone.requires_grad_(False)
        self.policies = {arm: with_head(model, origins[begun], fixed) for arm, (begun, _) in ARMS.items()}
        config = HeadConfig(depth=plan.depth, lr=plan.head_lr, lr_warmup_steps=plan.head_warmup, max_tokens=4096)
        self.trainers = {
            arm: HeadTrainer(WholeBackend(self.policies[arm], Sampling(), mixed=plan.mixed), config) for arm in ONLINE
        }
        self.done = 0  # steps
        if (found := store(place).newest_sound()) is not None:
            state = read(found)
            self.done = state["version"]
            for arm, trainer in self.trainers.items():
                trainer.load_state_dict(state["arms"][arm])

    def follow(self, until: int, bar: "tqdm[Any] | None" = None) -> None:
        """Follow all steps up to ``until``, whose weights have to be in the run folder, then write a checkpoint of the
        heads.
        """
        for step in range(self.done + 1, until + 1):
            if step > 1:
                put_weights(self.model, weights_of(self.place, step - 1))
            answers = answers_of(self.place, step)
            rows = [row_of(answer) for answer in answers]
            states = backbone_states(self.model, rows, BATCH)
            check(self.model, answers[0], states[0], step, tolerance(self.plan.dtype))
            if (step - 1) % self.plan.look_every == 0 or step == self.plan.steps:
                self._look(step, answers, rows, states)
            for arm, trainer in self.trainers.items():
                trainer.update(rows, ARMS[arm][1], states, self.plan.every)
            if bar is not None:
                bar.update()
        if until > self.done:
            arms = {arm: trainer.state_dict() for arm, trainer in self.trainers.items()}
            write(self.place, {"version": until, "arms": arms}, keep=1)
            self.done = until

    def _look(
        self, step: int, answers: Sequence[StoredAnswer], rows: Sequence[TokenRow], states: Sequence[Tensor]
    ) -> None:
        units = [answer.prompt for answer in answers]
        fixed_states = backbone_states(self.model, self.fixed, BATCH)
        arms = {}
        for arm in ARMS:
            own = self._probe(arm, rows, states)
            fixed = reading(self._probe(arm, self.fixed, fixed_states))
            records = records_of(own, units, step)
            arms[arm] = {**lengths(own, len(rows)), "records": records.to_row(), "fixed": fixed.to_row()}
        look = {"step": step, "reward": float(np.mean([answer.reward for answer in answers])), "arms": arms}
        keep(self.place / "looks" / f"step-{step:04d}.json", look)
        if step == 1:
            self._sweep(fixed_states)

    def _sweep(self, states: Sequence[Tensor]) -> None:
        """Write overlap and entropy of each fixed context at other temperatures, under the first weights."""
        sweeps = {}
        for arm in FROZEN:
            probes = [self._probe(arm, self.fixed, states, temperature) for temperature in TEMPERATURES]
            sweeps[arm] = sweep_of(probes).to_row()
        keep(self.place / "sweep.json", sweeps)

    def _probe(self, arm: str, rows: Sequence[TokenRow], states: Sequence[Tensor], temperature: float = 1.0) -> Probe:
        sampling = Sampling(temperature=temperature)
        return probe(self.policies[arm], rows, self.plan.depth, sampling, BATCH, states=states, every=self.plan.every)


def with_head(model: Policy, origin: str, rows: Sequence[TokenRow]) -> Policy:
    """Return ``model`` with a head of its own.

    The head comes from a file, or from one of ``starts.STARTS``, which is computed on ``rows``.
    """
    policy = dataclasses.replace(model, mtp=MTPHead(model.backbone))
    if origin in STARTS:
        STARTS[origin](policy, rows)
    else:
        load_head(policy, Path(origin), Path(origin).parent.name)
    return policy


@torch.no_grad()
def put_weights(model: Policy, folder: Path) -> None:
    """Load the weights of another version into the backbone that all arms share."""
    dtype = "bfloat16" if model.backbone.dtype == torch.bfloat16 else "float32"
    fresh = load_backbone(ModelConfig(path=str(folder), device="cpu", dtype=dtype))
    for name, parameter in model.backbone.named_parameters():
        parameter.copy_(fresh.get_parameter(name))


def answers_of(place: Path, step: int) -> list[StoredAnswer]:
    """Return the completions that a step trained on; steps count from 1."""
    with Trajectories(place / RUN / NAME) as stored:
        return stored.answers(range(step, step + 1))


def row_of(answer: StoredAnswer) -> TokenRow:
    """Return a stored completion as a training row."""
    return TokenRow(prompt=tuple(answer.prompt_ids.tolist()), answer=tuple(answer.ids.tolist()), task=answer.task)


@torch.no_grad()
def check(model: Policy, answer: StoredAnswer, hidden: Tensor, step: int, allowed: Tolerance) -> None:
    """Check that these weights wrote the completion: its log-probs match the engine's, and it has their version.

    Raises:
        UserError: They did not.
    """
    versions = {answer.version_first, answer.version_last}
    if versions != {step - 1}:
        raise UserError(f"step {step}: answer {answer.id} is of weights {sorted(versions)}, not of {step - 1}")
    first = len(answer.prompt_ids) - 1
    logp = model.logits(hidden[first : first + len(answer.ids)]).log_softmax(-1)
    own = logp.gather(1, torch.tensor(answer.ids.tolist())[:, None])[:, 0]
    off = (own - torch.tensor(answer.logprobs.tolist())).abs()
    if not allowed.met(off):
        raise UserError(
            f"step {step}: log p of answer {answer.id} differs by {float(off.max()):.3f} nats from what the engine "
            "gave: the weights are not those that wrote it; remove this run and make it again"
        )


def lengths(found: Probe, count: int) -> dict[str, list[float]]:
    """Return totals and counts per completion [count] of the accept length of K drafts, sampled and greedy."""
    named = {"accept": found.accept, "greedy": found.accept_greedy, "anchors": np.ones(len(found.row))}
    return {name: np.bincount(found.row, values, count).round(5).tolist() for name, values in named.items()}


def keep(path: Path, content: object) -> None:
    """Write JSON, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(content) + "\n")
    scratch.replace(path)

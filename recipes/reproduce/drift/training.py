"""One GRPO run with many heads beside it: the policy does not depend on them, so all of them see the same run.

Decoding is exact, so the drafting head does not change the completions. One run serves every arm, and the arms are
compared on the same tokens. The run is synchronous and in one process: engine and trainer share the backbone.
"""

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.corpus import backbone_states, sampling_params, token_rows
from bebop.adaptation.probe import Probe, probe
from bebop.config.compose import job_config
from bebop.config.job import DecodingConfig, HeadConfig, JobConfig
from bebop.metrics.metrics import values
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer.chains import TokenRow
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Prompt, Trajectory
from recipes.reproduce.study import QUICK, Arm, head, policy, text

Array = NDArray[np.float64]
STEPS = 4 if QUICK else 36
GROUPS, ANSWERS = (2, 4) if QUICK else (6, 8)
LEARNING_RATE = 1.5e-4
EVERY = 2 if QUICK else 3  # steps between two evaluations of the heads
EVALUATED = 4 if QUICK else 24  # completions that heads are evaluated on
PROBE_ANSWERS = 4 if QUICK else 48  # held-out completions of the first policy: the fixed contexts
PROBE_TEMPERATURES = (0.3, 0.5, 0.75, 1.4, 2.0, 3.0)  # temperatures of the first policy's distributions, besides 1
# arm -> objective before RL, and the one it is updated with during RL (None: frozen)
ARMS: dict[str, tuple[str, str | None]] = {
    "hard_ce": ("hard_ce", None),
    "ce": ("ce", None),
    "tv": ("tv", None),
    "e2e_tv": ("e2e_tv", None),
    "tv, tv updates": ("tv", "tv"),
    "tv, ce updates": ("tv", "ce"),
    "hard_ce, ce updates": ("hard_ce", "ce"),
}
# direction -> overrides; an entropy bonus makes the policy more random while it learns
DIRECTIONS: dict[str, tuple[str, ...]] = {"falling": (), "rising": ("algorithm.entropy_coefficient=0.02",)}
PROBED_ARMS = ("hard_ce", "ce", "e2e_tv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Evaluation of all heads at one step: per arm, totals and counts per completion, and the mean overlaps."""

    step: int
    reward: float
    entropy: float  # of the policy, nats, mean over tokens
    accept: dict[str, tuple[Array, Array]]  # arm -> totals and counts of accept length per completion (sampled drafts)
    greedy: dict[str, tuple[Array, Array]]  # the same for greedy drafts
    overlap: dict[str, list[float]]  # arm -> mean overlap at each position


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A whole run: evaluations in order, and probes of the fixed contexts before and after."""

    seed: int
    direction: str
    evaluations: list[Evaluation]
    first: dict[str, Probe]  # arm -> probe of the fixed contexts at step 0
    tempered: dict[str, list[Probe]]  # arm -> the same at other temperatures
    last: dict[str, Probe]  # arm -> probe of them at the end


def configuration(seed: int, direction: str) -> JobConfig:
    """Return the configuration of GRPO with few completions per step."""
    sizes = (f"trainer.groups_per_step={GROUPS}", f"trainer.group_size={ANSWERS}", f"trainer.steps={STEPS}")
    data = ("task=chain_sum", f"task.seed={500 + seed}", "rollout.staleness=0", f"runtime.seed={seed}")
    return job_config([*sizes, *data, f"trainer.lr={LEARNING_RATE}", "model.device=cpu", *DIRECTIONS[direction]])


def train(job: tuple[int, str]) -> Run:
    """Run GRPO for one seed and direction."""
    seed, direction = job
    config, model = configuration(seed, direction), policy()
    heads = {name: with_head(model, before, seed) for name, (before, _) in ARMS.items()}
    online = {name: online_trainer(heads[name], during) for name, (_, during) in ARMS.items() if during}
    probe_set = text(seed, PROBE_ANSWERS)
    first = {arm: probe(heads[arm], probe_set, 3, Sampling()) for arm in PROBED_ARMS}
    tempered = {
        arm: [probe(heads[arm], probe_set, 3, Sampling(temperature=t)) for t in PROBE_TEMPERATURES]
        for arm in PROBED_ARMS
    }
    trainer = PolicyTrainer(model, config)  # after the heads' trainers: those freeze the backbone
    engine = TorchEngine(heads["e2e_tv"], DecodingConfig(), slots=GROUPS * ANSWERS)
    source = PromptSource(config.task, chat_encoder(model.tokenizer), 352)
    reward = make_reward(config.task)
    evaluations = []
    for step in range(STEPS + 1):
        asked = [source.prompt(step * GROUPS + i) for i in range(GROUPS)]
        answers = rollouts(engine, asked, config, step)
        groups = grouped(asked, answers, reward)
        rows = token_rows([p for p in asked for _ in range(ANSWERS)], answers)
        states = backbone_states(model, rows)  # the same for every head
        if step % EVERY == 0:
            evaluations.append(evaluate(step, groups, heads, rows, states, seed))
        if step == STEPS:
            break
        for name, head_trainer in online.items():
            head_trainer.update(rows, ARMS[name][1], states)
        values(trainer.update(Batch(groups=groups)))
        engine.version = trainer.version
    last = {arm: probe(heads[arm], probe_set, 3, Sampling()) for arm in PROBED_ARMS}
    return Run(seed=seed, direction=direction, evaluations=evaluations, first=first, tempered=tempered, last=last)


def with_head(model: Policy, objective: str, seed: int) -> Policy:
    """Return ``model`` with a trained head of its own; all share one backbone object."""
    return dataclasses.replace(model, mtp=copy.deepcopy(head(Arm(objective=objective, seed=seed)).mtp))


def online_trainer(model: Policy, objective: str) -> HeadTrainer:
    """Return a trainer that updates a head during RL, with an optimizer of its own."""
    config = HeadConfig(objective=objective, depth=3, lr=5e-4, lr_warmup_steps=3, max_tokens=2048)
    return HeadTrainer(FSDPBackend(model, Sampling()), config)


def rollouts(engine: TorchEngine, asked: Sequence[Prompt], config: JobConfig, step: int) -> list[Completion]:
    """Sample ``ANSWERS`` completions of each prompt under the current weights."""
    requests = []
    for i, prompt in enumerate(asked):
        for g in range(ANSWERS):
            number = (config.runtime.seed << 40) + (step * GROUPS + i) * ANSWERS + g
            sampling = sampling_params(engine.policy, config.rollout.sampling, number)
            requests.append(Request(id=0, token_ids=prompt.token_ids, params=sampling))
    return generate(engine, requests)


def grouped(asked: Sequence[Prompt], answers: Sequence[Completion], reward: Any) -> tuple[Group, ...]:
    """Return the completions with their rewards, grouped by prompt."""
    return tuple(
        Group(
            prompt=prompt,
            trajectories=tuple(
                Trajectory.single(completion=answer, reward=checked(reward, answer.text, prompt))
                for answer in answers[i * ANSWERS : (i + 1) * ANSWERS]
            ),
        )
        for i, prompt in enumerate(asked)
    )


@torch.no_grad()
def evaluate(
    step: int,
    groups: Sequence[Group],
    heads: dict[str, Policy],
    rows: Sequence[TokenRow],
    states: Sequence[Tensor],
    seed: int,
) -> Evaluation:
    """Probe every head on some of the step's completions: text of the current policy, so estimates are unbiased."""
    chosen = np.random.default_rng([seed, step]).choice(len(rows), EVALUATED, replace=False)
    some, known = [rows[i] for i in chosen], [states[i] for i in chosen]
    probes = {name: probe(model, some, 3, Sampling(), states=known) for name, model in heads.items()}
    first = next(iter(probes.values()))
    return Evaluation(
        step=step,
        reward=float(np.mean([t.reward for group in groups for t in group.trajectories])),
        entropy=float(np.nanmean(first.numbers["target_entropy"][:, 0])),
        accept={name: sums(p, p.accept) for name, p in probes.items()},
        greedy={name: sums(p, p.accept_greedy) for name, p in probes.items()},
        overlap={name: np.nanmean(p.numbers["overlap"], 0).tolist() for name, p in probes.items()},
    )


def sums(probed: Probe, numbers: Array) -> tuple[Array, Array]:
    """Return totals and counts per completion of a number that each anchor has."""
    count = int(probed.row.max()) + 1
    return np.bincount(probed.row, numbers, count), np.bincount(probed.row, minlength=count).astype(float)

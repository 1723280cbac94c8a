"""All arms on the same prompts, with the weights and the past completions that a job had when it reached them.

An arm's engine first receives the past completions; this counts in its time. Arms take turns; processor time counts,
the best of the rounds. Lookups are timed in a separate round, because reading the clock costs time, too.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from bebop.bench.history import looking_up
from bebop.bench.record import best_of
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.driver.past_completions import Completions, PastCompletions
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.systems.history.options import HistoryOptions
from bebop.trainer import checkpoint
from bebop.trajectory import SamplingParams
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from recipes.history.jobs import Plan

Tokens = tuple[int, ...]
Past = Mapping[Tokens, Completions]  # prompt -> earlier answers
# arm -> system, and its number of drafts: None is the default of the system
ARMS: dict[str, tuple[str, int | Literal["auto"] | None]] = {
    "plain": ("autoregressive", None),
    "bebop": ("bebop", None),
    "ngram": ("ngram", None),
    "history": ("history", None),
    "history, auto": ("history", "auto"),
    "bebop_history": ("bebop_history", None),
    "bebop_history, auto": ("bebop_history", "auto"),
}
# batch -> prompts of a point that are asked, the group of each; a group is decoded together as far as there is room
PROMPTS = {1: 1, 8: 3, 32: 8}
ROUNDS = 2
MAX_LENGTH = 512
BATCH_OF_AGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """State of a job after a step: the prompts that it asked next, its weights, and its past completions."""

    seed: int
    epoch: int
    step: int
    policy: Policy
    prompts: Sequence[Tokens]
    past: Past
    ages: Mapping[int, Past]  # epochs ago -> answers of that epoch alone


def point(plan: Plan, run: Path, seed: int, step: int) -> Point:
    """Read a point from a run folder; the batch after ``step`` has prompts of one epoch."""
    weights = checkpoint.store(run).path(step) / "policy"
    policy = load_policy(ModelConfig(path=str(weights), device="cpu", check=False), need_head=True)
    prompts, past, ages = known(plan, run / NAME, step)
    epoch = step // plan.epoch_steps
    return Point(seed=seed, epoch=epoch, step=step, policy=policy, prompts=prompts, past=past, ages=ages)


def known(plan: Plan, path: Path, step: int) -> tuple[list[Tokens], Past, dict[int, Past]]:
    """Return the prompts after ``step``, the completions remembered then, and those of each earlier epoch alone."""
    epoch = step // plan.epoch_steps
    with Trajectories(path) as stored:
        asked = _in_order(stored.answers(range(step + 1, step + 2)))
        ages = {ago: _past(stored.answers(_epoch(plan, epoch - ago)), asked, ago) for ago in range(1, epoch + 1)}
    options = HistoryOptions()
    kept = PastCompletions(options.past_tokens, options.completions)
    kept.recall(path, step)
    return asked, {ids: past for ids in asked if (past := kept.of(ids))}, ages


def _epoch(plan: Plan, epoch: int) -> range:
    """Return the steps of an epoch as they are stored, from 1."""
    return range(1 + epoch * plan.epoch_steps, 1 + (epoch + 1) * plan.epoch_steps)


def _in_order(answers: Sequence[StoredAnswer]) -> list[Tokens]:
    """Return the prompts of the completions, each once, by prompt number."""
    return list(dict.fromkeys(tuple(a.prompt_ids.tolist()) for a in sorted(answers, key=lambda a: a.prompt)))


def _past(answers: Sequence[StoredAnswer], asked: Sequence[Tokens], ago: int) -> Past:
    """Return the completions of each prompt in ``asked``."""
    found: dict[Tokens, Completions] = dict.fromkeys(asked, ())
    for answer in answers:
        ids = tuple(answer.prompt_ids.tolist())
        if ids in found:
            found[ids] += (answer.ids,)
    assert all(found.values()), f"an epoch asks every question once: {ago} epochs ago not all of {len(asked)}"
    return found


def requests(at: Point, prompts: int, group: int) -> list[Request]:
    """Return one group of requests for each of the first prompts, with random draws that the job did not use."""
    sampling = SamplingParams(max_new_tokens=160, stop_token_ids=at.policy.eos_token_ids)
    first = (1 << 52) + ((at.seed << 20) + at.step) * (1 << 16)  # no answer of the job has these
    ids = [ids for ids in at.prompts[:prompts] for _ in range(group)]
    return [
        Request(id=i, token_ids=one, params=dataclasses.replace(sampling, seed=first + i)) for i, one in enumerate(ids)
    ]


def decoded(at: Point, batch: int, group: int, past: Past, arm: str, *, looked: bool = False) -> dict[str, Any]:
    """Time one turn of an arm; return processor seconds, and tokens and cycles of each completion."""
    name, drafts = ARMS[arm]
    system = SYSTEMS[name]
    asked = requests(at, PROMPTS[batch], group)
    config = DecodingConfig(system=name, draft_tokens=system.draft_tokens if drafts is None else drafts)
    engine = TorchEngine(at.policy, config, slots=batch, max_length=MAX_LENGTH)
    with looking_up(system.history and looked) as spent:
        began = time.process_time()
        if system.history:
            for ids in {request.token_ids: None for request in asked}:
                engine.remember(ids, [answer.tolist() for answer in past.get(ids, ())])
        answers = generate(engine, asked)
        seconds = time.process_time() - began
    tokens, cycles = [a.stats.tokens for a in answers], [a.stats.cycles for a in answers]
    row = {"seconds": seconds, "speed": sum(tokens) / seconds, "tokens": tokens, "cycles": cycles}
    if looked:
        row["lookup"] = spent["lookup"] / seconds
    return row


def by_arm(at: Point, plan: Plan, batch: int, progress: "tqdm[Any]") -> list[dict[str, Any]]:
    """Time all arms at one point and batch size."""
    measure = partial(decoded, at, batch, plan.group_size, at.past)
    found = best_of(ROUNDS, ARMS, measure, "speed", progress)
    for arm in ARMS:
        if SYSTEMS[ARMS[arm][0]].history and ARMS[arm][1] is None:
            found[arm]["lookup"] = measure(arm, looked=True)["lookup"]
    own = {"seed": at.seed, "epoch": at.epoch, "step": at.step, "batch": batch}
    return [{**own, "arm": arm, **row} for arm, row in found.items()]


def by_age(at: Point, plan: Plan) -> list[dict[str, Any]]:
    """Decode with ``bebop_history`` and only the completions of one earlier epoch: the effect of a stale history."""
    own = {"seed": at.seed, "epoch": at.epoch, "step": at.step, "arm": "bebop_history"}
    kept = ("tokens", "cycles")
    rows = []
    for ago, past in at.ages.items():
        row = decoded(at, BATCH_OF_AGES, plan.group_size, past, "bebop_history")
        rows.append({**own, "epochs ago": ago, **{name: row[name] for name in kept}})
    return rows


def measured(plan: Plan, run: Path, seed: int, looks: int | None = None) -> dict[str, list[dict[str, Any]]]:
    """Measure one job: rows by arm, and by age of the history.

    ``looks`` is the number of points per epoch; None takes all points of the plan.
    """
    apart = plan.points // (looks or plan.points)
    steps = [(epoch, step) for epoch in range(plan.epochs) for step in plan.steps(epoch)[::apart]]
    progress = tqdm(total=len(steps) * len(PROMPTS) * ROUNDS * len(ARMS), desc=f"seed {seed}", unit="turn")
    arms, ages = [], []
    for _, step in steps:
        at = point(plan, run, seed, step)
        for batch in PROMPTS:
            arms += by_arm(at, plan, batch, progress)
        ages += by_age(at, plan)
    progress.close()
    return {"arms": arms, "ages": ages, "rewards": _rewards(plan, run)}


def _rewards(plan: Plan, run: Path) -> list[dict[str, Any]]:
    """Return the mean reward of the job's own completions by epoch."""
    with Trajectories(run / NAME) as stored:
        return [
            {"epoch": epoch, "reward": float(np.mean([a.reward for a in stored.answers(_epoch(plan, epoch))]))}
            for epoch in range(plan.epochs)
        ]

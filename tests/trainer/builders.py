"""Batches, configurations and plain forward passes for the trainer's tests."""

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from bebop.config.fields import from_dict
from bebop.config.job import AlgorithmConfig, JobConfig
from bebop.metrics.metrics import Metrics
from bebop.model.backbone import Policy
from bebop.trainer.losses import policy_loss
from bebop.trajectory import Batch, Completion, Group, Prompt, Trajectory
from tests.builders import bare_policy, letters
from tests.stored_answers import trace

VOCAB = 64
TEMPERATURE = 0.8


def job(path: str = "tiny", **settings: dict[str, Any]) -> JobConfig:
    """A configuration for the tiny test policy; sections given as keyword arguments override these values."""
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": path, "device": "cpu"},
        "rollout": {"sampling": {"temperature": TEMPERATURE, "max_new_tokens": 20}},
        "trainer": {"lr": 1e-2, "lr_warmup_steps": 2, "max_tokens": 64, "groups_per_step": 4, "group_size": 3},
        "algorithm": {},
    }
    for name, values in settings.items():
        sections[name] = {**sections.get(name, {}), **values}
    return from_dict(JobConfig, sections)


def policy(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> Policy:
    """Two layers, d=32, 64 tokens, of which the tokenizer knows some."""
    made = bare_policy(VOCAB, dtype=dtype, sharp=6.0)
    made.tokenizer = letters(VOCAB // 2)
    if tied:
        made.backbone.config.tie_word_embeddings = True
        made.backbone.tie_weights()
    return made


def completion(tokens: Sequence[int], logprobs: Sequence[float] | None = None, version: int = 0) -> Completion:
    """An answer; its log-probs are 0 unless given."""
    return Completion(
        token_ids=np.array(tokens, dtype=np.int64),
        logprobs=np.array([0.0] * len(tokens) if logprobs is None else logprobs, dtype=np.float32),
        versions=np.full(len(tokens), version, dtype=np.int64),
    )


def plain(source: Policy) -> PreTrainedModel:
    """The same backbone as transformers has it, with its own attention (not eager, whose softmax is fp32)."""
    model = AutoModelForCausalLM.from_config(source.backbone.config, attn_implementation="sdpa")
    model.load_state_dict(source.backbone.state_dict())
    return model.to(source.backbone.dtype).eval()


def plain_logprobs(model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Log-probs [T] of an answer, one row by itself, full logits."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]


def batch(source: Policy | None = None, *, seed: int = 0, groups: int = 4, size: int = 3, version: int = 0) -> Batch:
    """Random prompts, answers of 1 to 14 tokens and rewards; the log-probs are those of ``source``.

    Without ``source`` they are those of ``policy()``, and each batch is computed once: none of it can be changed.
    """
    if source is None:
        return _first_batch(seed, groups, size, version)
    return _batch(source, seed, groups, size, version)


@cache
def _first_batch(seed: int, groups: int, size: int, version: int) -> Batch:
    with torch.random.fork_rng(devices=[]):  # whoever asks first must not find another state of it than the others
        made = _batch(policy(), seed, groups, size, version)
    for trajectory in made.trajectories:
        own = trajectory.completion
        for array in (own.token_ids, own.logprobs, own.versions):
            array.flags.writeable = False
    return made


@torch.no_grad()
def _batch(source: Policy, seed: int, groups: int, size: int, version: int) -> Batch:
    rng, model = np.random.default_rng(seed), plain(source)
    made = []
    for index in range(groups):
        prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 6)).tolist())
        trajectories = []
        for _ in range(size):
            answer = rng.integers(0, VOCAB, rng.integers(1, 15)).tolist()
            logprobs = plain_logprobs(model, prompt, answer).tolist()
            trajectories.append(
                Trajectory.single(completion=completion(answer, logprobs, version), reward=float(rng.random() < 0.5))
            )
        asked = Prompt(index=index, task="test", text="", token_ids=prompt, item={})
        made.append(Group(prompt=asked, trajectories=tuple(trajectories)))
    return Batch(groups=tuple(made))


def raw_loss(config: AlgorithmConfig, logp: Tensor, proximal: Tensor, **given: Tensor) -> tuple[Tensor, Metrics]:
    """The loss; unless given, tokens are of one answer, of entropy 0 and weight 1, and the rollout is the proximal."""
    fields = dict(entropy=torch.zeros_like(proximal), rollout_logprobs=proximal, weights=torch.ones_like(proximal))
    fields |= dict(answers=torch.tensor([len(proximal)]), proximal=proximal) | given
    return policy_loss(config, logp=logp, **fields)  # type: ignore[arg-type]


def traced(made: Batch, every: int = 2) -> Batch:
    """The batch, with a trace of every so many-th answer."""

    def one(place: int, t: Trajectory) -> Trajectory:
        kept = trace(len(t.completion.token_ids)) if place % every == 0 else None
        return Trajectory.single(dataclasses.replace(t.completion, trace=kept), t.reward, t.timed_out)

    places, groups = iter(range(len(made.trajectories))), []
    for group in made.groups:
        trajectories = tuple(one(next(places), t) for t in group.trajectories)
        groups.append(dataclasses.replace(group, trajectories=trajectories))
    return Batch(groups=tuple(groups))


def weights_of(source: Policy) -> dict[str, Tensor]:
    """A copy of the weights."""
    return {name: tensor.detach().clone() for name, tensor in source.weights(mtp=True).items()}

"""Completions of one policy to held-out questions, by plain decoding and by PAD with its importance weights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from bebop.adaptation.corpus import sampling_params
from bebop.config.job import JobConfig, ModelConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import DecodeStats
from recipes.reproduce.study import QUICK

Array = NDArray[np.float64]
HELD_OUT = 8 if QUICK else 512  # answers that a policy is judged on, one a question
COMPARED = 8 if QUICK else 256  # answers that ways of decoding are compared on
SEARCHED = 8 if QUICK else 48  # answers that tau is looked for on
SLOTS = 128
TAUS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """One completion per question for a fixed list of questions, with the cost of decoding them."""

    reward: Array  # [questions]
    log_weight: Array  # [questions] log p / P of the whole answer; 0 under an exact system
    tokens: int
    truncated: float  # share of the answers
    seconds: float  # of the processor
    stats: DecodeStats
    unweighable: int  # tokens whose log P is not finite

    def per_draft(self, name: str) -> float:
        """Return the total of one of the rule's counts per verified draft; 0 if the rule has no such count."""
        counts = self.stats.counts.get(name)
        return 0.0 if counts is None else float(counts.sum() / self.stats.reached.sum())


def built_in() -> Policy:
    """Load the built-in model with its pivot classifier."""
    torch.set_num_threads(1)
    return load_policy(ModelConfig(path="tiny", device="cpu", check=False), needs=("pivot",))


def trained(folder: Path) -> Policy:
    """Load the policy that a job saved."""
    return load_policy(ModelConfig(path=str(folder), device="cpu", check=False))


def answers(policy: Policy, config: JobConfig, count: int, seed: int) -> Answers:
    """Decode ``count`` held-out questions of a seed, with the decoding and sampling of ``config``."""
    source = PromptSource(replace(config.task, seed=9700 + seed), chat_encoder(policy.tokenizer), 352)
    asked = [source.prompt(i) for i in range(count)]
    engine = TorchEngine(policy, config.decoding, slots=SLOTS, measure=False)
    requests = [
        Request(id=i, token_ids=p.token_ids, params=sampling_params(policy, config.rollout.sampling, (seed << 40) + i))
        for i, p in enumerate(asked)
    ]
    before = time.process_time()
    made = generate(engine, requests)
    seconds = time.process_time() - before
    reward = make_reward(config.task)
    ratios = [c.logprobs.astype(np.float64) - c.drawn_logprobs for c in made]
    return Answers(
        reward=np.array([checked(reward, c.text, p) for c, p in zip(made, asked, strict=True)]),
        log_weight=np.array([float(ratio.sum()) for ratio in ratios]),
        tokens=sum(len(c.token_ids) for c in made),
        truncated=float(np.mean([c.finish_reason == "length" for c in made])),
        seconds=seconds,
        stats=DecodeStats.total(c.stats for c in made),
        unweighable=int(sum((~np.isfinite(ratio)).sum() for ratio in ratios)),
    )


def chosen(policy: Policy, config: Callable[[float], JobConfig], wanted: Sequence[float]) -> list[float]:
    """Return, for each R_N in ``wanted`` (ascending), the smallest tau whose verified drafts reach it on average.

    If no tau reaches it, return the largest. ``config`` makes the job of a tau.
    """
    found: list[float] = []
    for tau in TAUS:
        bias = answers(policy, config(tau), SEARCHED, seed=99).per_draft("bias")
        while len(found) < len(wanted) and bias >= wanted[len(found)]:
            found.append(tau)
        if len(found) == len(wanted):
            break
    return found + [TAUS[-1]] * (len(wanted) - len(found))

"""Answers that are drawn in pairs of tokens, with all second tokens that were drafted: to learn from, and to judge."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bebop.adaptation.corpus import run_engine
from bebop.config import DecodingConfig
from bebop.config_adapt import AdaptConfig
from bebop.intervals import ratio
from bebop.model.backbone import Policy
from bebop.model.pipo import as_pairs
from bebop.rollout.decoding.pipo import answer_pairs
from bebop.tasks.rewards import checked, make_reward
from bebop.trainer.pipo_rows import PairRow
from bebop.trajectory import Completion, Prompt

HALVINGS = 7  # of the range in which a threshold is looked for
CALIBRATION = 64  # questions for each


def pair_answers(
    config: AdaptConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    options: dict[str, Any],
    seed: int,
    label: str | None = None,
) -> list[Completion]:
    """Answers by the policy's network of pairs, each with what the decoder kept of its drafts.

    ``options``: of the decoding system, as {"tau": 0.5}.
    """
    decoding = DecodingConfig(system="pipo", draft_tokens=1, options=options)
    return run_engine(policy, prompts, config.data, decoding, seed, label, keep_state=True)


def pair_rows(prompts: Sequence[Prompt], answers: Sequence[Completion], pad: int) -> list[PairRow]:
    """Texts in the pairs that they were drawn in, with the drafts: kept or not."""
    rows = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = answer.token_ids.tolist()
        kept, drafts = (answer.state[f"pipo/{name}"][: len(tokens)].tolist() for name in ("kept", "draft"))
        pairs = answer_pairs(tokens, kept, pad)
        places = np.cumsum([0, *(1 + (second != pad) for _, second in pairs)])[:-1].tolist()
        asked = as_pairs(prompt.token_ids, pad)
        drawn = tuple(pad if drafts[place] < 0 else int(drafts[place]) for place in places)
        rows.append(PairRow(pairs=(*asked, *pairs), prompt=len(asked), drafts=drawn))
    return rows


def pad_ratio(answers: Sequence[Completion]) -> float:
    """The share of pairs that hold one token."""
    return 2 - sum(a.stats.emitted for a in answers) / sum(a.stats.cycles for a in answers)


def tau_for(
    config: AdaptConfig, policy: Policy, prompts: Sequence[Prompt], wanted: float, label: str | None = None
) -> float:
    """The threshold at which the pad ratio on some prompts comes nearest to ``wanted``, by halving (0, 1).

    It rises with the threshold: what is dropped leaves more steps to go.
    """
    low, high = 0.0, 1.0
    found: list[tuple[float, float]] = []
    for _ in range(HALVINGS):
        tau = (low + high) / 2
        answers = pair_answers(config, policy, prompts[:CALIBRATION], {"tau": tau}, config.seed + 2, label)
        share = pad_ratio(answers)
        found.append((abs(share - wanted), tau))
        low, high = (tau, high) if share < wanted else (low, tau)
    return min(found)[1]


def trial(
    config: AdaptConfig, policy: Policy, prompts: Sequence[Prompt], options: dict[str, Any], label: str | None = None
) -> dict[str, Any]:
    """Reward, tokens a pair and pairs an answer on prompts: intervals over them."""
    answers = pair_answers(config, policy, prompts, options, config.seed + 3, label)
    reward = make_reward(config.task)
    rewards = np.array([checked(reward, a.text, p) for p, a in zip(prompts, answers, strict=True)])
    tokens, pairs = (np.array([getattr(a.stats, name) for a in answers], float) for name in ("emitted", "cycles"))
    one = np.ones(len(answers))
    found = {"reward": (rewards, one), "tokens_per_pair": (tokens, pairs), "pairs": (pairs, one)}
    return {name: dataclasses.asdict(ratio(*sums)) for name, sums in found.items()}

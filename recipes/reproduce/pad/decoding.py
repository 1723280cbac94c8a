"""Decoding of prompts with every arm, and the choice of tau and of the controls' thresholds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from bebop.adaptation.corpus import sampling_params
from bebop.config.job import DecodingConfig
from bebop.metrics.intervals import Array
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pad.network import PivotNetwork
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Completion, Prompt
from recipes.reproduce.pad.classifiers import Kind, fit
from recipes.reproduce.pad.controls import CONTROLS, Recorded, control
from recipes.reproduce.study import DEPTH, FOLDER, QUICK, policy, prompts, settings

TAUS = (0.1, 0.2, 0.3, 0.5, 0.7)
P_MIN = 1e-3
DRAFTERS = {"head": None, "skewed": 0.5}  # temperature of the drafts; None: the target's, 1
VALIDATION, TEST = (6, 8) if QUICK else (96, 192)  # prompts a seed
ALLOWED = 0.025  # utility that tau may cost on validation prompts: half of what the rule allows on test prompts
GAIN = 0.25  # accept length that makes arms worth comparing: the bar of the rule
SLOTS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """Results of n completions of one arm, with the counts of its acceptance rule."""

    success: Array  # [n] 1 or 0
    tokens: Array  # [n] of the answer
    cycles: Array  # [n]
    truncated: Array  # [n] 1 or 0
    reached: Array  # [n, K] drafts tested
    accepted: Array  # [n, K]
    bias: Array  # [n, K] sum of R_N
    offered: int  # drafts that fail the test with p >= p_min
    overridden: int
    next_tested: int  # drafts right after an override
    next_accepted: int

    @property
    def rate(self) -> float:
        """Return the share of the drafts offered that were overridden."""
        return self.overridden / max(1, self.offered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All arms of one drafter and one seed on its test prompts, with the settings chosen on validation prompts."""

    tau: float  # chosen on validation prompts
    compared: float  # that at which the controls are held against the classifier
    validation: Mapping[float, tuple[float, float]]  # tau -> change in utility, change in accept length
    thresholds: Mapping[str, float]  # of the controls, at the classifier's rate
    arms: Mapping[str, Decoded]  # "plain", "tau 0.3" for each tau, and the controls


def run(key: tuple[str, int]) -> Run:
    """Choose the settings of a drafter and a seed on validation prompts, then decode test prompts with every arm."""
    path = FOLDER / "pad" / f"run-{key[0]}-{key[1]}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(_run(*key), path)
    found: Run = torch.load(path, weights_only=False)
    return found


def _run(drafter: str, seed: int) -> Run:
    model, network = policy(), fit(Kind(), seed)
    questions = prompts(seed, VALIDATION + TEST)
    chosen, test = questions[:VALIDATION], questions[VALIDATION:]

    def decoded(part: PivotNetwork, tau: float, on: Sequence[Prompt]) -> tuple[Decoded, Array]:
        return decode(model, part, network, on, seed, tau, DRAFTERS[drafter])

    plain, asked = decoded(network, 0.0, chosen)
    changes = {tau: change(decoded(network, tau, chosen)[0], plain) for tau in TAUS}
    tau = best_tau(changes)
    compared = compared_tau(changes, tau)
    bounds = thresholds(asked, compared)
    arms = {"plain": decoded(network, 0.0, test)[0]}
    arms |= {f"tau {t}": decoded(network, t, test)[0] for t in TAUS}
    arms |= {name: decoded(control(name, network, seed), bounds[name], test)[0] for name in CONTROLS}
    return Run(tau=tau, compared=compared, validation=changes, thresholds=bounds, arms=arms)


def change(one: Decoded, plain: Decoded) -> tuple[float, float]:
    """Return the differences in utility and accept length from plain rejection sampling."""
    lengths = [d.tokens.sum() / d.cycles.sum() for d in (one, plain)]
    return float((one.success - plain.success).mean()), float(lengths[0] - lengths[1])


def best_tau(changes: Mapping[float, tuple[float, float]]) -> float:
    """Return the tau with the longest accept length among those that cost at most ``ALLOWED`` on validation prompts.

    If all cost more, return the smallest tau.
    """
    cheap = [tau for tau, (utility, _) in changes.items() if utility >= -ALLOWED]
    return max(cheap, key=lambda tau: changes[tau][1]) if cheap else min(changes)


def compared_tau(changes: Mapping[float, tuple[float, float]], tau: float) -> float:
    """Return ``tau`` if it gains ``GAIN`` on validation prompts, else the smallest tau that does, or the largest."""
    return next((t for t in (tau, *sorted(changes)) if changes[t][1] >= GAIN), max(changes))


def thresholds(asked: Array, tau: float) -> dict[str, float]:
    """Return the threshold at which each control overrides the same share of the drafts as the classifier at ``tau``.

    ``asked`` [n, 3] holds score, p and H(p) of the drafts offered.
    """
    score, p, doubt = asked.T
    rate = float((score < tau).mean()) if len(score) else 0.0
    own = {"inverted": 1 - score, "probability": 1 - p, "entropy": np.exp(-doubt)}
    return {"random": rate, **{name: float(np.quantile(values, rate)) for name, values in own.items()}}


@torch.no_grad()
def decode(
    model: Policy,
    part: PivotNetwork,
    judge: PivotNetwork,
    questions: Sequence[Prompt],
    seed: int,
    tau: float,
    temperature: float | None,
) -> tuple[Decoded, Array]:
    """Decode one completion per prompt; every arm draws the same random numbers.

    Also return score, p and H(p) of every draft offered [n, 3].
    """
    config = DecodingConfig(
        system="pad", draft_tokens=DEPTH, draft_temperature=temperature, options={"tau": tau, "p_min": P_MIN}
    )
    own = settings(seed)
    model.parts["pivot"] = part
    engine = TorchEngine(model, config, slots=SLOTS, max_length=own.data.max_length, measure=False)
    assert isinstance(engine.decoder, DraftVerify)
    rule = Recorded(model, engine.slots, config, judge)
    engine.decoder.rule = rule
    asked = [
        Request(id=i, token_ids=q.token_ids, params=sampling_params(model, own.data.sampling, (seed << 40) + i))
        for i, q in enumerate(questions)
    ]
    answers = generate(engine, asked)
    reward = make_reward(own.task)
    success = [checked(reward, a.text, q) >= 1.0 for a, q in zip(answers, questions, strict=True)]
    return collected(answers, success, rule), np.concatenate([a.double().numpy() for a in rule.asked])


def collected(answers: Sequence[Completion], success: Sequence[bool], rule: Recorded) -> Decoded:
    """Gather the statistics of the completions and of the rule."""
    stats = [a.stats for a in answers]
    return Decoded(
        success=np.array(success, dtype=float),
        tokens=np.array([s.tokens for s in stats], dtype=float),
        cycles=np.array([s.cycles for s in stats], dtype=float),
        truncated=np.array([a.finish_reason == "length" for a in answers], dtype=float),
        reached=np.array([s.reached for s in stats]),
        accepted=np.array([s.accepted for s in stats]),
        bias=np.array([s.counts["bias"] for s in stats]),
        **rule.totals,
    )

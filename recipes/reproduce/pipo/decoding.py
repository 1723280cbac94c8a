"""Completions decoded in pairs with chosen gates: reward, tokens and pairs, and distance from the teacher."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bebop.adaptation.corpus import drafting_config, run_engine
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.systems.pipo.losses import PairRow, acceptance, batch_rows, teacher_logprobs
from bebop.systems.pipo.network import PairModel
from bebop.systems.pipo.training import pair_answers, pair_rows
from bebop.tasks.rewards import make_reward
from bebop.trajectory import Completion, Prompt
from recipes.reproduce.pipo.arms import config
from recipes.reproduce.study import QUICK, policy

Array = NDArray[np.float64]
JUDGED = 4 if QUICK else 64  # answers of each way that are held against the teacher
CALIBRATION = 2 if QUICK else 48  # questions of the training set on which thresholds are chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Results of N completions of one network with one gate."""

    reward: Array  # [N]
    tokens: Array  # [N]
    pairs: Array  # [N] passes of the backbone
    pads: int  # PADs among all tokens
    drafts: int  # second tokens that were drafted, kept or not
    tau: float
    confidence: Array  # [D] of the drafts of the judged answers
    accepted: Array  # [D] min(1, p_T(y) / p_S(y)) of the draft
    overlap: Array  # [D] 1 - TV of the distributions at its place
    variation: float  # mean TV to the teacher of the distributions that the judged answers' tokens were drawn from
    divergence: float  # mean KL(student || teacher) at these places
    entropies: tuple[float, float]  # of both heads, nats

    @property
    def tokens_per_pair(self) -> float:
        """Return the tokens per pair: 2 minus the pad ratio."""
        return float(self.tokens.sum() / self.pairs.sum())

    @property
    def pad_ratio(self) -> float:
        """Return the share of pairs with only one token."""
        return 2 - self.tokens_per_pair

    @property
    def kept(self) -> float:
        """Return the share of drafts that were kept."""
        return float((self.tokens - self.pairs).sum() / self.drafts)

    def within(self, budget: float, of: str) -> float:
        """Return the mean reward of completions within a budget of ``tokens`` or ``pairs``; longer ones count as 0."""
        return float((self.reward * (getattr(self, of) <= budget)).mean())


def loaded(path: Path | None) -> Policy:
    """Load the built-in model with a pair network; None loads the shipped one."""
    model = dataclasses.replace(config(0).model, parts={"pipo": None if path is None else str(path)})
    torch.set_num_threads(1)
    return load_policy(model, needs=("pipo",))


def thresholds(model: Policy, prompts: Sequence[Prompt], shares: Sequence[float], seed: int) -> dict[float, float]:
    """Return the threshold that each share of drafts falls below, on training questions; share 0 keeps all, 1 none.

    The gate changes which drafts are made, so there are two rounds: keep all drafts, then drop the middle share.
    """
    tau, confidences = -1.0, np.zeros(1)
    for _ in range(2):
        answers = pair_answers(config(seed), model, prompts[:CALIBRATION], {"tau": tau}, 900 + seed)
        drafted = [answer.state["pipo/draft"][: len(answer.token_ids)] >= 0 for answer in answers]
        said = [a.state["pipo/confidence"][: len(a.token_ids)][d] for a, d in zip(answers, drafted, strict=True)]
        confidences = np.concatenate(said)
        tau = float(np.quantile(confidences, sorted(shares)[len(shares) // 2]))
    inner = {share: float(np.quantile(confidences, share)) for share in shares if 0 < share < 1}
    return {0.0: -1.0, 1.0: 1.0} | inner


def measure(model: Policy, prompts: Sequence[Prompt], options: dict[str, Any], seed: int) -> Answers:
    """Decode the prompts with a gate, and compare the first completions with the teacher."""
    asked = config(seed)
    answers = pair_answers(asked, model, prompts, options, 500 + seed)
    network = model.parts["pipo"]
    assert isinstance(network, PairModel)
    reward = make_reward(asked.task)
    judged = held_against(network, model, pair_rows(prompts[:JUDGED], answers[:JUDGED], network.pad))
    return Answers(
        reward=np.array([reward(a.text, p) for p, a in zip(prompts, answers, strict=True)]),
        **counts(answers),
        pads=sum(int((a.token_ids == network.pad).sum()) for a in answers),
        drafts=int(sum(a.stats.reached.sum() for a in answers)),
        tau=float(options.get("tau") or 0.0),
        **judged,
    )


def counts(answers: Sequence[Completion]) -> dict[str, Array]:
    """Return the tokens and backbone passes of each completion."""
    return {
        "tokens": np.array([len(a.token_ids) for a in answers], float),
        "pairs": np.array([a.stats.cycles for a in answers], float),
    }


def short(model: Policy, prompts: Sequence[Prompt], seed: int) -> tuple[int, int]:
    """Count PADs in completions of at most 16 tokens, the shortest that could hold one; return PADs and completions."""
    asked = config(seed, "data.sampling.max_new_tokens=16")
    answers = pair_answers(asked, model, prompts, {}, 300 + seed)
    network = model.parts["pipo"]
    assert isinstance(network, PairModel)
    return sum(int((a.token_ids == network.pad).sum()) for a in answers), len(answers)


def plain(prompts: Sequence[Prompt], seed: int) -> tuple[Array, Array]:
    """Return reward and tokens of the built-in model's own completions."""
    asked, model = config(seed), policy()
    answers = run_engine(model, prompts, asked.data, drafting_config(model), 700 + seed)
    reward = make_reward(asked.task)
    return np.array([reward(a.text, p) for p, a in zip(prompts, answers, strict=True)]), counts(answers)["tokens"]


@torch.no_grad()
def held_against(network: PairModel, model: Policy, rows: Sequence[PairRow]) -> dict[str, Any]:
    """Compare rows with the teacher: the quality of their drafts, and the distance of the sampling distributions."""
    batch = batch_rows(rows, network.pad)
    h, u = network.read(model, batch.pairs)
    teacher = teacher_logprobs(model, network, batch)
    drafted, firsts = batch.drafted, batch.firsts
    drafts = batch.drafts[:, 1:][drafted]
    student = [network.logits(model, states).log_softmax(-1) for states in (h[firsts], u[drafted])]
    wanted = [teacher[0][firsts], teacher[1][drafted]]
    overlap = [torch.minimum(a.exp(), b.exp()).sum(-1) for a, b in zip(student, wanted, strict=True)]
    gap = [(a.exp() * (a - b).masked_fill(torch.isneginf(a), 0)).sum(-1) for a, b in zip(student, wanted, strict=True)]
    entropies = [float(-(a.exp() * a.masked_fill(torch.isneginf(a), 0)).sum(-1).mean()) for a in student]
    confidence = network.confidence(h[drafted], u[drafted])
    kept = (batch.pairs[:, 1:, 1] != network.pad)[drafted]
    emitted = torch.cat([overlap[0], overlap[1][kept]])
    return {
        "confidence": confidence.double().numpy(),
        "accepted": acceptance(student[1], wanted[1], drafts).double().numpy(),
        "overlap": overlap[1].double().numpy(),
        "variation": float(1 - emitted.mean()),
        "divergence": float(torch.cat([gap[0], gap[1][kept]]).mean()),
        "entropies": (entropies[0], entropies[1]),
    }

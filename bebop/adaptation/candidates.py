"""Drafts that rejection sampling would reject, found in the policy's own answers: what a pivot classifier judges.

Every position of an answer counts as if a draft of each depth had reached it: the answers come from the target, the
draft from the head's distribution at that depth. SPEC 4.3 walks along one answer of speculative decoding instead; here
all positions of many answers are looked at in one pass, and where a block began is not a matter of chance.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.config import SamplingConfig
from bebop.kernels.pivot import residual
from bebop.kernels.uniforms import uniforms
from bebop.kernels.verify import sample
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.mtp import chain
from bebop.rollout.decoding.sampling import BatchSampling, entropy
from bebop.trainer.chains import TokenRow, chain_rows

ROWS = 16  # answers looked at side by side


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A rejected draft: row=3, place=12, token=9, p=0.04, q=0.3."""

    row: int  # number of the answer
    place: int  # of the text's tokens: it would have stood there
    token: int
    p: float
    q: float
    entropy: float  # of the target, nats
    recovered: tuple[int, ...]  # [K] tokens that rejection sampling might put in its place, one a continuation
    drawn: tuple[int, ...]  # [K] and those that the target itself draws there


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is looked for: drafts of at most ``depth`` recursive steps, ``places`` a row, with p >= ``p_min``."""

    sampling: SamplingConfig
    depth: int
    places: int
    rollouts: int  # K
    p_min: float
    seed: int
    draft_temperature: float | None = None  # None: the target's
    again: int = 0  # 1: the same candidates, with other continuations, independent of the first

    def probs(self, logits: Tensor, drafted: bool) -> Tensor:
        """Sampling distributions [n, V] of logits [n, V]; greedy drafting is not looked at."""
        own = self.sampling.temperature
        if drafted and self.draft_temperature is not None:
            own = self.draft_temperature
        one = BatchSampling(
            temperature=torch.tensor([own], device=logits.device),
            top_k=torch.tensor([self.sampling.top_k], device=logits.device) if self.sampling.top_k else None,
            top_p=torch.tensor([self.sampling.top_p], device=logits.device) if self.sampling.top_p < 1 else None,
        )
        return one.probs(logits[None])[0]


def seeds_of(seed: int, row: int, place: int, rollouts: int) -> list[int]:
    """Of the K continuations at one place, whatever token stands there: common random numbers.

    Apart from the seeds that answers are sampled with, which count from seed << 40.
    """
    return [(seed << 40) + (1 << 39) + (row << 25) + (place << 11) + k for k in range(rollouts)]


@torch.no_grad()
def find_candidates(policy: Policy, rows: Sequence[TokenRow], search: Search) -> list[Candidate]:
    """Rejected drafts of all rows, those of one place side by side. The same for a seed, however often it is called."""
    found: list[Candidate] = []
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        ids = chain_rows(part, 1, policy.device).token_ids
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        hidden = policy.hidden(ids, positions, CausalContext())
        assert policy.mtp is not None
        heads = list(chain(policy.mtp, policy.embed(ids), hidden, search.depth))
        for i, row in enumerate(part):
            states = [h[i] for h in heads]
            found += _of_row(policy, start + i, row, hidden[i], states, search)
    return found


def _of_row(
    policy: Policy, number: int, row: TokenRow, hidden: Tensor, heads: Sequence[Tensor], search: Search
) -> list[Candidate]:
    """Candidates of one row: hidden states [L, d] of its text, and the head's at each depth k [L - k, d]."""
    first, end, device = len(row.prompt), len(row.token_ids), hidden.device
    if end == first or first < 2:
        return []
    places = torch.arange(first, end, device=device)
    p = search.probs(policy.logits(hidden[first - 1 : end - 1]), drafted=False)
    doubt = entropy(p)
    seed = torch.full_like(places, ~((search.seed << 40) + number))  # negative: no answer is sampled with it
    numbers = uniforms(seed, places, 2 * search.depth + 1)
    found: dict[int, dict[int, Candidate]] = {}
    for depth in range(1, search.depth + 1):
        reached = places[depth - 1 :]  # a chain begins in the answer
        at = slice(depth - 1, None)
        if not len(reached):
            break
        q = search.probs(policy.logits(heads[depth - 1][reached - depth - 1]), drafted=True)
        token = sample(q, numbers[at, 2 * depth - 2])
        at_p, at_q = (x.gather(-1, token[:, None])[:, 0] for x in (p[at], q))
        rejected = ~(numbers[at, 2 * depth - 1] * at_q < at_p) & (at_p >= search.p_min)
        for j in rejected.nonzero()[:, 0].tolist():
            place, choice = int(reached[j]), int(token[j])
            if choice in policy.eos_token_ids or choice in found.get(place, {}):
                continue
            own = torch.tensor(seeds_of(search.seed + search.again, number, place, search.rollouts), device=device)
            # The engine's own numbers at this place: for a recovered token, and for one that no draft precedes.
            draws = uniforms(own, torch.full_like(own, place - 1), 2)
            instead, target = (x.expand(len(own), -1) for x in (residual(p[at][j], q[j]), p[at][j]))
            found.setdefault(place, {})[choice] = Candidate(
                row=number,
                place=place,
                token=choice,
                p=float(at_p[j]),
                q=float(at_q[j]),
                entropy=float(doubt[at][j]),
                recovered=tuple(sample(instead, draws[:, 0]).tolist()),
                drawn=tuple(sample(target, draws[:, 1]).tolist()),
            )
    order = sorted(found, key=lambda place: float(numbers[place - first, -1]))[: search.places]
    return [candidate for place in sorted(order) for candidate in found[place].values()]


@torch.no_grad()
def layer_states(policy: Policy, texts: Sequence[tuple[int, ...]], layers: Sequence[int], batch: int = 64) -> Tensor:
    """States [n, layers, 2, d] after layers at the last two tokens of a text: predicting its candidate, and at it."""
    states: list[Tensor] = [torch.zeros(0)] * len(texts)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    with tapped(policy.backbone.get_decoder().layers, tuple(layers)) as kept:
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            width = max(len(texts[i]) for i in part)
            ids = torch.tensor([[*texts[i], *[0] * (width - len(texts[i]))] for i in part], device=policy.device)
            policy.hidden(ids, torch.arange(width, device=ids.device).expand_as(ids), CausalContext())
            for j, i in enumerate(part):
                last = slice(len(texts[i]) - 2, len(texts[i]))
                states[i] = torch.stack([kept[layer][j, last].float().cpu() for layer in layers])
    return torch.stack(states)

"""Controls that replace the classifier, and an acceptance rule that records what it overrides and what it could.

The rule of PAD asks its part for a score of each token, so a control is a part that gives other scores.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.pad.decoding import PivotOverride
from bebop.systems.pad.network import PivotNetwork

CONTROLS = ("random", "inverted", "probability", "entropy")


class Control(PivotNetwork):
    """Network with a classifier's states and features but another score function.

    The function maps encoded [..., inner], p [...] and entropy [...] to scores [...].
    """

    def __init__(self, network: PivotNetwork, scored: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(
            size=network.of_hidden.in_features, layer=network.layer, position=network.position,
            inner=network.of_hidden.out_features, middle=network.out.in_features,
        )  # fmt: skip
        self.load_state_dict(network.state_dict())
        self.scored = scored

    def score(self, encoded: Tensor, p: Tensor, entropy: Tensor) -> Tensor:
        """Return scores in [0, 1]; the rule overrides low scores first."""
        return self.scored(encoded, p, entropy)


def control(name: str, network: PivotNetwork, seed: int) -> PivotNetwork:
    """Return the part of an arm: the classifier itself, or the control that replaces it.

    ``random`` draws a new score for every question. ``inverted`` turns the classifier round. ``probability`` overrides
    likely tokens first. ``entropy`` first overrides tokens where the target's entropy is high.
    """
    numbers = torch.Generator().manual_seed(seed)
    scored: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "random": lambda _encoded, p, _entropy: torch.rand(p.shape, generator=numbers, dtype=p.dtype),
        "inverted": lambda encoded, p, entropy: 1 - network.score(encoded, p, entropy),
        "probability": lambda _encoded, p, _entropy: 1 - p,
        "entropy": lambda _encoded, _p, entropy: (-entropy).exp(),
    }
    return Control(network, scored[name]).eval() if name in scored else network


class Recorded(PivotOverride):
    """Acceptance rule of PAD that records every draft it may override: drafts that fail the test with p >= p_min.

    ``offered`` and ``overridden`` count drafts. ``next_tested`` and ``next_accepted`` count drafts right after an
    override. ``asked`` holds, for each draft offered, the score of the classifier ``judge``, p and H(p) [n, 3].
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig, judge: PivotNetwork) -> None:
        super().__init__(policy, slots, config)
        self.judge, self.stops = judge, torch.tensor(policy.eos_token_ids)
        self.totals = dict.fromkeys(("offered", "overridden", "next_tested", "next_accepted"), 0)
        self.asked: list[Tensor] = []

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        accepted = super().accept(rows, draft, out, uniforms)
        assert draft.probs is not None
        drafts, index = draft.tokens.shape[1], draft.tokens[..., None]
        p, q = out.probs[:, :drafts], draft.probs
        at_p, at_q = p.gather(-1, index)[..., 0], q.gather(-1, index)[..., 0]
        stop = torch.isin(draft.tokens, self.stops)
        reached = torch.arange(drafts) <= accepted.lengths[:, None]
        reached &= (stop.cumsum(1) - stop.long()) == 0  # not beyond the end of the answer
        offered = reached & ~stop & ~(uniforms[:, :drafts] * at_q < at_p) & (at_p >= self.p_min)
        kept = accepted.counts["overridden"].bool() & reached
        stands = torch.arange(drafts) < accepted.lengths[:, None]
        after = kept[:, :-1] & reached[:, 1:]
        counted = (offered, kept, after, after & stands[:, 1:])
        for name, marks in zip(self.totals, counted, strict=True):
            self.totals[name] += int(marks.sum())
        states = self.judge.encode(out.layers[self.judge.layer][:, :drafts][offered])
        doubt = entropy(p)[offered]
        self.asked.append(torch.stack([self.judge.score(states, at_p[offered], doubt), at_p[offered], doubt], -1))
        return accepted

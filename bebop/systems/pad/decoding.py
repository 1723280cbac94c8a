"""PAD (SPEC 4): accepts a draft that rejection sampling would reject if a classifier finds that it does not matter."""

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.kernels.pivot import bias, emitted_probs, overridable, pivot_verify
from bebop.kernels.verify import one_hot
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.pad.network import PivotNetwork
from bebop.systems.pad.options import PadOptions


class PivotOverride:
    """Rejection sampling that also accepts rejected drafts with p >= p_min and a pivot score below tau, but never a
    stop.

    With a classifier that reads the state that *predicts* a candidate, every token's score is known. So the
    distribution P emitted at a position is known too (SPEC 4.4), and log P is returned with the tokens. A classifier
    that reads the *candidate's* own state scores only the drafted token, and P stays unknown.
    """

    stepwise = True
    counts = ("overridden", "bias")

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["pivot"]
        assert isinstance(network, PivotNetwork)
        options = config.of(PadOptions)
        self.network, self.tau, self.p_min = network, options.tau, options.p_min
        self.layers: tuple[int, ...] = (network.layer,)
        self.exact = self.tau == 0

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Accept or reject the drafts of a cycle.

        ``bias``: R_N, or its unbiased estimate if only the drafted token has a score.
        """
        drafts, index = draft.tokens.shape[1], draft.tokens[..., None]
        p = out.probs[:, :drafts]
        q = one_hot(draft.tokens, p.shape[-1], p.dtype) if draft.probs is None else draft.probs
        ahead = self.network.position == "pred"
        members = self._members(rows, p, q, q > p if ahead else _only(index, p), out)
        accepted, token, overridden = pivot_verify(
            draft.tokens, draft.probs, out.probs, uniforms, members.gather(-1, index)[..., 0], draft.lengths
        )
        chain = Accepted.chain(draft, accepted, token)
        if ahead:
            moved = bias(p, q, members)
        else:  # E over the draft of 1[y in N] (1 - p/q)+ is R_N
            at_p, at_q = p.gather(-1, index)[..., 0], q.gather(-1, index)[..., 0]
            moved = members.gather(-1, index)[..., 0] * (1 - at_p / at_q).clamp_min(0)
        return Accepted(
            tokens=chain.tokens,
            lengths=chain.lengths,
            counts={"overridden": overridden, "bias": moved},
            logprobs=None if self.exact or not ahead else self._logprobs(draft, out, q, members, chain.tokens),
        )

    def _members(self, rows: Rows, p: Tensor, q: Tensor, asked: Tensor, out: TargetOutput) -> Tensor:
        """Return which tokens [B, K, V] (bool) are accepted whatever the test says, among the candidates ``asked``.

        Only candidates are scored: few tokens have q > p >= p_min, and for the others the test always passes.
        """
        drafts = p.shape[1]
        stops = _marked(rows.slots.stops[: rows.batch], p.shape[-1])[:, None]
        row, step, token = (asked & (p >= self.p_min) & ~stops).nonzero(as_tuple=True)
        after = 0 if self.network.position == "pred" else 1
        encoded = self.network.encode(out.layers[self.network.layer][:, after : after + drafts])
        chance = p[row, step, token]
        scores = self.network.score(encoded[row, step], chance, entropy(p)[row, step])
        chosen = overridable(scores, chance, torch.zeros_like(row, dtype=torch.bool), tau=self.tau, p_min=self.p_min)
        members = torch.zeros_like(p, dtype=torch.bool)
        members[row, step, token] = chosen
        return members

    def _logprobs(self, draft: Draft, out: TargetOutput, q: Tensor, members: Tensor, tokens: Tensor) -> Tensor:
        """Return log P [B, K + 1] of the tokens; the target's log-prob if no draft was tested, as for bonus tokens."""
        drafts = q.shape[1]
        probs = emitted_probs(out.probs[:, :drafts], q, members)
        if draft.lengths is not None:
            tested = torch.arange(drafts, device=q.device) < draft.lengths[:, None]
            probs = torch.where(tested[..., None], probs, out.probs[:, :drafts])
        return torch.cat([probs, out.probs[:, drafts:]], 1).gather(-1, tokens[..., None])[..., 0].log()


def _only(index: Tensor, p: Tensor) -> Tensor:
    """Return a mask [B, K, V] that is true for the drafted tokens [B, K, 1]."""
    return torch.zeros_like(p, dtype=torch.bool).scatter_(-1, index, True)


def _marked(stops: Tensor, vocabulary: int) -> Tensor:
    """Return a mask [B, V] that is true for the stop tokens [B, stops], which are padded with -1."""
    marks = torch.zeros(len(stops), vocabulary + 1, dtype=torch.bool, device=stops.device)
    return marks.scatter_(1, stops.where(stops >= 0, vocabulary), True)[:, :vocabulary]

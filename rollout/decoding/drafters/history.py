"""Drafts from history alone: sampled from what followed the longest match in other answers to the same prompt."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.matching import Followers
from bebop.rollout.decoding.recall import Cycle, Recall, alone, greedy_rows
from bebop.rollout.slots import Slots


class HistoryDrafter:
    """No model: q is the empirical distribution, and a row without a match drafts nothing.

    A row drafts on while the chance that all so far are accepted, as ``Recall`` trusts in its matches, exceeds what a
    verified position costs: ``Costs.verify`` times the tokens that the request makes in the time of a plain step. The
    first draft is always made, so that trust keeps learning; with ``draft_tokens=auto`` it has to pay as well.
    """

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.recall, self.vocabulary = Recall(slots, config), policy.vocab_size
        self.temperature = config.temperature_of_drafts

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        self.recall.forget(span, len(tokens))

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. The width is that of the longest draft, so that no pass is widened for nothing."""
        drawn, followers = self._draw(rows, length)
        if not length.limit:  # matches of new rows wait until something is to be drafted
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None)
        lengths = torch.tensor([len(line) for line in drawn], device=rows.last.device)
        tokens, probs = alone(drawn, followers, self.vocabulary, rows.last.device)
        self.recall.drafted = Cycle(followers=followers, lengths=lengths, passes=0.0)
        sources = {"history": torch.ones_like(tokens)}
        total = sum(map(len, drawn))
        return Draft(tokens=tokens, probs=probs, lengths=lengths, total=total, sources=sources)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``."""
        self.recall.learn(rows, out, emitted)
        self.recall.follow(rows, tokens, emitted)

    def _draw(self, rows: Rows, length: DraftLength) -> tuple[list[list[int]], Followers]:
        """The drafts of each row, and what they were drawn from."""
        recall, wanted, followers = self.recall, length.start(rows), Followers()
        recall.costs = length.costs
        limits = [length.limit] * rows.batch if wanted is None else wanted.tolist()
        if not max(limits):
            return [[] for _ in limits], followers
        matches, greedy = recall.ahead(rows), greedy_rows(rows, self.temperature)
        uniforms = rows.uniforms[:, : max(limits)].tolist()
        of_rows = zip(matches, recall.trusted(rows), recall.paces(rows), strict=True)
        drawn = [
            followers.go_on(
                row, 0, match, trust.alone, uniforms[row][: limits[row]], greedy=greedy[row],
                least=pace * recall.costs.verify, always=recall.first,
            )
            for row, (match, trust, pace) in enumerate(of_rows)
        ]  # fmt: skip
        return drawn, followers


EntryClass = HistoryDrafter

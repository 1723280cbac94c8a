"""Runs the backbone over the engine's slots; knows its cache and positions, nothing of drafts or sampling."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from bebop.kernels.tree_verify import visible
from bebop.model.attention import SlotContext, Span
from bebop.model.backbone import Policy, tapped
from bebop.model.lean import lean_hidden
from bebop.model.ragged_attention import Ragged
from bebop.rollout.decoding.base import Rows, TargetPass
from bebop.rollout.slots import Slots


class Target:
    """The backbone with its preallocated cache."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        self.policy, self.slots = policy, slots
        self.cache = slots.register_cache("target", self._cache)
        self.hidden = lean_hidden(policy, slots.capacity)

    def _cache(self, slots: Slots) -> SlotContext:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        return SlotContext.for_model(self.policy.backbone.config, slots.sizes.slots, slots.capacity, like)

    def verify(
        self,
        rows: Rows,
        tokens: Tensor,
        layers: Collection[int] = (),
        ways: Tensor | None = None,
        beside: TargetPass | None = None,
        ragged: Ragged | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Feed tokens [B, n] from each row's fed length on -> hidden [B, n, d], and after ``layers`` [B, n, d] each.

        The third is what ``beside`` has for every token [B, n, ...]. ``ragged``: a chain whose rows are fed end to
        end, and come out so: [1, N, d].

        ``ways`` [B, n - 1, n - 1]: all but the first are nodes of a tree. Each sees its ancestors, itself included,
        and the text before. Entries go on by node, position ids by depth.
        """
        entries = rows.fed[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        if ragged is not None:
            assert ways is None and beside is None, "rows of chains alone are laid end to end"
            self.cache.place(entries, rows.used, ragged=ragged)
            return self._run(ragged.packed(tokens), ragged.packed(entries), layers, None, None)
        if ways is None:
            self.cache.place(entries, rows.used)
            return self._run(tokens, entries, layers, beside, None if beside is None else entries - rows.fed[:, None])
        ways = torch.nn.functional.pad(ways, (1, 0, 1, 0))
        ways[:, :, 0] = True  # everything follows the first
        self.cache.place(entries, rows.used, visible(rows.fed, ways, rows.used))
        anchors = entries - rows.fed[:, None]
        return self._run(tokens, rows.fed[:, None] + ways.sum(-1) - 1, layers, beside, anchors)

    def keep(self, rows: Rows, kept: Tensor) -> None:
        """Make a chain of a tree's entries: of ``kept`` [B, n] among the tokens fed last, the first one being 0."""
        self.cache.compact(rows.fed, kept)

    def prefill(
        self,
        span: Span,
        tokens: Tensor,
        lengths: Sequence[int],
        layers: Collection[int] = (),
        beside: TargetPass | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Feed the first ``lengths`` of padded tokens [n, W], which go where ``span`` says.

        What ``beside`` has is of the last one each [n, 1, ...], and means nothing where there is none.
        """
        last = torch.tensor(lengths, device=tokens.device)[:, None] - 1
        with self.cache.at_span(span):
            return self._run(tokens, span.positions, layers, beside, last.clamp_min(0))

    def _run(
        self,
        tokens: Tensor,
        positions: Tensor,
        layers: Collection[int],
        beside: TargetPass | None,
        anchors: Tensor | None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        with tapped(self.policy.backbone.get_decoder().layers, layers) as states:
            if beside is None:
                return self.hidden(tokens, positions, self.cache), states, None
            assert anchors is not None
            hidden, extra = beside(tokens, positions, self.cache, anchors)
        own = {layer: after[:, : tokens.shape[1]] for layer, after in states.items()}
        return hidden, own, extra

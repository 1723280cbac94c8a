"""Drafts from hidden states of future tokens, computed within the target's own passes (SPEC 3.3): a tree, or a chain.

Only verification decides which row is the last accepted one, so every row of a pass has pseudo states beside it. Those
of the last accepted row are kept: they know the text without the newest token, and predict what follows it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import numbered, on_likeliest
from bebop.errors import UserError
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext, Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput, counted
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots
from bebop.systems.firp.network import PseudoSlots, PseudoStates, hidden_with_pseudo
from bebop.systems.firp.options import FirpOptions


class PseudoPass:
    """Pass of the target that includes pseudo states [B, A, K, d]."""

    def __init__(self, policy: Policy, network: PseudoStates) -> None:
        self.policy, self.network = policy, network
        self.chosen: Tensor | None = None  # [c] rows of the next verification that get pseudo states; None: all

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotContext, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Run the pass with pseudo states in it; those of omitted rows are zero."""
        own = anchors if self.chosen is None else anchors[:, self.chosen]
        context = PseudoSlots(cache, own, self.network.masked)
        hidden, made = hidden_with_pseudo(self.policy, self.network, tokens, positions, own, context)
        if self.chosen is None:
            return hidden, made
        states = made.new_zeros(*anchors.shape, *made.shape[2:])
        states[:, self.chosen] = made
        return hidden, states

    def beside(self, rows: int) -> list[int]:
        """Return the number of positions that each row of a verification adds."""
        chosen = range(rows) if self.chosen is None else self.chosen.tolist()
        return [len(self.network.layers) * (row in chosen) for row in range(rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Tree of fixed shape, its nodes numbered depth by depth."""

    parents: Tensor  # [N]
    depths: Tensor  # [N] from 0
    ranks: Tensor  # [N] rank among siblings
    first: tuple[Tensor, ...]  # by rank: the first node with that rank at each depth
    depth: int  # D
    chosen: Tensor | None  # [c] 0, and 1 + each node that gets pseudo states; None: all do

    @classmethod
    def of(cls, paths: Sequence[tuple[int, ...]], kept: set[tuple[int, ...]], device: torch.device) -> Self:
        """Create a shape from the paths of its nodes, in any order; the nodes in ``kept`` get pseudo states."""
        ordered, parents = numbered(paths)
        depths, ranks = [len(path) - 1 for path in ordered], [path[-1] for path in ordered]
        places = list(zip(depths, ranks, strict=True))
        first = [
            torch.tensor([places.index((depth, rank)) for depth in sorted({d for d, r in places if r == rank})])
            for rank in range(1 + max(ranks))
        ]
        chosen = [0, *(1 + node for node, path in enumerate(ordered) if path in kept)]
        numbers = (torch.tensor(values, device=device) for values in (parents, depths, ranks))
        return cls(
            **dict(zip(("parents", "depths", "ranks"), numbers, strict=True)),
            first=tuple(nodes.to(device) for nodes in first),
            depth=1 + max(depths),
            chosen=None if len(chosen) > len(ordered) else torch.tensor(chosen, device=device),
        )


class FirpDrafter:
    """Drafter that samples draft k from the distribution q_k of pseudo state k; given the text, drafts are independent.

    In a tree all parents at a depth have the same children, as in a product of steps, and only one parent is reached.
    Siblings are drawn one after another without replacement; at temperature 0 they are the likeliest tokens.
    """

    layers: tuple[int, ...] = ()

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        network = policy.parts["firp"]
        assert isinstance(network, PseudoStates)
        network.check(policy)
        steps = len(network.layers)
        self.policy, self.network = policy, network.to(policy.backbone.dtype)
        self.shape = _shape(policy, network, slots, config) if config.tree else None
        if not config.tree and config.limit > steps:
            raise UserError(
                f"decoding.draft_tokens={config.limit} is not possible: the part firp predicts {steps} tokens"
            )
        self.target_pass = PseudoPass(policy, self.network)
        self.temperature = config.temperature_of_drafts
        # [S, K, d] final states of the last token that was fed; zero if the context has only one token
        fresh = torch.zeros(steps, policy.backbone.config.hidden_size, dtype=policy.backbone.dtype)
        self.states = slots.register_column("firp/states", fresh, of_context=True)
        # [S] (bool) the last token has no pseudo states, and the next step is a plain one
        leaves_out = self.shape is not None and self.shape.chosen is not None
        self.plain = slots.register_column("firp/plain", torch.tensor(False)) if leaves_out else None

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Keep the pseudo states of the last token of each prefilled context."""
        assert out.extra is not None
        for row, length in enumerate(lengths):
            self.states[span.first + row] = out.extra[row, 0] if length else 0

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row, without a pass: the pseudo states only need the language-model head."""
        wanted = length.start(rows)
        if self.shape is not None:
            return self._tree(rows, self.shape, wanted)
        width = length.limit if wanted is None else int(wanted.max())
        if width == 0:
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, lengths=wanted)
        logits, seen = self._logits(rows, width)
        probs = rows.probs(logits, seen, self.temperature)
        entropies = entropy(probs)
        return Draft(
            tokens=sample(probs, rows.uniforms[:, :width]),
            probs=None if self.temperature == 0 else probs,
            lengths=counted(length, wanted, entropies),
            entropies=entropies,
        )

    def _tree(self, rows: Rows, shape: Shape, wanted: Tensor | None) -> Draft:
        """Draft a tree; ``wanted`` [B] is the number of nodes that count."""
        if self.plain is not None:
            plain = self.plain[: rows.batch]
            if bool(plain.all()):
                return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None)
            wanted = torch.full_like(rows.last, len(shape.parents)) if wanted is None else wanted
            wanted = torch.where(plain, 0, wanted)
        logits, seen = self._logits(rows, shape.depth)
        tokens = rows.last.new_zeros(len(shape.first), rows.batch, shape.depth)  # by rank and depth
        probs = torch.zeros(*tokens.shape, logits.shape[-1], device=logits.device)
        for rank, nodes in enumerate(shape.first):
            depths = shape.depths[nodes]
            drawn = rows.probs(logits[:, depths], None if seen is None else seen[:, depths], self.temperature)
            chosen = sample(drawn, rows.uniforms[:, nodes])
            tokens[rank][:, depths], probs[rank][:, depths] = chosen, drawn
            # The next sibling is drawn from the remaining mass.
            left = logits[:, depths].scatter(2, chosen[..., None], -torch.inf)
            logits = logits.index_copy(1, depths, left)
        drawn_from = probs[shape.ranks, :, shape.depths].transpose(0, 1)  # [B, N, V]
        self.target_pass.chosen = shape.chosen
        return Draft(
            tokens=tokens[shape.ranks, :, shape.depths].T,
            probs=None if self.temperature == 0 else drawn_from,
            lengths=wanted,
            entropies=entropy(drawn_from),
            parents=shape.parents.expand(rows.batch, -1),
            depth=shape.depth,
        )

    def _logits(self, rows: Rows, width: int) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the first steps [B, width, V], and the marks that penalties see there.

        Tokens are drawn in parallel, so a penalty can only see the context.
        """
        logits = self.policy.logits(self.states[: rows.batch, :width])
        return logits, None if rows.seen is None else rows.seen[:, None].expand_as(logits)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Keep the states of the last token that is now in the cache."""
        assert out.extra is not None
        last = out.extra[torch.arange(rows.batch, device=tokens.device), emitted - 1]
        self.states[: rows.batch] = last
        if self.plain is not None:
            self.plain[: rows.batch] = ~last.flatten(1).any(1)
        self.target_pass.chosen = None


def _shape(policy: Policy, network: PseudoStates, slots: Slots, config: DecodingConfig) -> Shape:
    """Return the shape of the drafted tree; raise ``UserError`` if it is impossible."""
    options, steps = config.of(FirpOptions), len(network.layers)
    known = network.chances
    paths = options.paths(config.limit, known, steps)
    if len(paths) < config.limit:
        raise UserError(
            f"decoding.draft_tokens={config.limit} is not possible: {steps} tokens ahead, and chances for so "
            f"many children, make {len(paths)} nodes"
        )
    deepest, widest = max(map(len, paths)), 1 + max(path[-1] for path in paths)
    if deepest > steps:
        raise UserError(
            f"decoding.options.shape goes {deepest} deep, which is not possible: the part firp predicts {steps} tokens"
        )
    if widest > policy.vocab_size:
        raise UserError(f"decoding.options: {widest} children need as many tokens, and there are {policy.vocab_size}")
    kept = {*paths}
    if options.pseudo_paths is not None:
        kept = on_likeliest(kept, options.table(known), options.pseudo_paths)
    return Shape.of(paths, kept, slots.device)

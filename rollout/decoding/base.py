"""Interfaces of a decoding system: drafter, rule and draft length, and the values that they exchange.

Parts are made of (policy, slots, config). State of a request is a column or a cache of the slots. Randomness comes in
as uniforms, so that a rule is a pure function, and kernel, reference and test can share the numbers.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor

from bebop.config.job import Costs, DecodingConfig
from bebop.kernels.draw import LogitRows
from bebop.kernels.uniforms import uniforms
from bebop.model.attention import SlotContext, Span
from bebop.rollout.slots import Recorded, Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """K drafted tokens for each of B rows: a chain, or the nodes of a tree, parents before children."""

    tokens: Tensor  # [B, K]; K may differ from cycle to cycle, and be 0
    probs: Tensor | None  # [B, K, V] that each token was drawn from; None: one-hot (greedy, looked up)
    lengths: Tensor | None = None  # [B] drafts that count in each row; None: all K
    total: int | None = None  # the sum of ``lengths``, where it is known without asking the device
    entropies: Tensor | None = None  # [B, K] of ``probs``, nats; None: 0
    forwards: int = 0  # passes of the drafter in this cycle, that of ``commit`` included
    parents: Tensor | None = None  # [B, K] the node that each follows; -1: the newest token. None: a chain
    depth: int | None = None  # D, of the tree; None: K
    sources: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [B, K] share of another source; counted
    head: Tensor | None = None  # [B, V] the head's own distribution at the first draft, where ``probs`` mixes it
    # K of them with n = 1, where distributions stay logits; ``probs`` is [B, K, 0] then.
    rows: Sequence[LogitRows] | None = None

    def widths(self) -> Tensor:
        """Return the tokens of each row's cycle before verification, the newest included, as [B, K] equal columns."""
        width = self.tokens.shape[1]
        lengths = self.tokens.new_full((len(self.tokens),), width) if self.lengths is None else self.lengths
        return (lengths + 1)[:, None].expand(-1, width)

    def to_chain(self, accepted: "Accepted") -> "Draft":
        """Return a tree as the chain of its accepted path.

        It has D drafts, at each depth the first child of the node accepted before. Drafts beyond that path mean
        nothing, and ``lengths`` leaves them out.
        """
        assert self.parents is not None and accepted.rows is not None
        child = self.parents[:, None] == accepted.rows[:, :-1, None] - 1  # [B, D, K]
        if self.lengths is not None:
            child &= torch.arange(self.tokens.shape[1], device=child.device) < self.lengths[:, None, None]
        first = child.int().argmax(-1)
        ended = torch.zeros_like(child[:, :1, 0])
        goes_on = torch.cat([child.any(-1), ended], 1).gather(1, accepted.lengths[:, None])[:, 0]
        return Draft(
            tokens=self.tokens.gather(1, first),
            probs=None if self.probs is None else _take(self.probs, first),
            lengths=accepted.lengths + goes_on,
            entropies=None if self.entropies is None else self.entropies.gather(1, first),
            forwards=self.forwards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """Results of the target's pass over the newest token and the drafts."""

    hidden: Tensor  # [B, K + 1, d], final norm applied
    logits: Tensor  # [B, K + 1, V], raw
    probs: Tensor  # [B, K + 1, V], penalties, temperature and truncation applied
    layers: Mapping[int, Tensor] = field(default_factory=dict)  # layer -> [B, K + 1, d] after it, those asked for
    extra: Tensor | None = None  # [B, K + 1, ...] of a drafter that takes part in the pass
    rows: LogitRows | None = None  # where distributions stay logits: ``probs`` is [B, K + 1, 0] then

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return log p [B, K + 1] of tokens [B, K + 1]."""
        if self.rows is not None:
            return self.rows.logprobs(tokens)
        return self.probs.gather(-1, tokens[..., None])[..., 0].log()

    def gather_rows(self, rows: Tensor) -> "TargetOutput":
        """Return the output at rows [B, n], in their order."""
        return TargetOutput(
            hidden=_take(self.hidden, rows),
            logits=_take(self.logits, rows),
            probs=_take(self.probs, rows),
            layers={layer: _take(states, rows) for layer, states in self.layers.items()},
            extra=None if self.extra is None else _take(self.extra, rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Result of the verification of a draft. For a tree it is a path, and D stands for K."""

    tokens: Tensor  # [B, K + 1] accepted drafts, then the recovered or bonus token; what follows means nothing
    lengths: Tensor  # [B] accepted drafts, 0..K
    counts: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [B, K], those that the rule names
    logprobs: Tensor | None = None  # [B, K + 1] under what an inexact rule really drew from; None: not known, or log p
    rows: Tensor | None = None  # [B, D + 1] row of the target behind each token: 1 + its parent; None: 0, 1, ...
    overlap: Tensor | None = None  # [B, K] of draft and target at each draft that was tested, where a rule computes it

    @classmethod
    def chain(
        cls, draft: Draft, lengths: Tensor, recovered: Tensor, counts: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Return the acceptance of the first ``lengths`` [B] drafts of a chain and the token [B] after them."""
        assert draft.parents is None, "this rule judges chains"
        return cls(tokens=_then(draft.tokens, lengths, recovered), lengths=lengths, counts=counts or {})

    @classmethod
    def path(
        cls, draft: Draft, rows: Tensor, lengths: Tensor, recovered: Tensor, counts: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Return the acceptance of ``lengths`` [B] nodes of a tree, and of the token [B] after them.

        ``rows`` [B, D + 1] are rows of the target's output: 0 first, then 1 + each accepted node. Rows after those mean
        nothing but have to be valid.
        """
        tokens = _then(draft.tokens.gather(1, (rows[:, 1:] - 1).clamp_min(0)), lengths, recovered)
        return cls(tokens=tokens, lengths=lengths, counts=counts or {}, rows=rows)


def _then(drafts: Tensor, lengths: Tensor, recovered: Tensor) -> Tensor:
    """Return the first ``lengths`` [B] of drafts [B, K], then the token [B] after them: [B, K + 1] in all."""
    tokens = torch.cat([drafts, recovered[:, None]], 1)
    return tokens.scatter(1, lengths[:, None], recovered[:, None])


def _take(values: Tensor, rows: Tensor) -> Tensor:
    """Return rows [B, n] of values [B, K, ...]."""
    return values[torch.arange(len(rows), device=rows.device)[:, None], rows]


def newest(emitted: Tensor) -> Tensor:
    """Return the place [B, 1] of the last of the ``emitted`` [B] tokens of a cycle; 0 in dead rows, which emit none."""
    return (emitted[:, None] - 1).clamp_min_(0)


class Rows:
    """The active rows of the slots, 0..B-1, in one cycle."""

    def __init__(
        self,
        slots: Slots,
        batch: int,
        longest: int,
        static: bool = False,
        logits: bool = False,
        measure: bool = True,
        uniforms: Tensor | None = None,
    ) -> None:
        """Take the first ``batch`` slots for a cycle.

        Args:
            slots: of the engine.
            batch: B.
            longest: the most entries that a row has in the caches, known without a wait for the device.
            static: see ``Plan``.
            logits: see ``Plan``.
            measure: whether overlaps are computed.
            uniforms: [B, 2K + 2] of the cycle, where its drafts were made before; None: they are drawn here.
        """
        self.slots, self.batch, self.static = slots, batch, static
        self.logits, self.measure = logits, measure
        self.used = slots.attention_width(longest)
        self.sampling = slots.sampling(batch)
        self.fed = slots.fed[:batch]  # [B] entries in the caches
        self.last = slots.last[:batch]  # [B] the newest token, not fed yet
        # Keyed by the tokens fed: a request draws the same numbers wherever and beside whomever it is decoded, a later
        # turn others. For K drafts, K to draw them, K to test them, one for the recovered token and one for the bonus.
        self.uniforms = self._uniforms(slots.seed[:batch]) if uniforms is None else uniforms

    def reseed(self, sources: Tensor) -> None:
        """Replace this cycle's uniforms by those of (seed, ``sources`` [B], tokens fed).

        ``sources`` are 64-bit hashes of the texts that a drafter looks tokens up in. These texts may have been drawn
        with the very numbers of this request: by an earlier request with the same seed, or an earlier attempt that was
        lost. A draft that was accepted then would pass the same test again, and completions would not have the target's
        distribution. The hash covers a whole text, which did not exist when it was drawn, so the new numbers differ.
        Call this before anything is drawn.
        """
        self.uniforms = self._uniforms(self.slots.seed[: self.batch] ^ sources)

    def _uniforms(self, seeds: Tensor) -> Tensor:
        """Return uniforms [B, 2K + 2] of this cycle for the seeds [B]."""
        return uniforms(seeds, self.sizes - 1, 2 * self.slots.sizes.drafts + 2)

    @property
    def seen(self) -> Tensor | None:
        """Return which tokens are in the context of each row [B, V] (bool), if a penalty needs them."""
        return None if self.slots.seen is None else self.slots.seen[: self.batch]

    @property
    def sizes(self) -> Tensor:
        """Return the number of tokens of prompt and completion of each row [B]."""
        return (self.slots.asked + self.slots.count)[: self.batch]

    def context(self) -> Tensor:
        """Return prompt and completion [B, C] of each row; columns beyond ``sizes`` mean nothing.

        It is for cycles in which each token has one cache entry.
        """
        return self.slots.context(self.batch, self.used)

    def verify_uniforms(self, drafts: int) -> Tensor:
        """Return uniforms [B, drafts + 2] for verification.

        The last two have a fixed place. So they do not depend on the width of this cycle, which is that of the longest
        draft in the batch.
        """
        room = self.slots.sizes.drafts
        return torch.cat([self.uniforms[:, room : room + drafts], self.uniforms[:, 2 * room :]], 1)

    def probs(self, logits: Tensor, seen: Tensor | None = None, temperature: float | Tensor | None = None) -> Tensor:
        """Return the sampling distributions [B, n, V] of logits [B, n, V].

        ``seen`` [B, n, V] marks the tokens that penalties apply to. ``temperature`` replaces the rows' own, for all or
        each [B].
        """
        return replace(self.sampling, temperature=self.temperature(temperature)).probs(logits, seen)

    def temperature(self, other: float | Tensor | None = None) -> Tensor | None:
        """Return the temperatures [B] of the rows, or ``other`` for all or each [B]; None: 1 in all rows."""
        if other is None:
            return self.sampling.temperature
        if not isinstance(other, Tensor):  # filled in on the device: a copy from the host would be waited for
            other = torch.full((self.batch,), other, device=self.last.device)
        return other.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions of the host about a cycle before it begins; everything else is in tensors at fixed addresses.

    For a static cycle it alone decides which operations run, so that equal plans share a CUDA graph.
    """

    rows: int  # B that are computed: the active ones, then dead ones, which emit nothing (``Slots.retire``)
    longest: int  # no row has more entries in the caches
    drafts: int  # K, the most drafts of a row
    settings: tuple[bool, ...] = ()  # which settings of ``BatchSampling`` any row asks for
    static: bool = False  # nothing may be read of the device, and no shape may depend on what is drawn
    logits: bool = False  # distributions stay logits (``kernels/draw.py``), nothing of [B, K + 1, V] is made of them
    # Of a cycle whose verification alone is static: which parts of its draft are there. ``drafts`` is then its width.
    drafted: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Results of a cycle that the host reads."""

    done: Tensor  # [B] (bool) rows that have ended
    emitted: Tensor  # [B] tokens that count
    stood: Tensor  # [B] accepted drafts
    drafts: int | None  # of all rows, where it is known without asking the device
    forwards: int  # passes of the drafter
    latest: Recorded | None  # sums that the cycle was given to, see ``Slots.cut``


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """State of a cycle between its verification, whose tokens are written, and the ``commit`` of its parts."""

    draft: Draft  # a tree has become the chain of its accepted path
    out: TargetOutput
    accepted: Accepted
    emitted: Tensor  # [B] tokens that count
    done: Tensor  # [B] (bool) rows that have ended
    latest: Recorded | None  # see ``Outcome``


def of_tensors(values: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return a dataclass or a mapping with each tensor replaced by ``change(name, tensor)``; other values stay.

    A name is the path of fields and keys: ``.tokens``, ``.sources.history``.
    """
    if isinstance(values, Tensor):
        return change(name, values)
    if isinstance(values, Mapping):
        return {key: of_tensors(value, change, f"{name}.{key}") for key, value in values.items()}
    if is_dataclass(values) and not isinstance(values, type):
        own = {one.name: getattr(values, one.name) for one in fields(values)}
        return replace(values, **{key: of_tensors(value, change, f"{name}.{key}") for key, value in own.items()})
    return values


class DraftLength(Protocol):
    """Chooses how many tokens to draft. This base class drafts ``limit`` tokens, learns nothing and counts nothing."""

    limit: int  # the most drafts in the cycle that ``plan`` began, K; may be 0
    costs: Costs  # that a drafter reckons with which itself says when to stop; of this cycle, too
    counts: tuple[str, ...] = ()  # statistics of its own, summed over the positions that were reached

    def plan(self, batch: int) -> None:
        """Decide on the host about the next cycle of ``batch`` rows; called once per cycle, before everything else."""

    def start(self, rows: Rows) -> Tensor | None:
        """Return the drafts wanted [B] in this cycle, as far as they are known before drafting; None: ``limit``.

        It is called once per cycle, before anything is drafted.
        """
        return None

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """Return which rows draft token ``step`` (from 0); None: all.

        ``entropies`` [B, step + 1] are those of the draft distributions. It is called before the token is sampled. It
        may not look at the target. Once a token has been sampled, it may not drop it for being unlikely: that would
        filter the draft distribution and bias the output (SPEC 1.7).
        """
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Learn from a cycle; for a tree, ``draft`` is the chain of its path from ``Draft.to_chain``.

        The learned state belongs to the request (``Slots.register_column``): a completion may not depend on earlier or
        concurrent requests.
        """

    def note(self, batch: int, outcome: Outcome) -> None:
        """Keep the outcome of a cycle of ``batch`` rows on the host; it may not read the device yet."""

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Return the statistics [B, K] of a cycle, by the names in ``counts``."""
        return {}


def counted(length: DraftLength, wanted: Tensor | None, entropies: Tensor) -> Tensor | None:
    """Return how many drafts count in each row [B], as if they were drawn one after another; None: all.

    ``length.extend`` decides step by step.
    """
    asked = [length.extend(step, entropies[:, : step + 1]) for step in range(entropies.shape[1])]
    if all(go_on is None for go_on in asked):
        return wanted
    every = torch.ones_like(entropies[:, 0], dtype=torch.bool)
    alive = torch.stack([every if go_on is None else go_on for go_on in asked], 1)
    kept = alive.long().cumprod(1).sum(1)
    return kept if wanted is None else torch.minimum(kept, wanted)


class TargetPass(Protocol):
    """A pass of the target in which a drafter takes part."""

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotContext, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return final hidden states [B, n, d] of tokens [B, n], and the drafter's own states for the rows ``anchors``.

        The drafter's are [B, A, ...]. The caller has placed the cache. The pass may change neither the target's results
        nor the cache entries that remain.
        """
        ...

    def beside(self, rows: int) -> Sequence[int]:
        """Return how many positions the pass adds to each of ``rows`` tokens of a verification, in all layers."""
        ...


class Drafter(Protocol):
    """Proposes tokens."""

    layers: tuple[int, ...]  # of the target whose states it reads
    target_pass: TargetPass | None  # where it takes part in the target's passes

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Read the next part of some contexts into the cache entries of ``span``.

        Args:
            span: the slots and entries to write.
            tokens: [n, W + 1] padded; the last token of each row is not fed.
            lengths: tokens fed of each row.
            out: hidden states [n, W, d] of the target, and its layers; no logits. ``out.extra`` [n, 1, ...] belongs to
                the last token that was fed.
        """
        ...

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft up to ``length.limit`` tokens per row, as a chain or a tree."""
        ...

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Process the emitted tokens, before ``fed`` advances: the first ``emitted`` [B] >= 1 of ``tokens`` [B, K + 1].

        ``out`` has one row per token; for a tree these are the rows of the accepted path.
        """
        ...


class AcceptanceRule(Protocol):
    """Decides which drafts are accepted, as a pure function of its arguments."""

    exact: bool  # whether the output distribution is the target's
    stepwise: bool  # whether each draft is judged by itself: accepted with min(1, p/q), or what stands for it in a tree
    layers: tuple[int, ...]  # of the target whose states it reads
    counts: tuple[str, ...]  # statistics of its own, summed over the positions that were reached

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify a draft with uniforms [B, K + 2]: K tests, one for the recovered token and one for the bonus token.

        A rule for trees returns the path (``Accepted.path``).
        """
        ...


TAKES_LOGITS: set[type] = {type(None)}  # classes of drafters and rules, no drafter among them
P = TypeVar("P")


def takes_logits(part: type[P]) -> type[P]:
    """Mark a drafter or a rule as able to work on distributions as logits, where ``Rows.logits`` holds.

    Each subclass needs its own mark, since its additions may look at probabilities.
    """
    TAKES_LOGITS.add(part)
    return part


class Decoder(Protocol):
    """Interface that the embedded engine drives: ``DraftVerify``, or a custom cycle."""

    exact: bool  # whether tokens of this cycle have the target's distribution
    measure: bool  # overlap and entropies beside counts
    extends: bool  # whether it can read on from entries that are there, or reads every context from its beginning

    def configure(self, config: DecodingConfig) -> bool:
        """Use another decoding configuration from now on.

        Return whether a part is new and has not read the running contexts.
        """
        ...

    def entries(self, slot: int, context: list[int]) -> Sequence[Hashable]:
        """Return the items that the caches of a slot hold for a context (prompt, completion so far): one per entry.

        The next cycle feeds the last item. Requests with equal items share one prefill.
        """
        ...

    def prefill(self, first: int, contexts: Sequence[Sequence[Any]], starts: Sequence[int] = ()) -> None:
        """Read all but the last item of each context, as ``entries`` returns it, into slots first, first + 1, ...

        ``starts`` are the numbers of entries that exist already, fewer than there will be; empty: none.
        """
        ...

    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        """Run a cycle of the first B slots under weights ``version``; return which rows are done [B] (bool)."""
        ...

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return what a benchmark may time, as (object, method name, stage); a stage is prefill, verify or draft."""
        ...

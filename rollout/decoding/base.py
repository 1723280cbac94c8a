"""The seams of a decoding system: drafter, rule and draft length, and the values that they hand to one another.

Parts are made of (policy, slots, config). What one keeps of a request is a column or a cache of the slots. Randomness
comes in as uniforms, so that a rule is a pure function and kernel, reference and test can share the numbers.
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
        """Return tokens of each row's cycle before verification [B, K], the newest included: at every position the
        same."""
        width = self.tokens.shape[1]
        lengths = self.tokens.new_full((len(self.tokens),), width) if self.lengths is None else self.lengths
        return (lengths + 1)[:, None].expand(-1, width)

    def to_chain(self, accepted: "Accepted") -> "Draft":
        """Return a tree as the chain that its path was: D drafts, at each depth the first child of the node accepted
        before.

        Beyond that path they mean nothing, and ``lengths`` leaves them out.
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
    """The target's pass over the newest token and the drafts."""

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
        """Return its rows [B, n], in their order."""
        return TargetOutput(
            hidden=_take(self.hidden, rows),
            logits=_take(self.logits, rows),
            probs=_take(self.probs, rows),
            layers={layer: _take(states, rows) for layer, states in self.layers.items()},
            extra=None if self.extra is None else _take(self.extra, rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What verification made of a draft. Of a tree it is a path, and D stands for K."""

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
        """Return the first ``lengths`` [B] drafts and the token [B] after them."""
        assert draft.parents is None, "this rule judges chains"
        return cls(tokens=_then(draft.tokens, lengths, recovered), lengths=lengths, counts=counts or {})

    @classmethod
    def path(
        cls, draft: Draft, rows: Tensor, lengths: Tensor, recovered: Tensor, counts: Mapping[str, Tensor] | None = None
    ) -> Self:
        """Return the ``lengths`` [B] nodes behind ``rows`` [B, D + 1] of the target's output, and the token [B] after
        them.

        Row 0 comes first, then 1 + each accepted node; what follows means nothing but has to be a row.
        """
        tokens = _then(draft.tokens.gather(1, (rows[:, 1:] - 1).clamp_min(0)), lengths, recovered)
        return cls(tokens=tokens, lengths=lengths, counts=counts or {}, rows=rows)


def _then(drafts: Tensor, lengths: Tensor, recovered: Tensor) -> Tensor:
    """Return the first ``lengths`` [B] of drafts [B, K], then the token [B] after them, [B, K + 1] in all."""
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
        """``longest``: the most entries that a row has in the caches, known without a wait for the device.

        ``static``, ``logits``: see ``Plan``; ``measure``: whether overlaps are wanted; ``uniforms`` [B, 2K + 2]: those
        of the cycle, where its drafts were made before.
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

        ``sources``: 64-bit hashes of the texts that a drafter looks tokens up in. These texts may have been drawn with
        the very numbers of this request: the same seed was asked before, or an earlier attempt at it was lost. A draft
        that was accepted then would pass the same test again, and completions would not have the target's distribution.
        A text is hashed as a whole, and was not there when it was drawn, so that these numbers are others. Call it
        before anything is drawn.
        """
        self.uniforms = self._uniforms(self.slots.seed[: self.batch] ^ sources)

    def _uniforms(self, seeds: Tensor) -> Tensor:
        """Return uniforms [B, 2K + 2] of this cycle for streams [B]."""
        return uniforms(seeds, self.sizes - 1, 2 * self.slots.sizes.drafts + 2)

    @property
    def seen(self) -> Tensor | None:
        """Return the tokens in the context of each row [B, V] (bool), where a penalty needs them."""
        return None if self.slots.seen is None else self.slots.seen[: self.batch]

    @property
    def sizes(self) -> Tensor:
        """Return each row's number of tokens of prompt and completion [B]."""
        return (self.slots.asked + self.slots.count)[: self.batch]

    def context(self) -> Tensor:
        """Return prompt and completion [B, C] of each row; beyond ``sizes``, nothing.

        For cycles with a token an entry.
        """
        return self.slots.context(self.batch, self.used)

    def verify_uniforms(self, drafts: int) -> Tensor:
        """Return uniforms [B, drafts + 2] to verify with.

        The last two have their place whatever this cycle drafted: its
        width is that of the longest draft in the batch."""
        room = self.slots.sizes.drafts
        return torch.cat([self.uniforms[:, room : room + drafts], self.uniforms[:, 2 * room :]], 1)

    def probs(self, logits: Tensor, seen: Tensor | None = None, temperature: float | Tensor | None = None) -> Tensor:
        """Return the sampling distributions [B, n, V] of logits [B, n, V].

        ``seen`` [B, n, V]: what penalties see; ``temperature``: other than the rows' own, of all or of each [B].
        """
        return replace(self.sampling, temperature=self.temperature(temperature)).probs(logits, seen)

    def temperature(self, other: float | Tensor | None = None) -> Tensor | None:
        """Return the temperatures [B] of the rows, or another one of all or of each [B]; None: 1 in all rows."""
        if other is None:
            return self.sampling.temperature
        if not isinstance(other, Tensor):  # filled in there: a number that is copied is waited for
            other = torch.full((self.batch,), other, device=self.last.device)
        return other.float()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the host decides of a cycle before it begins; all else is in tensors that stay where they are.

    Of a static cycle it is all that decides which operations run, so that equal plans share a CUDA graph.
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
    """What a cycle leaves for the host."""

    done: Tensor  # [B] (bool) rows that have ended
    emitted: Tensor  # [B] tokens that count
    stood: Tensor  # [B] accepted drafts
    drafts: int | None  # of all rows, where it is known without asking the device
    forwards: int  # passes of the drafter
    latest: Recorded | None  # sums that the cycle was given to, see ``Slots.cut``


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A cycle between its verification, whose tokens are written, and what the parts learn of it."""

    draft: Draft  # a tree has become the chain of its accepted path
    out: TargetOutput
    accepted: Accepted
    emitted: Tensor  # [B] tokens that count
    done: Tensor  # [B] (bool) rows that have ended
    latest: Recorded | None  # see ``Outcome``


def of_tensors(values: Any, change: Callable[[str, Tensor], Tensor], name: str = "") -> Any:
    """Return a dataclass or a mapping with ``change(name, tensor)`` in place of each tensor in it; others stay.

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
    """Chooses how many tokens to draft. As it is, it drafts ``limit`` of them, learns nothing and counts nothing."""

    limit: int  # the most drafts in the cycle that ``plan`` began, K; may be 0
    costs: Costs  # that a drafter reckons with which itself says when to stop; of this cycle, too
    counts: tuple[str, ...] = ()  # statistics of its own, summed over the positions that were reached

    def plan(self, batch: int) -> None:
        """Decide on the host about the next cycle, of ``batch`` rows: once, before all else."""

    def start(self, rows: Rows) -> Tensor | None:
        """Return drafts wanted [B] in this cycle as far as is known beforehand; None: ``limit``.

        Once, before anything is drafted.
        """
        return None

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """Return which rows draft token ``step`` (from 0), given the draft distributions' entropies [B, step + 1];
        None: all.

        Called before the token is sampled. The rule may not look at the target, and may not drop a token once it has
        been sampled for being unlikely: that would filter the draft distribution and bias the output (SPEC 1.7).
        """
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Learn from a cycle; of a tree it is shown the path, as ``Draft.to_chain`` makes a chain of it.

        What is learned belongs to the request (``Slots.register_column``): a completion may not depend on those beside
        it or before.
        """

    def note(self, batch: int, outcome: Outcome) -> None:
        """Note on the host what a cycle of ``batch`` rows leaves, of which nothing may be asked of the device yet."""

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Return the statistics [B, K] that it names, of a cycle."""
        return {}


def counted(length: DraftLength, wanted: Tensor | None, entropies: Tensor) -> Tensor | None:
    """Return how many drafts count in each row [B], asked step by step as if they were drawn one after another; None:
    all."""
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
        """Return final hidden states [B, n, d] of tokens [B, n], and the drafter's own [B, A, ...] for the rows
        ``anchors``.

        The cache is placed. What the target computes may not change, nor what is left in the cache.
        """
        ...

    def beside(self, rows: int) -> Sequence[int]:
        """Return positions that it adds to each of so many rows of a verification, whatever layers they go through."""
        ...


class Drafter(Protocol):
    """Proposes tokens."""

    layers: tuple[int, ...]  # of the target whose states it reads
    target_pass: TargetPass | None  # where it takes part in the target's passes

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Read on where ``span`` says: ``tokens`` [n, W + 1] padded, of which the last of each is not fed.

        ``lengths``: tokens fed of each; ``out``: hidden states [n, W, d] of the target, and its layers; no logits.
        ``out.extra`` [n, 1, ...] is of the last token that was fed.
        """
        ...

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft up to ``length.limit`` tokens a row, a chain or a tree of them."""
        ...

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Take in the emitted tokens, before ``fed`` advances: the first ``emitted`` [B] >= 1 of ``tokens`` [B, K + 1].

        ``out`` has a row a token, also where the draft was a tree: those of the path that was accepted.
        """
        ...


class AcceptanceRule(Protocol):
    """Decides which drafts stand. A pure function of its arguments."""

    exact: bool  # whether the output distribution is the target's
    stepwise: bool  # whether each draft is judged by itself: accepted with min(1, p/q), or what stands for it in a tree
    layers: tuple[int, ...]  # of the target whose states it reads
    counts: tuple[str, ...]  # statistics of its own, summed over the positions that were reached

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify with uniforms [B, K + 2]: K tests, one for the recovered token and one for the bonus.

        A rule that judges trees says which path it took (``Accepted.path``).
        """
        ...


TAKES_LOGITS: set[type] = {type(None)}  # classes of drafters and rules, no drafter among them
P = TypeVar("P")


def takes_logits(part: type[P]) -> type[P]:
    """Say that a drafter or a rule takes distributions as logits, where ``Rows.logits`` holds.

    Its subclasses have to say so themselves: what they add may look at probabilities.
    """
    TAKES_LOGITS.add(part)
    return part


class Decoder(Protocol):
    """What the embedded engine drives: ``DraftVerify``, or a cycle of one's own."""

    exact: bool  # whether tokens of this cycle have the target's distribution
    measure: bool  # overlap and entropies beside counts
    extends: bool  # whether it can read on from entries that are there, or reads every context from its beginning

    def configure(self, config: DecodingConfig) -> bool:
        """Decode otherwise from now on; whether a part is new that has not read the running contexts."""
        ...

    def entries(self, slot: int, context: list[int]) -> Sequence[Hashable]:
        """Return what the caches are made of for a context (prompt, completion so far) in a slot: an item an entry.

        The next cycle feeds the last one. Equal ones are read once.
        """
        ...

    def prefill(self, first: int, contexts: Sequence[Sequence[Any]], starts: Sequence[int] = ()) -> None:
        """Read all but the last item of each context, as ``entries`` has it, into slots first, first + 1, ...

        ``starts``: entries that are there already, fewer than are to be; empty: none.
        """
        ...

    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        """Advance the first B slots by a cycle under weights ``version``; which rows are done [B] (bool)."""
        ...

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return what a benchmark may time: an object, its method, and of what it is a part: prefill, verify or
        draft."""
        ...

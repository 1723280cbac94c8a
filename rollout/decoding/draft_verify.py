"""The cycle of speculative decoding for any parts (draft, verify, accept, commit), and the target that it runs.

A cycle has three steps. The host makes a *plan*. A *body* works on the tensors of the slots alone. *After* it, the host
keeps notes. Two cycles with the same plan have bodies with the same operations on the same tensors. The body drafts,
``verify``s and ``commit``s. Where drafting or learning reads the device, ``verify`` alone is recorded
(``_cycle_in_half``).

An engine that launches a cycle before it has read the one before sets ``freezes``. A row that ended in a cycle then
emits nothing in the next one and keeps everything that its completion is made of.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.kernels.draw import normalise
from bebop.kernels.tree_verify import ancestry
from bebop.kernels.verify import one_hot
from bebop.model.attention import SlotContext, Span, cache_shape
from bebop.model.backbone import Policy, tapped
from bebop.model.lean import lean_hidden
from bebop.model.ragged_attention import Ragged
from bebop.rollout.decoding.base import (
    TAKES_LOGITS,
    AcceptanceRule,
    Accepted,
    Draft,
    Drafter,
    DraftLength,
    Outcome,
    Plan,
    Rows,
    TargetOutput,
    TargetPass,
    Verified,
    newest,
    of_tensors,
)
from bebop.rollout.decoding.graphs import Graphs, StagedDrafts
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.decoding.timed_lengths import TimedLength
from bebop.rollout.decoding.verify_trace import Tracer
from bebop.rollout.routing import RoutingTable
from bebop.rollout.slots import Slots, on_device
from bebop.systems import SYSTEMS
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import MEASURED

# Called once a cycle, before anything is written: rows, draft, target's output, accepted drafts, and how many tokens of
# them count [B]. A tree has become the chain of its accepted path. An observer may keep its arguments, not change them.
Observer = Callable[[Rows, Draft, TargetOutput, Accepted, Tensor], None]

# Rows are laid end to end if that leaves at most this share of their padded positions: it costs a few calls a layer.
WORTH_PACKING = 0.8


class DraftVerify:
    """The cycle of drafting and verifying. Without a drafter it is plain decoding."""

    extends = True
    logits: bool | None = None  # whether distributions stay logits where they can; None: on a GPU

    drafter: Drafter | None
    rule: AcceptanceRule
    length: DraftLength

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.policy, self.slots = policy, slots
        self.target = Target(policy, slots)
        self.drafters: dict[object, Drafter] = {}  # by class; once in charge, they read on and may return
        self.measure = True
        if self.logits is None:
            self.logits = slots.device.type == "cuda"
        self.timing: object = None  # the timing model of cycles, kept when another length comes between
        self.observers: list[Observer] = []  # are shown every cycle
        self.graphs: Graphs | None = None  # records cycles; None: they run as they are
        self.freezes = False  # rows may be in a cycle that ended in the one before: nothing of theirs changes
        self.staged = StagedDrafts(slots)
        # By the drafter's class, why its cycles cannot be recorded as a whole, and not even their verification; empty:
        # they can.
        self._reads: dict[object, tuple[str, str]] = {}
        self.configure(config)

    def configure(self, config: DecodingConfig) -> bool:
        """Use another configuration from now on; return whether the drafter is new.

        A new drafter has not read the running contexts.
        """
        system, parts = SYSTEMS[config.system], (self.policy, self.slots, config)
        new, self.drafter = False, None
        if system.drafts:
            kind = system.drafter()
            new, self.drafter = kind not in self.drafters, kind(*parts)
            self.drafters[kind] = self.drafter
            self._reads[kind] = _reads(config)
        self._chooses_temperature = config.chooses_temperature
        self.rule = system.rule()(*parts)
        self.length = (system.auto_length() if config.timed else system.length())(*parts)
        if isinstance(self.length, TimedLength):
            self.timing = self.length.take(self.timing)
        self.slots.extend_stats((*self.rule.counts, *self.length.counts))
        if self.graphs is not None:
            self.graphs.clear()
        return new

    @property
    def exact(self) -> bool:
        """Return whether tokens of this cycle have the target's distribution."""
        return self.rule.exact

    def entries(self, slot: int, context: list[int]) -> list[int]:
        """Return the context itself: each token is one cache entry."""
        return context

    def prefill(self, first: int, contexts: Sequence[Sequence[int]], starts: Sequence[int] = ()) -> None:
        """Read contexts into slots ``first``, ``first`` + 1, ..."""
        starts = starts or [0] * len(contexts)
        parts = [context[start:] for context, start in zip(contexts, starts, strict=True)]
        lengths = [len(part) - 1 for part in parts]
        width = max(lengths)
        if width == 0:
            return  # columns are as a new request starts
        padded = torch.tensor([[*part, *[0] * (width + 1 - len(part))] for part in parts], device=self.slots.device)
        span = Span.of(first, starts, lengths, width, self.slots.capacity, self.slots.device)
        hidden, layers, extra = self.target.prefill(span, padded[:, :-1], lengths, self._layers(), self._beside())
        out = TargetOutput(hidden=hidden, logits=hidden[..., :0], probs=hidden[..., :0], layers=layers, extra=extra)
        for drafter in self.drafters.values():
            drafter.prefill(span, padded, lengths, out)

    @torch.inference_mode()
    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        """Run a cycle of the first B slots under weights ``version``; return which rows are done [B] (bool)."""
        plan = self.plan(batch, longest, version)
        if self.graphs is None or not plan.static:
            return self.after(batch, self.body(plan))
        if plan.drafted is not None:
            return self._cycle_in_half(batch, longest, plan)
        outcome = self.graphs.run(plan, self._tensors(), self.body, self.watched())
        return self.after(batch, outcome, known=not self.graphs.fresh)

    def plan(self, batch: int, longest: int, version: int) -> Plan:
        """Return the plan of the next cycle of the first B slots, under weights ``version``."""
        self.slots.set_version(version)
        if self.drafter is not None:
            self.length.plan(batch)
        drafts = 0 if self.drafter is None else self.length.limit
        # In one bucket for all cycles, those that are watched have its shapes too, so that rounding stays the same.
        watched = "" if self.graphs is None or self.graphs.only_entries is not None else self.watched()
        if self.graphs is None or self.graphs.refuse(watched or self._reason(1)):
            return Plan(rows=batch, longest=longest, drafts=drafts, logits=self._by_logits(batch))
        self.slots.retire(batch)
        rows, entries = self.graphs.rows(batch), self.graphs.entries(longest)
        settings, logits = self.slots.sampling(rows).asked, self._by_logits(rows)
        half = () if self._reason(0) else None
        return Plan(
            rows=rows, longest=entries, drafts=drafts, settings=settings, static=True, logits=logits, drafted=half
        )

    def _by_logits(self, batch: int) -> bool:
        """Return whether distributions of the next cycle of B rows stay logits, because no part looks at probabilities.

        A subclass of a part, or a replacement of it, may look at them. So may the rule within a rule, where a
        certificate watches it. Where rounding may not depend on other rows, none do: a row that is traced or truncated
        would change the numbers of all.
        """
        if self.graphs is not None and self.graphs.only_entries is not None:
            return False
        parts = self.drafter, self.rule, getattr(self.rule, "inner", None)
        if not self.logits or self._chooses_temperature or not {*map(type, parts)} <= TAKES_LOGITS:
            return False
        return self.slots.sampling(batch).plain and not self.watched()

    def watched(self) -> str:
        """Return why an observer has to see the next cycle as it runs; empty: none has to."""
        if any(not isinstance(observer, Tracer) or observer.following for observer in self.observers):
            return "requests are traced, or every cycle is watched"
        return ""

    def why_read(self) -> str:
        """Return why the host has to read a cycle's results before it launches the next one; empty: it need not."""
        if isinstance(self.length, TimedLength) and self.drafter is not None:
            return "decoding.draft_tokens=auto learns from the results and the seconds of each cycle"
        return self.watched() or self._reason(0)

    def _reason(self, part: int) -> str:
        """Return why cycles cannot be recorded as a whole (0), or not even their verification (1); empty: they can."""
        return next(filter(None, (reasons[part] for reasons in self._reads.values())), "")

    def _tensors(self) -> tuple[int, ...]:
        """Return a key of the tensors that a body works on: of the slots, of staged drafts, and of the weights."""
        weights = self.policy.backbone.get_input_embeddings().weight.data_ptr()
        return self.slots.layout, self.staged.layout, weights

    def after(self, batch: int, outcome: Outcome, known: bool = True) -> Tensor:
        """Process the outcome of a cycle of B rows; return which of them are done [B] (bool).

        ``known`` says whether the duration of the cycle is typical, so that the draft length may learn from it.
        """
        self.slots.latest = outcome.latest
        if self.drafter is not None and known:
            self.length.note(batch, outcome)
        return outcome.done[:batch]

    def body(self, plan: Plan) -> Outcome:
        """Draft, verify, commit and advance the slots, as a plan says; return the outcome."""
        slots, batch = self.slots, plan.rows
        rows = Rows(slots, batch, plan.longest, plan.static, plan.logits, self.measure)
        before = slots.own_columns(batch) if self.freezes else {}
        if self.drafter is not None:
            draft = self.drafter.propose(rows, self.length)
        else:
            draft = Draft(tokens=slots.last.new_zeros(batch, 0), probs=None)
        outcome = self.commit(rows, self.verify(rows, draft))
        if self.freezes:
            slots.freeze(before, outcome.emitted, outcome.done)
        return outcome

    def _cycle_in_half(self, batch: int, longest: int, plan: Plan) -> Tensor:
        """Run a cycle of the first B slots of which only the verification is recorded; see ``cycle``.

        Drafts are copied into tensors at fixed addresses, padded to the bucket. The commit of the parts runs
        unrecorded.
        """
        assert self.graphs is not None and self.drafter is not None
        rows = Rows(self.slots, batch, longest)
        draft = self.drafter.propose(rows, self.length)
        plan, held, uniforms = self.staged.put(plan, draft, rows.uniforms)

        def verified(plan: Plan) -> Verified:
            return self.verify(Rows(self.slots, plan.rows, plan.longest, True, uniforms=uniforms), held)

        found = self.graphs.run(plan, self._tensors(), verified, self.watched())
        found = of_tensors(found, lambda _, tensor: tensor[:batch])
        self.slots.latest = found.latest
        found = replace(found, draft=replace(found.draft, forwards=draft.forwards, total=draft.total))
        return self.after(batch, self.commit(rows, found), known=not self.graphs.fresh)

    def verify(self, rows: Rows, draft: Draft) -> Verified:
        """Run the target over a draft; write the accepted tokens and their statistics."""
        slots, batch = self.slots, rows.batch
        slots.latest = None
        out = self._verify(rows, draft)
        accepted = self.rule.accept(rows, draft, out, rows.verify_uniforms(draft.tokens.shape[1]))
        extra = 0 if self._beside() is None else self._extra_positions(rows, draft)
        if accepted.rows is not None and draft.parents is not None:  # from here on the path is a chain
            self.target.keep(rows, accepted.rows)
            draft, out = draft.to_chain(accepted), out.gather_rows(accepted.rows)
        emitted, done = end(rows, accepted)
        for observe in self.observers:
            observe(rows, draft, out, accepted, emitted)
        write(rows, accepted, out.logprobs(accepted.tokens), self.exact)
        if not self.exact:
            slots.exact[:batch] = False
        if self.drafter is not None:
            counts = {**accepted.counts, **_by_source(draft, accepted), **self.length.count(draft)}
            counts |= _of_head(draft, out.probs) if self.measure else {}
            measure(rows, draft, accepted, counts, out, emitted, self.measure)
        if self._beside() is not None:
            slots.work[:batch, 3].add_(extra * self._ran(emitted))
        return Verified(draft=draft, out=out, accepted=accepted, emitted=emitted, done=done, latest=slots.latest)

    def commit(self, rows: Rows, verified: Verified) -> Outcome:
        """Let the parts learn from a cycle and read its tokens; advance the slots."""
        slots, batch, draft = self.slots, rows.batch, verified.draft
        out, accepted, emitted = verified.out, verified.accepted, verified.emitted
        if self.drafter is not None:
            self.length.observe(rows, draft, out, accepted)
        for drafter in self.drafters.values():
            drafter.commit(rows, out, accepted.tokens, emitted)
        remember(rows, accepted.tokens, emitted)
        # Written in place: ``+=`` of a slice copies what it has written onto itself, a kernel more.
        ran = self._ran(emitted)
        slots.work[:batch, :2].T.add_(ran)
        slots.work[:batch, 2].add_(ran * draft.forwards)
        slots.fed[:batch].add_(emitted)
        slots.count[:batch].add_(emitted)
        slots.last[:batch] = accepted.tokens.gather(1, newest(emitted))[:, 0]
        return Outcome(
            done=verified.done, emitted=emitted, stood=accepted.lengths, drafts=draft.total, forwards=draft.forwards,
            latest=slots.latest,
        )  # fmt: skip

    def _ran(self, emitted: Tensor) -> Tensor | int:
        """Return 1 for rows [B] that took part in the cycle, and 0 for rows that had ended before it."""
        return emitted.clamp_max(1) if self.freezes else 1

    def took(self, seconds: float) -> None:
        """Let the draft length learn from the duration of the latest cycle in seconds; its results have arrived."""
        if isinstance(self.length, TimedLength) and self.drafter is not None:
            self.length.took(seconds)

    def stages(self) -> list[tuple[Any, str, str]]:
        """Return the methods that a benchmark may time: (object, method name, stage)."""
        drafting = [(d, name, "draft") for d in self.drafters.values() for name in ("propose", "commit")]
        return [(self, "prefill", "prefill"), (self.target, "verify", "verify"), *drafting]

    def _verify(self, rows: Rows, draft: Draft) -> TargetOutput:
        fed = torch.cat([rows.last[:, None], draft.tokens], 1)
        ways = None if draft.parents is None else ancestry(draft.parents)
        beside = self._beside()
        ragged = _ragged(draft) if beside is None else None
        hidden, layers, extra = self.target.verify(rows, fed, self._layers(), ways, beside, ragged)
        logits, seen = self.policy.logits(hidden), seen_at(rows, draft, ways)
        if rows.logits:
            assert ways is None and ragged is None, "these are chains of padded rows"
            found = normalise(logits, rows.temperature())
            empty = logits[..., :0]
            return TargetOutput(hidden=hidden, logits=logits, probs=empty, layers=layers, extra=extra, rows=found)
        if ragged is None:
            probs = rows.probs(logits, seen)
            return TargetOutput(hidden=hidden, logits=logits, probs=probs, layers=layers, extra=extra)
        seen = None if seen is None else ragged.packed(seen).transpose(0, 1)
        probs = rows.sampling.of(ragged.rows).probs(logits.transpose(0, 1), seen).transpose(0, 1)
        hidden, logits, probs, *states = map(ragged.padded, (hidden, logits, probs, *layers.values()))
        return TargetOutput(hidden=hidden, logits=logits, probs=probs, layers=dict(zip(layers, states, strict=True)))

    def _layers(self) -> set[int]:
        return {layer for drafter in self.drafters.values() for layer in drafter.layers} | {*self.rule.layers}

    def _beside(self) -> TargetPass | None:
        """Return the target pass of the one drafter that takes part in it, even while another drafter is in use."""
        passes = [drafter.target_pass for drafter in self.drafters.values() if drafter.target_pass is not None]
        assert len(passes) < 2, "one pass of the target has room for one drafter"
        return passes[0] if passes else None

    def _extra_positions(self, rows: Rows, draft: Draft) -> Tensor | int:
        """Return the positions of each row [B] beside its newest token and those of its drafts that count."""
        if (beside := self._beside()) is None:
            return 0
        numbers = tuple(beside.beside(1 + draft.tokens.shape[1]))
        if draft.lengths is None:
            return sum(numbers)
        each = on_device(numbers, rows.last.device)
        return torch.where(torch.arange(len(each), device=each.device) <= draft.lengths[:, None], each, 0).sum(1)


def _reads(config: DecodingConfig) -> tuple[str, str]:
    """Return why cycles of a system cannot be recorded as a whole, and why not even their verification.

    An empty string means that they can.
    """
    system = SYSTEMS[config.system]
    why = f"decoding.system={config.system} reads the device within a cycle"
    if config.chooses_temperature:
        whole = "decoding.draft_temperature=auto reads the device within a cycle"
    else:
        whole = "" if system.static else why
    return whole, "" if system.static or system.static_verify else why


def _ragged(draft: Draft) -> Ragged | None:
    """Return the layout of rows laid end to end if that saves enough positions, else None.

    This does not wait for the device.
    """
    batch, width = draft.tokens.shape
    if draft.lengths is None or draft.total is None or (draft.total + batch) > WORTH_PACKING * batch * (width + 1):
        return None
    return Ragged.of(draft.lengths + 1, width + 1)


def _by_source(draft: Draft, accepted: Accepted) -> dict[str, Tensor]:
    """Return the drafts [B, K] from each source as ``NAME``, and the accepted ones as ``NAME_accepted``."""
    if not draft.sources:
        return {}
    kept = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < accepted.lengths[:, None]
    return dict(draft.sources) | {f"{name}_accepted": share * kept for name, share in draft.sources.items()}


def _of_head(draft: Draft, probs: Tensor) -> dict[str, Tensor]:
    """Return the overlap of the head's own distribution with the target's at the first draft, and where it is known.

    Both are [B, K].
    """
    if draft.head is None or not draft.tokens.shape[1]:  # it was asked, and no draft paid
        return {}
    overlap, read = (torch.zeros_like(draft.tokens, dtype=probs.dtype) for _ in range(2))
    overlap[:, 0], read[:, 0] = torch.minimum(probs[:, 0], draft.head).sum(-1), 1.0
    return {HEAD_OVERLAP: overlap, HEAD_READ: read}


# ---- the tokens of a cycle: which count, where they are written, and statistics


def end(rows: Rows, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """Return how many of the tokens count [B] and which rows are done [B]; a stop token or the limit ends a row."""
    slots, batch, tokens = rows.slots, rows.batch, accepted.tokens
    stops = (tokens[..., None] == slots.stops[:batch, None]).any(-1)
    # Index of the first stop token, or the width where there is none.
    first = torch.where(stops.any(1), stops.int().argmax(1), tokens.shape[1])
    room = slots.limit[:batch] - slots.count[:batch]
    emitted = torch.minimum(torch.minimum(accepted.lengths, first) + 1, room)
    done = (first < emitted) | (emitted == room)
    return emitted, done


def write(rows: Rows, accepted: Accepted, logprobs: Tensor, exact: bool) -> None:
    """Append accepted tokens to the slots, with log p [B, K + 1] and version.

    The next cycle overwrites everything beyond the emitted tokens. Once a rule has returned the distribution that it
    really draws from, that log-prob is stored beside log p.
    """
    slots, batch, tokens = rows.slots, rows.batch, accepted.tokens
    columns = slots.count[:batch, None] + torch.arange(tokens.shape[1], device=tokens.device)
    slots.tokens[:batch].scatter_(1, columns, tokens)
    slots.logprobs[:batch].scatter_(1, columns, logprobs)
    if accepted.logprobs is not None or slots.sampled is not None:
        unknown = logprobs if exact else torch.full_like(logprobs, torch.nan)
        slots.drawn()[:batch].scatter_(1, columns, unknown if accepted.logprobs is None else accepted.logprobs.float())
    slots.versions[:batch].scatter_(1, columns, slots.version.expand_as(columns))
    slots.contexts[:batch].scatter_(1, columns, slots.oldest[:batch, None].expand_as(tokens))


def measure(
    rows: Rows,
    draft: Draft,
    accepted: Accepted,
    counts: Mapping[str, Tensor],
    out: TargetOutput,
    emitted: Tensor,
    everything: bool,
) -> None:
    """Add this cycle to the sums over positions that were reached and not cut off by the end of the completion.

    ``counts`` [B, K] are named statistics of the system's parts. With ``everything`` overlap and entropies are added.
    """
    drafts = draft.tokens.shape[1]
    steps = torch.arange(drafts, device=emitted.device)
    reached = steps < emitted[:, None]
    if draft.lengths is not None:
        reached &= steps < draft.lengths[:, None]
    sums = {"reached": reached, "accepted": steps < accepted.lengths[:, None]}
    found = dict(zip(MEASURED, _compare(draft, accepted, out), strict=True)) if everything else {}
    sums |= {**found, **counts}
    values = torch.stack([value.double() for value in sums.values()], 1)
    rows.slots.record([*sums], torch.where(reached[:, None], values, 0.0), emitted)


def _compare(draft: Draft, accepted: Accepted, out: TargetOutput) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return overlap, p(argmax q) and both entropies [B, K], the statistics that cost time in each cycle."""
    drafts = draft.tokens.shape[1]
    if out.rows is not None:
        best = draft.tokens if draft.rows is None else torch.cat([one.best for one in draft.rows], 1)
        chance, spread = out.rows.logprobs(best).exp(), out.rows.entropy[:, :drafts]
        own = torch.zeros_like(chance) if draft.entropies is None else draft.entropies
        return (chance if accepted.overlap is None else accepted.overlap), chance, own, spread
    p = out.probs[:, :drafts]
    if draft.probs is None:
        chance = p.gather(-1, draft.tokens[..., None])[..., 0]
        return chance, chance, torch.zeros_like(chance), entropy(p)
    best = draft.probs.argmax(-1, keepdim=True)
    overlap = torch.minimum(p, draft.probs).sum(-1)
    own = entropy(draft.probs) if draft.entropies is None else draft.entropies
    return overlap, p.gather(-1, best)[..., 0], own, entropy(p)


def seen_at(rows: Rows, draft: Draft, ways: Tensor | None = None) -> Tensor | None:
    """Return the tokens [B, K + 1, V] that penalties apply to at each verified position.

    They are those of the context and of earlier drafts. ``ways`` [B, K, K]: for a tree, the ancestors of each node,
    itself included.
    """
    if rows.seen is None:
        return None
    if ways is not None:
        drafted = one_hot(draft.tokens, rows.seen.shape[-1], torch.float32)
        return torch.cat([rows.seen[:, None], rows.seen[:, None] | (ways.float() @ drafted > 0)], 1)
    seen = [rows.seen]
    for step in range(draft.tokens.shape[1]):
        seen.append(seen[-1].scatter(1, draft.tokens[:, step : step + 1], True))
    return torch.stack(seen, 1)


def remember(rows: Rows, tokens: Tensor, emitted: Tensor) -> None:
    """Add the emitted tokens of each row to those that penalties apply to."""
    if rows.seen is None:
        return
    counts = torch.arange(tokens.shape[1], device=tokens.device) < emitted[:, None]
    # Beyond the emitted ones the first token stands in: it is emitted anyway.
    rows.seen.scatter_(1, torch.where(counts, tokens, tokens[:, :1]), True)


# ---- the target


class Target:
    """Runs the backbone over the engine's slots, with its preallocated cache; knows nothing of drafts or sampling."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        self.policy, self.slots = policy, slots
        self.cache = slots.register_cache("target", self._cache)
        self.hidden = lean_hidden(policy, slots.capacity)
        self.routing: RoutingTable | None = None

    def record_routing(self) -> RoutingTable:
        """Record from now on which experts compute each entry of the cache, and return the table.

        Raises:
            UserError: The model has no experts, or routers that are not known.
        """
        self.routing = self.slots.register_cache("routing", partial(RoutingTable, self.policy.backbone, self.cache))
        return self.routing

    def _cache(self, slots: Slots) -> SlotContext:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        return slots.kv_cache(cache_shape(self.policy.backbone.config), like)

    def verify(
        self,
        rows: Rows,
        tokens: Tensor,
        layers: Collection[int] = (),
        ways: Tensor | None = None,
        beside: TargetPass | None = None,
        ragged: Ragged | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Feed tokens [B, n] from each row's fed length on.

        Args:
            rows: B active rows.
            tokens: [B, n].
            layers: numbers of the layers whose states are returned.
            ways: [B, n - 1, n - 1] of a tree: all tokens but the first are nodes, each of which sees its ancestors,
                itself and the text before. Entries are numbered by node, position ids by depth.
            beside: a drafter's pass that takes part.
            ragged: for chains, rows are fed end to end, and the results are so too: [1, N, d].

        Returns:
            hidden states [B, n, d], states after each of ``layers`` [B, n, d], and the results of ``beside`` for every
            token [B, n, ...].
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
        self.cache.place(entries, rows.used, (rows.fed, ways))
        anchors = entries - rows.fed[:, None]
        return self._run(tokens, rows.fed[:, None] + ways.sum(-1) - 1, layers, beside, anchors)

    def keep(self, rows: Rows, kept: Tensor) -> None:
        """Turn a tree's entries into a chain: keep ``kept`` [B, n] of the tokens fed last; the first of them is 0."""
        self.cache.compact(rows.fed, kept)
        if self.routing is not None:
            self.routing.compact(rows.fed, kept)

    def prefill(
        self,
        span: Span,
        tokens: Tensor,
        lengths: Sequence[int],
        layers: Collection[int] = (),
        beside: TargetPass | None = None,
    ) -> tuple[Tensor, dict[int, Tensor], Tensor | None]:
        """Feed the first ``lengths`` of padded tokens [n, W] into the entries of ``span``.

        The results of ``beside`` [n, 1, ...] belong to the last token of each row, and mean nothing in rows without
        tokens.
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

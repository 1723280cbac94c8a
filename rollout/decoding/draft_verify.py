"""The cycle of speculative decoding, whatever the parts: draft, verify, accept, emit, commit."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.decoding import HEAD_OVERLAP, HEAD_READ, SYSTEMS
from bebop.kernels.tree_verify import ancestry
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.model.ragged_attention import Ragged
from bebop.rollout.decoding.base import (
    AcceptanceRule,
    Accepted,
    Draft,
    Drafter,
    DraftLength,
    Rows,
    TargetOutput,
    TargetPass,
)
from bebop.rollout.decoding.emit import end, measure, remember, seen_at, write
from bebop.rollout.decoding.registry import make_part
from bebop.rollout.decoding.timed_length import TimedLength
from bebop.rollout.slots import Slots, on_device
from bebop.rollout.target import Target

# Called once a cycle, before anything is written: rows, draft, target's output, what was accepted, and how many tokens
# of it count [B]. A tree has become the chain of its accepted path. May keep what it is shown and change nothing.
Observer = Callable[[Rows, Draft, TargetOutput, Accepted, Tensor], None]

# Rows are laid end to end if that leaves at most this share of their padded positions: it costs a few calls a layer.
WORTH_PACKING = 0.8


class DraftVerify:
    """See ``Decoder``. Without a drafter it is plain decoding."""

    extends = True

    drafter: Drafter | None
    rule: AcceptanceRule
    length: DraftLength

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.policy, self.slots = policy, slots
        self.target = Target(policy, slots)
        self.drafters: dict[str, Drafter] = {}  # all that were ever in charge: they read on, and may return at any time
        self.measure = True
        self.timing: object = None  # what is known of the time of cycles, also when another length comes between
        self.observers: list[Observer] = []  # are shown every cycle
        self.configure(config)

    def configure(self, config: DecodingConfig) -> bool:
        """See ``Decoder``."""
        system = SYSTEMS[config.system]
        new = system.drafts and system.drafter not in self.drafters
        self.drafter = None
        if system.drafts:
            self.drafter = make_part(f"drafters.{system.drafter}", self.policy, self.slots, config)
            self.drafters[system.drafter] = self.drafter
        self.rule = make_part(f"rules.{system.rule}", self.policy, self.slots, config)
        self.length = make_part(f"lengths.{config.length}", self.policy, self.slots, config)
        if isinstance(self.length, TimedLength):
            self.timing = self.length.take(self.timing)
        self.slots.extend_stats((*self.rule.counts, *self.length.counts))
        return new

    @property
    def exact(self) -> bool:
        """See ``Decoder``."""
        return self.rule.exact

    def entries(self, slot: int, context: list[int]) -> list[int]:
        """See ``Decoder``: a token an entry."""
        return context

    def prefill(self, first: int, contexts: Sequence[Sequence[int]], starts: Sequence[int] = ()) -> None:
        """See ``Decoder``."""
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
        """See ``Decoder``."""
        slots, rows = self.slots, Rows(self.slots, batch, longest)
        if self.drafter is not None:
            draft = self.drafter.propose(rows, self.length)
        else:
            draft = Draft(tokens=slots.last.new_zeros(batch, 0), probs=None)
        out = self._verify(rows, draft)
        accepted = self.rule.accept(rows, draft, out, rows.tests(draft.tokens.shape[1]))
        # Written in place: ``+=`` of a slice copies what it has written onto itself, a kernel more.
        if self._beside() is not None:
            slots.work[:batch, 3].add_(self._extra_positions(rows, draft))
        if accepted.rows is not None and draft.parents is not None:  # from here on the path is a chain
            self.target.keep(rows, accepted.rows)
            draft, out = draft.along(accepted), out.at(accepted.rows)
        emitted, done = end(rows, accepted)
        for observe in self.observers:
            observe(rows, draft, out, accepted, emitted)
        write(rows, accepted, out.probs, version, self.exact)
        if not self.exact:
            slots.exact[:batch] = False
        if self.drafter is not None:
            counts = {**accepted.counts, **_by_source(draft, accepted), **self.length.count(draft)}
            counts |= _of_head(draft, out.probs) if self.measure else {}
            measure(rows, draft, accepted, counts, out.probs, emitted, self.measure)
            self.length.observe(rows, draft, out, accepted)
        for drafter in self.drafters.values():
            drafter.commit(rows, out, accepted.tokens, emitted)
        remember(rows, accepted.tokens, emitted)
        slots.work[:batch, :2].add_(1)
        slots.work[:batch, 2].add_(draft.forwards)
        slots.fed[:batch].add_(emitted)
        slots.count[:batch].add_(emitted)
        slots.last[:batch] = accepted.tokens.gather(1, emitted[:, None] - 1)[:, 0]
        return done

    def took(self, seconds: float) -> None:
        """Learn what the latest cycle took, its results having arrived."""
        if isinstance(self.length, TimedLength) and self.drafter is not None:
            self.length.took(seconds)

    def stages(self) -> list[tuple[Any, str, str]]:
        """See ``Decoder``."""
        drafting = [(d, name, "draft") for d in self.drafters.values() for name in ("propose", "commit")]
        return [(self, "prefill", "prefill"), (self.target, "verify", "verify"), *drafting]

    def _verify(self, rows: Rows, draft: Draft) -> TargetOutput:
        fed = torch.cat([rows.last[:, None], draft.tokens], 1)
        ways = None if draft.parents is None else ancestry(draft.parents)
        beside = self._beside()
        ragged = _ragged(draft) if beside is None else None
        hidden, layers, extra = self.target.verify(rows, fed, self._layers(), ways, beside, ragged)
        logits, seen = self.policy.logits(hidden), seen_at(rows, draft, ways)
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
        """Of the one drafter that takes part in the target's passes; it does so on when another one is in charge."""
        passes = [drafter.target_pass for drafter in self.drafters.values() if drafter.target_pass is not None]
        assert len(passes) < 2, "one pass of the target has room for one drafter"
        return passes[0] if passes else None

    def _extra_positions(self, rows: Rows, draft: Draft) -> Tensor | int:
        """Of each row [B] in the pass over a draft, beside its newest token and those of its drafts that count."""
        if (beside := self._beside()) is None:
            return 0
        numbers = tuple(beside.beside(1 + draft.tokens.shape[1]))
        if draft.lengths is None:
            return sum(numbers)
        each = on_device(numbers, rows.last.device)
        return torch.where(torch.arange(len(each), device=each.device) <= draft.lengths[:, None], each, 0).sum(1)


def _ragged(draft: Draft) -> Ragged | None:
    """How rows are laid end to end, where that saves a good part of the positions; nobody asks the device for it."""
    batch, width = draft.tokens.shape
    if draft.lengths is None or draft.total is None or (draft.total + batch) > WORTH_PACKING * batch * (width + 1):
        return None
    return Ragged.of(draft.lengths + 1, width + 1)


def _by_source(draft: Draft, accepted: Accepted) -> dict[str, Tensor]:
    """What came from each source [B, K], and the same of what was accepted: ``NAME`` and ``NAME_accepted``."""
    if not draft.sources:
        return {}
    kept = torch.arange(draft.tokens.shape[1], device=draft.tokens.device) < accepted.lengths[:, None]
    return dict(draft.sources) | {f"{name}_accepted": share * kept for name, share in draft.sources.items()}


def _of_head(draft: Draft, probs: Tensor) -> dict[str, Tensor]:
    """The overlap of the head's own distribution with the target's at the first draft, and where it is known [B, K]."""
    if draft.head is None or not draft.tokens.shape[1]:  # it was asked, and no draft paid
        return {}
    overlap, read = (torch.zeros_like(draft.tokens, dtype=probs.dtype) for _ in range(2))
    overlap[:, 0], read[:, 0] = torch.minimum(probs[:, 0], draft.head).sum(-1), 1.0
    return {HEAD_OVERLAP: overlap, HEAD_READ: read}


EntryClass = DraftVerify

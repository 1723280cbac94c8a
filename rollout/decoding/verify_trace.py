"""Observes verification, and records for some requests how each of their tokens came about (``bebop.trajectory``).

Each cycle is condensed on the device to a few numbers a place, which stay there until the request ends. So a cycle has
nothing more to wait for. Rows that are not traced cost nothing.

A place is a row of 7 + 4M int32: its verdict (NONE where no token was emitted), the draft, the M likeliest tokens of p
and those of q; then, as the bits of a float32, p and q of the draft, the overlap, the entropies of p and of q, and the
probabilities of those tokens. All places are in one tensor, so that a completion is one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.sampling import entropy
from bebop.trajectory import NONE, TOP, VERDICTS, Completion, Trace, join_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """Record of one cycle for the R rows that are traced."""

    drafter: str
    places: Tensor  # [R, K + 1, 7 + 4M], see ``condensed``


class Tracer:
    """An ``Observer`` of cycles that records traces; the engine reports where requests come, move and end."""

    def __init__(self, drafter: str) -> None:
        """Make a tracer; ``drafter`` is the name of the drafter in use."""
        self.drafter = drafter
        self._cycles: dict[int, list[tuple[Cycle, int]]] = {}  # slot -> the cycles of its request, and its row in each
        self._chosen: Tensor | slice | None = None  # the slots as an index, until they change

    @property
    def following(self) -> bool:
        """Return whether any request is traced."""
        return bool(self._cycles)

    def follow(self, slot: int) -> None:
        """Trace the new request in a slot."""
        self._cycles[slot], self._chosen = [], None

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move traced requests from slots to other slots, whose own requests have ended."""
        for source, target in zip(sources, targets, strict=True):
            if source in self._cycles:
                self._cycles[target], self._chosen = self._cycles.pop(source), None

    def end(self, slot: int, count: int, before: Completion | None, vocabulary: int) -> Trace | None:
        """Return the trace of a completion of ``count`` tokens that leaves a slot, or None if it is not traced.

        ``before`` is the partial completion that it was resumed from. Its tokens count as unknown if they have no
        trace.
        """
        if slot not in self._cycles:
            return None
        cycles, self._chosen, top = self._cycles.pop(slot), None, min(TOP, vocabulary)
        done = 0 if before is None else len(before.token_ids)
        own = unpacked([c.places[row] for c, row in cycles], [c.drafter for c, _ in cycles], count - done, top)
        return own if before is None else join_traces([before.trace or unknown(done, top), own])

    def __call__(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        """Record a cycle for the traced requests."""
        if not self._cycles:
            return
        slots, chosen = sorted(self._cycles), self._index(rows.last.device)
        places = condensed(
            draft.tokens[chosen],
            None if draft.probs is None else draft.probs[chosen],
            None if draft.lengths is None else draft.lengths[chosen],
            None if draft.entropies is None else draft.entropies[chosen],
            out.probs[chosen],
            accepted.tokens[chosen],
            accepted.lengths[chosen],
            emitted[chosen],
        )
        cycle = Cycle(drafter=self.drafter, places=places)
        for row, slot in enumerate(slots):
            self._cycles[slot].append((cycle, row))

    def _index(self, device: torch.device) -> Tensor | slice:
        """Return the index of the traced slots in order; neighbours as a slice, which copies nothing."""
        if self._chosen is None:
            slots = sorted(self._cycles)
            first, end = slots[0], slots[-1] + 1
            if end - first == len(slots):
                self._chosen = slice(first, end)
            else:  # assembled on the device: a copy from the host would wait for it
                numbers = torch.arange(end, device=device)
                self._chosen = torch.cat([numbers[slot : slot + 1] for slot in slots])
        return self._chosen


# ---- places


PLAIN, ACCEPTED, RECOVERED, BONUS, UNKNOWN = range(len(VERDICTS))
CHUNK = 128  # tokens of a vocabulary whose likeliest is looked for first; usual vocabularies are multiples of it


def condensed(
    draft: Tensor,
    q: Tensor | None,
    made: Tensor | None,
    entropies: Tensor | None,
    p: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    emitted: Tensor,
) -> Tensor:
    """Return the places [R, K + 1, 7 + 4M] of a cycle of R rows, see the module docstring.

    Args:
        draft: a chain of K drafts [R, K].
        q: the distributions that they were drawn from [R, K, V]; None: one-hot.
        made: drafts that count [R]; None: all.
        entropies: of q [R, K]; None: not known yet.
        p: the target's distributions [R, K + 1, V].
        tokens: as accepted [R, K + 1]; in a tree an accepted token may be a sibling of its draft.
        lengths: accepted drafts [R].
        emitted: tokens that count [R].
    """
    drafts, top = draft.shape[1], min(TOP, p.shape[-1])
    steps = torch.arange(drafts + 1, device=p.device)
    made = torch.full_like(lengths, drafts) if made is None else made
    tested, stands = steps < made[:, None], steps < lengths[:, None]
    last = torch.where(made == 0, PLAIN, torch.where(lengths < made, RECOVERED, BONUS))
    verdicts = torch.where(stands, ACCEPTED, last[:, None]).where(steps < emitted[:, None], NONE)
    drafted = torch.where(stands, tokens, pad(draft, (0, 1)))
    if q is None:
        ones = p.new_ones(draft.shape)
        overlap = p[:, :drafts].gather(-1, draft[..., None])[..., 0]
        of_draft = torch.stack([ones, overlap, 0 * ones, ones, *[0 * ones] * (top - 1)], -1)
        ids = pad(draft[..., None], (0, top - 1), value=NONE)
    else:
        of_token = q.gather(-1, drafted[:, :drafts, None])[..., 0]
        spread = entropy(q) if entropies is None else entropies
        ids, chances = likeliest(q, top)
        own = torch.stack([of_token, torch.minimum(p[:, :drafts], q).sum(-1), spread], -1)
        of_draft = torch.cat([own, chances], -1)
    # Drafts that were not tested have no numbers.
    of_draft = pad(of_draft, (0, 0, 0, 1)).where(tested[..., None], torch.nan)
    chance = p.gather(-1, drafted[..., None]).where(tested[..., None], torch.nan)
    ids = pad(ids, (0, 0, 0, 1)).where(tested[..., None], NONE)
    target_ids, target_chances = likeliest(p, top)
    whole = [verdicts[..., None], drafted.where(tested, NONE)[..., None], target_ids, ids]
    parts = [chance, of_draft[..., :2], entropy(p)[..., None], of_draft[..., 2:3], target_chances, of_draft[..., 3:]]
    return torch.cat([torch.cat(whole, -1).int(), torch.cat(parts, -1).float().view(torch.int32)], -1)


def likeliest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the M likeliest tokens of distributions [..., V], the likeliest first, and their probabilities [..., M].

    ``count`` is M. NONE stands for a token of probability 0. A large vocabulary is searched in chunks. The chunks with
    the M largest maxima hold the M tokens. On a CPU this takes a quarter of the time of ``topk`` over all.
    """
    vocabulary = probs.shape[-1]
    if vocabulary <= count * CHUNK:
        found, ids = probs.topk(count, dim=-1)
    else:
        beyond = -vocabulary % CHUNK
        chunks = (pad(probs, (0, beyond)) if beyond else probs).unflatten(-1, (-1, CHUNK))
        best = chunks.amax(-1).topk(count, dim=-1).indices
        held = chunks.gather(-2, best[..., None].expand(*best.shape, CHUNK)).flatten(-2)
        found, places = held.topk(count, dim=-1)
        ids = best.gather(-1, places // CHUNK) * CHUNK + places % CHUNK
    return ids.where(found > 0, NONE), found


def unknown(count: int, top: int) -> Trace:
    """Return a trace of ``count`` tokens without information; ``top``: columns of likeliest tokens."""
    missing, none = np.full(count, np.nan, dtype=np.float32), np.full(count, NONE, dtype=np.int32)
    return Trace(
        verdicts=np.full(count, UNKNOWN, dtype=np.int8),
        cycles=none,
        drafters=none.astype(np.int8),
        names=(),
        drafts=none,
        draft_target_probs=missing,
        draft_probs=missing,
        overlap=missing,
        target_entropy=missing,
        draft_entropy=missing,
        target_ids=np.full((count, top), NONE, dtype=np.int32),
        target_top=np.full((count, top), np.nan, dtype=np.float16),
        draft_ids=np.full((count, top), NONE, dtype=np.int32),
        draft_top=np.full((count, top), np.nan, dtype=np.float16),
    )


def unpacked(cycles: Sequence[Tensor], drafters: Sequence[str], count: int, top: int) -> Trace:
    """Return the trace of the first ``count`` tokens of a completion, in one copy off the device.

    ``cycles`` are the places [K + 1, 7 + 4M] of each cycle, ``drafters`` the drafter of each.
    """
    if not cycles:
        return unknown(0, top)
    table = torch.cat([*cycles]).cpu().numpy()
    widths = [len(places) for places in cycles]
    kept = np.flatnonzero(table[:, 0] != NONE)[:count]
    table, number = table[kept], np.repeat(np.arange(len(cycles), dtype=np.int32), widths)[kept]
    whole, parts = table[:, : 2 + 2 * top], np.ascontiguousarray(table[:, 2 + 2 * top :]).view(np.float32)
    drafts, chances = whole[:, 1].copy(), parts[:, 5:].astype(np.float16)
    names = tuple(dict.fromkeys(drafters[i] for i in np.unique(number[drafts != NONE])))
    drafter = np.array([names.index(name) if name in names else NONE for name in drafters], dtype=np.int8)
    return Trace(
        verdicts=whole[:, 0].astype(np.int8),
        cycles=number,
        drafters=np.where(drafts == NONE, NONE, drafter[number]).astype(np.int8),
        names=names,
        drafts=drafts,
        draft_target_probs=parts[:, 0].copy(),
        draft_probs=parts[:, 1].copy(),
        overlap=parts[:, 2].copy(),
        target_entropy=parts[:, 3].copy(),
        draft_entropy=parts[:, 4].copy(),
        target_ids=whole[:, 2 : 2 + top].copy(),
        target_top=chances[:, :top].copy(),
        draft_ids=whole[:, 2 + top :].copy(),
        draft_top=chances[:, top:].copy(),
    )

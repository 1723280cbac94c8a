"""Watches verification, and says of some requests how each of their tokens came about (``bebop.token_trace``).

What a cycle shows is condensed where it is, to a few numbers a place, and stays there until its request ends: a cycle
waits for nothing more than before. Rows that nobody asked about cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.sampling import entropy
from bebop.token_trace import NONE, TOP, VERDICTS, Trace, joined
from bebop.trajectory import Completion

PLAIN, ACCEPTED, RECOVERED, BONUS, UNKNOWN = range(len(VERDICTS))
CHUNK = 128  # tokens of a vocabulary whose likeliest is looked for first; usual vocabularies are multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What is kept of a cycle, of the R rows that are traced."""

    drafter: str
    # [R, K + 1, 7 + 4M] int32: verdict (NONE beyond the emitted ones), draft, M likeliest tokens of p and M of q; then
    # as the bits of a float32: p and q of the draft, overlap, entropies of p and of q, and p and q of those tokens.
    places: Tensor


class Tracer:
    """An ``Observer`` of cycles, which is told where requests come, move and end."""

    def __init__(self, drafter: str) -> None:
        """``drafter``: who is in charge now."""
        self.drafter = drafter
        self._cycles: dict[int, list[tuple[Cycle, int]]] = {}  # slot -> the cycles of its request, and its row in each
        self._chosen: Tensor | slice | None = None  # the slots as an index, until they change

    def follow(self, slot: int) -> None:
        """Trace the request that has come to a slot."""
        self._cycles[slot], self._chosen = [], None

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Requests go from slots to others, whose own have ended."""
        for source, target in zip(sources, targets, strict=True):
            if source in self._cycles:
                self._cycles[target], self._chosen = self._cycles.pop(source), None

    def end(self, slot: int, count: int, before: Completion | None, vocabulary: int) -> Trace | None:
        """The trace of an answer of ``count`` tokens that leaves a slot, if it is followed.

        ``before``: what it went on from; of tokens that came without a trace nothing is known.
        """
        if slot not in self._cycles:
            return None
        cycles, self._chosen, top = self._cycles.pop(slot), None, min(TOP, vocabulary)
        if before is None:
            return _trace(cycles, count, top)
        done = len(before.token_ids)
        return joined([before.trace or unknown(done, top), _trace(cycles, count - done, top)])

    def __call__(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        """See ``Observer``."""
        if not self._cycles:
            return
        slots, chosen = sorted(self._cycles), self._index(rows.last.device)
        shown = Draft(
            tokens=draft.tokens[chosen],
            probs=None if draft.probs is None else draft.probs[chosen],
            lengths=None if draft.lengths is None else draft.lengths[chosen],
            entropies=None if draft.entropies is None else draft.entropies[chosen],
        )
        places = condensed(shown, out.probs[chosen], accepted.tokens[chosen], accepted.lengths[chosen], emitted[chosen])
        cycle = Cycle(drafter=self.drafter, places=places)
        for row, slot in enumerate(slots):
            self._cycles[slot].append((cycle, row))

    def _index(self, device: torch.device) -> Tensor | slice:
        """The slots in order; neighbours as a slice, which copies nothing."""
        if self._chosen is None:
            slots = sorted(self._cycles)
            together = slots[-1] - slots[0] + 1 == len(slots)
            self._chosen = slice(slots[0], slots[-1] + 1) if together else torch.tensor(slots, device=device)
        return self._chosen


def condensed(draft: Draft, p: Tensor, tokens: Tensor, lengths: Tensor, emitted: Tensor) -> Tensor:
    """``Cycle.places`` of R rows.

    Args:
        draft: a chain of K drafts.
        p: the target's distributions [R, K + 1, V].
        tokens: as accepted [R, K + 1]; one that stands may be a sibling of its draft, where that is of a tree.
        lengths: accepted drafts [R].
        emitted: tokens that count [R].
    """
    drafts, top = draft.tokens.shape[1], min(TOP, p.shape[-1])
    steps = torch.arange(drafts + 1, device=p.device)
    made = torch.full_like(lengths, drafts) if draft.lengths is None else draft.lengths
    tested, stands = steps < made[:, None], steps < lengths[:, None]
    last = torch.where(made == 0, PLAIN, torch.where(lengths < made, RECOVERED, BONUS))
    verdicts = torch.where(stands, ACCEPTED, last[:, None]).where(steps < emitted[:, None], NONE)
    drafted = torch.where(stands, tokens, pad(draft.tokens, (0, 1)))
    if draft.probs is None:  # one-hot
        ones = p.new_ones(draft.tokens.shape)
        overlap = p[:, :drafts].gather(-1, draft.tokens[..., None])[..., 0]
        of_draft = torch.stack([ones, overlap, 0 * ones, ones, *[0 * ones] * (top - 1)], -1)
        ids = pad(draft.tokens[..., None], (0, top - 1), value=NONE)
    else:
        q = draft.probs
        of_token = q.gather(-1, drafted[:, :drafts, None])[..., 0]
        spread = entropy(q) if draft.entropies is None else draft.entropies
        ids, chances = likeliest(q, top)
        own = torch.stack([of_token, torch.minimum(p[:, :drafts], q).sum(-1), spread], -1)
        of_draft = torch.cat([own, chances], -1)
    # Of what was not tested, nothing.
    of_draft = pad(of_draft, (0, 0, 0, 1)).where(tested[..., None], torch.nan)
    chance = p.gather(-1, drafted[..., None]).where(tested[..., None], torch.nan)
    ids = pad(ids, (0, 0, 0, 1)).where(tested[..., None], NONE)
    target_ids, target_chances = likeliest(p, top)
    whole = [verdicts[..., None], drafted.where(tested, NONE)[..., None], target_ids, ids]
    parts = [chance, of_draft[..., :2], entropy(p)[..., None], of_draft[..., 2:3], target_chances, of_draft[..., 3:]]
    return torch.cat([torch.cat(whole, -1).int(), torch.cat(parts, -1).float().view(torch.int32)], -1)


def likeliest(probs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The M likeliest tokens of distributions [..., V], the likeliest first, and their probabilities [..., M].

    ``count``: M. NONE stands for a token of probability 0. A large vocabulary is searched in chunks, those with the M
    largest maxima hold them: that takes a CPU a quarter of the time of ``topk`` over all.
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
    """Of ``count`` tokens of which nothing is known; ``top``: columns of likeliest tokens."""
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


def _trace(cycles: Sequence[tuple[Cycle, int]], count: int, top: int) -> Trace:
    """The first ``count`` tokens of the cycles, each with the row that it is in; one copy off the device."""
    if not cycles:
        return unknown(0, top)
    widths = [cycle.places.shape[1] for cycle, _ in cycles]
    table = torch.cat([cycle.places[row] for cycle, row in cycles]).cpu().numpy()
    kept = np.flatnonzero(table[:, 0] != NONE)[:count]
    table, number = table[kept], np.repeat(np.arange(len(cycles), dtype=np.int32), widths)[kept]
    whole, parts = table[:, : 2 + 2 * top], np.ascontiguousarray(table[:, 2 + 2 * top :]).view(np.float32)
    drafts, chances = whole[:, 1].copy(), parts[:, 5:].astype(np.float16)
    own = [cycle.drafter for cycle, _ in cycles]
    names = tuple(dict.fromkeys(own[i] for i in np.unique(number[drafts != NONE])))
    drafter = np.array([names.index(name) if name in names else NONE for name in own], dtype=np.int8)
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

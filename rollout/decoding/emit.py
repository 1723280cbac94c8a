"""What becomes of a cycle's tokens: where an answer ends, what is written down of it, and what is counted."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.kernels.verify import one_hot
from bebop.rollout.decoding.base import Accepted, Draft, Rows
from bebop.rollout.decoding.sampling import entropy
from bebop.trajectory import MEASURED


def end(rows: Rows, accepted: Accepted) -> tuple[Tensor, Tensor]:
    """How many of the tokens count [B] and who is done [B]: a stop token or the limit cuts the rest off."""
    slots, batch, tokens = rows.slots, rows.batch, accepted.tokens
    stops = (tokens[..., None] == slots.stops[:batch, None]).any(-1)
    # Index of the first stop token, or the width where there is none.
    first = torch.where(stops.any(1), stops.int().argmax(1), tokens.shape[1])
    room = slots.limit[:batch] - slots.count[:batch]
    emitted = torch.minimum(torch.minimum(accepted.lengths, first) + 1, room)
    done = (first < emitted) | (emitted == room)
    return emitted, done


def write(rows: Rows, accepted: Accepted, probs: Tensor, version: int, exact: bool) -> None:
    """Append tokens with log p and version; what lies beyond the emitted ones is overwritten by the next cycle.

    Once a rule has said under which distribution it really draws, that log-prob stands beside log p.
    """
    slots, batch, tokens = rows.slots, rows.batch, accepted.tokens
    columns = slots.count[:batch, None] + torch.arange(tokens.shape[1], device=tokens.device)
    slots.tokens[:batch].scatter_(1, columns, tokens)
    logprobs = probs.gather(-1, tokens[..., None])[..., 0].log()
    slots.logprobs[:batch].scatter_(1, columns, logprobs)
    if accepted.logprobs is not None or slots.sampled is not None:
        unknown = logprobs if exact else torch.full_like(logprobs, torch.nan)
        slots.drawn()[:batch].scatter_(1, columns, unknown if accepted.logprobs is None else accepted.logprobs.float())
    slots.versions[:batch].scatter_(1, columns, version)
    slots.contexts[:batch].scatter_(1, columns, slots.oldest[:batch, None].expand_as(tokens))


def measure(
    rows: Rows,
    draft: Draft,
    accepted: Accepted,
    counts: Mapping[str, Tensor],
    probs: Tensor,
    emitted: Tensor,
    everything: bool,
) -> None:
    """Add this cycle to the sums over the positions that were reached (and not cut off by the end of the answer).

    ``counts`` [B, K]: what the system's parts say by name; ``everything``: overlap and entropies beside them.
    """
    drafts = draft.tokens.shape[1]
    steps = torch.arange(drafts, device=emitted.device)
    reached = steps < emitted[:, None]
    if draft.lengths is not None:
        reached &= steps < draft.lengths[:, None]
    sums = {"reached": reached, "accepted": steps < accepted.lengths[:, None]}
    found = dict(zip(MEASURED, _compare(draft, probs[:, :drafts]), strict=True)) if everything else {}
    sums |= {**found, **counts}
    values = torch.stack([value.double() for value in sums.values()], 1)
    rows.slots.record([*sums], torch.where(reached[:, None], values, 0.0), emitted)


def _compare(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap, p(argmax q) and both entropies [B, K]: what watching costs in a cycle."""
    if draft.probs is None:
        chance = p.gather(-1, draft.tokens[..., None])[..., 0]
        return chance, chance, torch.zeros_like(chance), entropy(p)
    best = draft.probs.argmax(-1, keepdim=True)
    overlap = torch.minimum(p, draft.probs).sum(-1)
    own = entropy(draft.probs) if draft.entropies is None else draft.entropies
    return overlap, p.gather(-1, best)[..., 0], own, entropy(p)


def seen_at(rows: Rows, draft: Draft, ways: Tensor | None = None) -> Tensor | None:
    """Tokens that penalties see at each verified position [B, K + 1, V]: the context and the drafts before it.

    ``ways`` [B, K, K]: of a tree, the nodes on the way to each, itself included.
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
    """Add the emitted tokens of each row to what penalties see."""
    if rows.seen is None:
        return
    counts = torch.arange(tokens.shape[1], device=tokens.device) < emitted[:, None]
    # Beyond the emitted ones the first token stands in: it is emitted anyway.
    rows.seen.scatter_(1, torch.where(counts, tokens, tokens[:, :1]), True)

"""One decoding cycle for all active rows, whatever the system: draft, verify, accept, emit, follow."""

import torch
from torch import Tensor

from bebop.kernels.uniforms import uniforms
from bebop.rollout.decoding.protocols import Draft, DraftLength, System, Verdict
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.target import Target


@torch.inference_mode()
def cycle(runner: Target, system: System, length: DraftLength, version: int, measure: bool) -> Tensor:
    """Advance the runner's first B slots by one cycle; returns which rows are done [B] (bool).

    ``version`` is the weight version written beside each token; ``measure`` adds overlap and entropies to the stats.
    """
    slots, batch = runner.slots, runner.batch
    drafts = slots.sizes.drafts
    sampling = slots.sampling(batch)
    # Keyed by the length fed: a request draws the same numbers wherever and beside whomever it is decoded. For K
    # drafts, K to draw them, K to test them, one for the recovered token and one for the bonus.
    random = uniforms(slots.seed[:batch], slots.fed[:batch], 2 * drafts + 2)
    draft = None
    if system.drafter is not None:
        draft = system.drafter.propose(runner, sampling, length, random[:, :drafts])
    last = slots.last[:batch, None]
    fed = last if draft is None else torch.cat([last, draft.tokens], 1)
    hidden, logits = runner.verify(fed)
    probs = sampling.probs(logits, _seen(runner, draft))
    # The last two have their place whatever this cycle drafted: its width is that of the longest draft in the batch.
    tests = random[:, drafts : drafts + fed.shape[1] - 1]
    verdict = system.rule.accept(_or_empty(draft, probs), probs, torch.cat([tests, random[:, 2 * drafts :]], 1))
    tokens = _emit(draft, verdict)
    emitted, done = _end(runner, tokens, verdict)
    _write(runner, tokens, probs, version)
    if draft is not None:
        _measure(runner, draft, verdict, probs, emitted, measure)
        length.observe(draft, verdict)
    runner.follow(tokens, hidden, emitted)
    if slots.seen is not None:
        _remember(runner, tokens, emitted)
    slots.work[:batch] += torch.tensor([1, 1, 0 if draft is None else draft.forwards + 1], device=slots.device)
    slots.fed[:batch] += emitted
    slots.count[:batch] += emitted
    slots.last[:batch] = tokens[torch.arange(batch, device=slots.device), emitted - 1]
    return done


def _or_empty(draft: Draft | None, probs: Tensor) -> Draft:
    """The draft, or one of no tokens for rules that take none."""
    if draft is not None:
        return draft
    none = probs.new_zeros(probs.shape[0], 0)
    return Draft(tokens=none.long(), probs=none[..., None], entropies=none, lengths=None, forwards=0)


def _emit(draft: Draft | None, verdict: Verdict) -> Tensor:
    """Tokens [B, K + 1]: the drafts with the next token in place of the first that was not accepted."""
    if draft is None:
        return verdict.next_token[:, None]
    tokens = torch.cat([draft.tokens, verdict.next_token[:, None]], 1)
    return tokens.scatter(1, verdict.accepted[:, None], verdict.next_token[:, None])


def _end(runner: Target, tokens: Tensor, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """How many of the tokens count [B] and who is done [B]: a stop token or the limit cuts the rest off."""
    slots, batch = runner.slots, runner.batch
    stops = (tokens[..., None] == slots.stops[:batch, None]).any(-1)
    # Index of the first stop token, or the width where there is none.
    first = torch.where(stops.any(1), stops.int().argmax(1), tokens.shape[1])
    room = slots.limit[:batch] - slots.count[:batch]
    emitted = torch.minimum(torch.minimum(verdict.accepted, first) + 1, room)
    done = (first < emitted) | (emitted == room)
    return emitted, done


def _write(runner: Target, tokens: Tensor, probs: Tensor, version: int) -> None:
    """Append tokens with log p and version; what lies beyond the emitted ones is overwritten by the next cycle."""
    slots, batch = runner.slots, runner.batch
    columns = slots.count[:batch, None] + torch.arange(tokens.shape[1], device=tokens.device)
    slots.tokens[:batch].scatter_(1, columns, tokens)
    slots.logprobs[:batch].scatter_(1, columns, probs.gather(-1, tokens[..., None])[..., 0].log())
    slots.versions[:batch].scatter_(1, columns, torch.full_like(tokens, version))
    slots.contexts[:batch].scatter_(1, columns, slots.oldest[:batch, None].expand_as(tokens))


def _measure(runner: Target, draft: Draft, verdict: Verdict, probs: Tensor, emitted: Tensor, everything: bool) -> None:
    """Add this cycle to the sums over the positions that were reached (and not cut off by the end of the answer)."""
    drafts = draft.tokens.shape[1]
    steps = torch.arange(drafts, device=emitted.device)
    reached = steps < emitted[:, None]
    if draft.lengths is not None:
        reached &= steps < draft.lengths[:, None]
    accepted = steps < torch.minimum(verdict.accepted, emitted)[:, None]
    rows = [reached.double(), accepted.double()]
    if everything:
        rows += [torch.where(reached, value, 0.0).double() for value in _compare(draft, probs[:, :drafts])]
    runner.slots.record(torch.stack(rows, 1), emitted)


def _compare(draft: Draft, p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Overlap, p(argmax q) and both entropies [B, K]: what watching costs in a cycle."""
    best = draft.probs.argmax(-1, keepdim=True)
    overlap = torch.minimum(p, draft.probs).sum(-1)
    return overlap, p.gather(-1, best)[..., 0], draft.entropies, entropy(p)


def _seen(runner: Target, draft: Draft | None) -> Tensor | None:
    """Tokens that penalties see at each verified position [B, K + 1, V]: the context and the drafts before it."""
    seen = runner.seen()
    if seen is None or draft is None:
        return None if seen is None else seen[:, None]
    rows = [seen]
    for step in range(draft.tokens.shape[1]):
        rows.append(rows[-1].scatter(1, draft.tokens[:, step : step + 1], True))
    return torch.stack(rows, 1)


def _remember(runner: Target, tokens: Tensor, emitted: Tensor) -> None:
    """Add the emitted tokens of each row to what penalties see."""
    slots = runner.slots
    assert slots.seen is not None
    counts = torch.arange(tokens.shape[1], device=tokens.device) < emitted[:, None]
    # Beyond the emitted ones the first token stands in: it is emitted anyway.
    slots.seen[: runner.batch].scatter_(1, torch.where(counts, tokens, tokens[:, :1]), True)

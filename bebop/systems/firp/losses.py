"""Training losses of pseudo hidden states (SPEC 3.2), and ranks of the actual next tokens in their drafts.

Step k at anchor i is compared with the model's distribution at position i + k, which has read the tokens in between.
The model's own states are read once (``network.read_text``): real states see no pseudo state.

Drafts of one anchor do not depend on one another. At temperature 0 a draft is accepted if it is the actual next token.
So the ranks of the tokens of one plain completion determine the acceptance of any tree of drafts (SPEC 3.3).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.config.tree_shape import reached
from bebop.kernels.linear_losses import CHUNK_ROWS, linear_draft_loss, linear_e2e_tv_loss
from bebop.model.backbone import Policy, shared_tables
from bebop.model.mtp import gather_rows
from bebop.systems.firp.network import PseudoStates, RealText, pseudo_beside, read_text
from bebop.trainer.chains import TokenRow, random_anchors
from bebop.trainer.objectives import WHOLE, Sampling

MEASURES = ("overlap", "kl", "agreement")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRow:
    """Prompt and completion with the states of a finished pass of the model."""

    real: RealText  # of this text alone
    answer: int  # tokens at the end that are the completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchored:
    """Batch of texts with anchors from which tokens are predicted."""

    real: RealText  # of B texts
    anchors: Tensor  # [B, A] positions, from the last token of the prompt on
    ends: Tensor  # [B] tokens of each text

    def mask(self, steps: int) -> Tensor:
        """Return a mask [B, A, steps] of the predicted tokens i + 2..i + steps + 1 that lie within the text."""
        places = self.anchors[..., None] + torch.arange(2, steps + 2, device=self.anchors.device)
        return places < self.ends[:, None, None]


def read_rows(policy: Policy, layers: Sequence[int], rows: Sequence[TokenRow]) -> list[ReadRow]:
    """Return the inputs of pseudo states that enter after ``layers``, for some completions."""
    read = read_text(policy, layers, [row.token_ids for row in rows])
    return [ReadRow(real=real, answer=len(row.answer)) for real, row in zip(read, rows, strict=True)]


def lay_out(rows: Sequence[ReadRow], anchors: int, seed: int) -> Anchored:
    """Place up to ``anchors`` anchors per text at random; a text with fewer places has some beyond its end."""
    device = rows[0].real.hidden.device
    ends = torch.tensor([row.real.hidden.shape[1] for row in rows])
    chosen = random_anchors(ends, torch.tensor([row.answer for row in rows]), anchors, seed)
    return Anchored(real=RealText.beside([row.real for row in rows]), anchors=chosen.to(device), ends=ends.to(device))


def drafts_and_targets(policy: Policy, network: PseudoStates, texts: Anchored, steps: int) -> tuple[Tensor, Tensor]:
    """Return pseudo states of the first ``steps`` and the model's states to compare with, both [B, A, steps, d]."""
    last = texts.real.hidden.shape[1] - 1
    anchors = texts.anchors.clamp_max(last)
    drafts, _ = pseudo_beside(policy, network, texts.real, anchors, steps)
    places = (anchors[..., None] + torch.arange(1, steps + 1, device=anchors.device)).clamp_max(last)
    return drafts, gather_rows(texts.real.hidden, places.flatten(1)).view_as(drafts)


def firp_loss(
    policy: Policy,
    network: PseudoStates,
    texts: Anchored,
    step: int,
    *,
    kind: str,
    sampling: Sampling = WHOLE,
) -> Tensor:
    """Return the mean loss of ``step`` (from 1) over the anchors whose predicted token lies in the text.

    Args:
        policy: the model, with a frozen backbone.
        network: receives the gradient, and only the matrix of this step if the others require none.
        texts: see ``lay_out``.
        step: k; steps 1..k are present.
        kind: a row of ``kernels/draft_losses.py`` that needs no labels, as "kl" or "tv"; or "e2e_tv", 1 - expected
            accepted drafts over k (SPEC Eq. 13), which weighs an anchor by the acceptance of the earlier steps.
        sampling: temperature of both distributions, and truncation of the target's.
    """
    _, weight = shared_tables(policy)
    mask = texts.mask(step)
    drafts, targets = drafts_and_targets(policy, network, texts, step)
    if kind == "e2e_tv":
        flat = (x.flatten(0, 1) for x in (drafts, targets, mask))
        draft, target, counted = flat
        return linear_e2e_tv_loss(draft, weight, target, weight, counted, **sampling.options())
    last = mask[..., -1]
    draft, target = drafts[:, :, -1][last], targets[:, :, -1][last]
    losses = linear_draft_loss(draft, weight, target, weight, kind=kind, **sampling.options()).loss
    return losses.sum() / last.sum().clamp_min(1)


@torch.no_grad()
def sums(
    policy: Policy, network: PseudoStates, rows: Sequence[TokenRow], sampling: Sampling = WHOLE
) -> tuple[Tensor, Tensor]:
    """Return sums [R, K, 3] of ``MEASURES`` over all places of some completions, by step, and the number of places [R,
    K].

    Overlap is the acceptance of rejection sampling, agreement the share of places with the same likeliest token.
    """
    steps, (_, weight) = len(network.layers), shared_tables(policy)
    found, places = torch.zeros(len(rows), steps, 3), torch.zeros(len(rows), steps)
    for first in range(0, len(rows), 16):
        part = rows[first : first + 16]
        texts = lay_out(read_rows(policy, network.layers, part), max(len(row.answer) for row in part), 0)
        drafts, targets = drafts_and_targets(policy, network, texts, steps)
        mask = texts.mask(steps)
        row, _, step = mask.nonzero(as_tuple=True)
        draft, target = drafts[mask], targets[mask]
        out = linear_draft_loss(draft, weight, target, weight, kind="kl", **sampling.options())
        chunks = zip(*(x.split(CHUNK_ROWS["cpu"]) for x in (draft, target)), strict=True)
        same = torch.cat([policy.logits(a).argmax(-1) == policy.logits(b).argmax(-1) for a, b in chunks])
        numbers = torch.stack([out.alpha, out.loss, same.to(out.alpha)], -1).float().cpu()
        index = (row.cpu() + first, step.cpu())
        found.index_put_(index, numbers, accumulate=True)
        places.index_put_(index, torch.ones(len(numbers)), accumulate=True)
    return found, places


# ---- ranks of the actual next tokens


BEYOND = -1  # rank beyond the end of the text

# Real states and anchors [B,A] -> logits [B,A,K,V] of the tokens 2..K + 1 places later.
Drafts = Callable[[RealText, Tensor], Tensor]


def drafts_of(policy: Policy, network: PseudoStates) -> Drafts:
    """Return the function that computes draft logits from pseudo states."""

    def logits(real: RealText, anchors: Tensor) -> Tensor:
        return policy.logits(pseudo_beside(policy, network, real, anchors, len(network.layers))[0])

    return logits


@torch.no_grad()
def token_ranks(
    drafts: Drafts, rows: Sequence[TokenRow], read: Sequence[RealText], batch: int = 16
) -> list[list[list[int]]]:
    """Return the ranks [T][K] of the actual tokens in the drafts of each step, for every row and place of its
    completion.

    Place e is drafted when e tokens of the completion are known: the anchor is the token before the newest. ``read``:
    the rows (with prompts of two tokens or more), read for the layers of ``drafts``. Beyond the text the rank is
    ``BEYOND``.
    """
    assert all(len(row.prompt) > 1 for row in rows), "the first cycle drafts from the token before the last"
    found: list[list[list[int]]] = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        real = RealText.beside(read[first : first + batch])
        length, device = real.hidden.shape[1], real.hidden.device
        places = torch.arange(max(len(row.answer) for row in part), device=device)
        anchors = torch.tensor([len(row.prompt) - 2 for row in part], device=device)[:, None] + places
        ids = torch.zeros(len(part), length, dtype=torch.long, device=device)
        for i, row in enumerate(part):
            ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids, device=device)
        ends = torch.tensor([len(row.token_ids) for row in part], device=device)
        # The logits of all drafts of long completions would take gigabytes.
        pieces = anchors.split(max(1, CHUNK_ROWS["cpu"] // len(part)), 1)
        ranks = torch.cat([_ranks(drafts, real, piece, ids, ends) for piece in pieces], 1)
        found += [ranks[i, : len(row.answer)].tolist() for i, row in enumerate(part)]
    return found


def _ranks(drafts: Drafts, real: RealText, anchors: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
    """Return the ranks [B, A, K] of the actual tokens in the drafts at anchors [B, A] of texts ``ids`` [B, L]."""
    last = ids.shape[1] - 1
    logits = drafts(real, anchors.clamp_max(last))
    ahead = anchors[..., None] + torch.arange(2, logits.shape[2] + 2, device=ids.device)
    tokens = ids.gather(1, ahead.clamp_max(last).flatten(1)).view_as(ahead)[..., None]
    own = logits.gather(-1, tokens)
    # Of equal logits, which bfloat16 often has, the first is drafted.
    earlier = torch.arange(logits.shape[-1], device=ids.device) < tokens
    ranks = ((logits > own) | ((logits == own) & earlier)).sum(-1)
    return ranks.masked_fill(ahead >= ends[:, None, None], BEYOND)


def cycles(ranks: Sequence[Sequence[int]], shape: Collection[tuple[int, ...]]) -> int:
    """Return the number of cycles that write a completion with these ranks [T][K], each with a tree of this shape."""
    place, count = 0, 0
    while place < len(ranks):
        place += 1 + reached(shape, ranks[place])
        count += 1
    return count

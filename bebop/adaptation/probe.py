"""Draft quality of a head on given text, token by token, without decoding: every head sees the same text.

Text sampled from the target itself makes the estimate of the expected accept length unbiased (SPEC 0.6, last form).
A greedy draft (target-only) is accepted where the text holds the head's most likely token, as P(y) = p(y).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.kernels.stats import pair_stats
from bebop.kernels.truncation import truncate_
from bebop.metrics.intervals import Interval, ratio
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow, chain_rows, spaced
from bebop.trainer.objectives import Sampling, Steps, unroll

Array = NDArray[np.float64]
NUMBERS = ("overlap", "target_only", "draft_entropy", "target_entropy", "alpha_p_gt_q", "alpha_q_ge_p", "kl_pq")
CHUNK = 1024  # steps whose logits are in memory at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Numbers of n anchors with K steps each, NaN where a step does not exist."""

    row: NDArray[np.int64]  # [n] number of the anchor's text
    place: NDArray[np.int64]  # [n] index in the completion of the token that step 1 stands for
    task: NDArray[np.str_]  # [n]
    numbers: dict[str, Array]  # each [n, K]; see NUMBERS
    accept: Array  # [n] unbiased estimate of accepted drafts + 1, sampled drafts
    accept_greedy: Array  # [n] the same for greedy drafts
    # [n, K] unbiased estimates of the probability that a step is verified, 0 for no step; empty: not computed
    reached: Array = field(default_factory=lambda: np.zeros((0, 0)))
    reached_greedy: Array = field(default_factory=lambda: np.zeros((0, 0)))

    def accept_length(self, greedy: bool = False) -> Interval:
        """Return the mean accept length over anchors, bootstrapped over texts.

        It is close to the accept length of decoding, whose cycles start at other places.
        """
        return self.mean(self.accept_greedy if greedy else self.accept)

    def mean(self, values: Array) -> Interval:
        """Return the mean of values [n], one an anchor, bootstrapped over texts; NaN is left out."""
        known = np.isfinite(values)
        count = int(self.row.max()) + 1
        totals = np.bincount(self.row[known], values[known], count)
        return ratio(totals, np.bincount(self.row[known], minlength=count))


@torch.no_grad()
def probe(
    policy: Policy,
    rows: Sequence[TokenRow],
    depth: int,
    sampling: Sampling,
    batch: int = 64,
    states: Sequence[Tensor] | None = None,
    every: int = 1,
) -> Probe:
    """Probe the head of ``policy`` on rows of text, ``batch`` at a time.

    Args:
        states: the backbone's hidden states [L, d] of each row if they are known, as for many heads on one text.
        every: take only every so many-th anchor of a row (see ``spaced``), the same anchors at every call.
    """
    parts = []
    for each in unrolled(policy, rows, depth, sampling, batch, states, every):
        parts.append((each.row, each.place, *_numbers(each.steps, depth, each.chosen)))
    row, place, numbers, *estimates = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    sampled, greedy, reached, reached_greedy = (one.numpy().astype(float) for one in estimates)
    tasks = np.array([r.task for r in rows])
    table = {name: numbers[..., i].numpy().astype(float) for i, name in enumerate(NUMBERS)}
    return Probe(
        row=row.numpy(), place=place.numpy(), task=tasks[row.numpy()], numbers=table,
        accept=sampled, accept_greedy=greedy, reached=reached, reached_greedy=reached_greedy,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled:
    """A head's steps on some rows, and the n anchors with at least one step."""

    row: Tensor  # [n] int64
    place: Tensor  # [n] int64, as in ``Probe``
    steps: Steps  # [B, A, ...]
    chosen: Tensor  # [B, A] bool: the n anchors, in order


@torch.no_grad()
def unrolled(
    policy: Policy,
    rows: Sequence[TokenRow],
    depth: int,
    sampling: Sampling,
    batch: int = 64,
    states: Sequence[Tensor] | None = None,
    every: int = 1,
) -> Iterator[Unrolled]:
    """Yield the unrolled steps of a head, ``batch`` rows at a time; ``probe`` and other measurements read them."""
    assert policy.mtp is not None
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        layout = spaced(chain_rows(some, depth, policy.device), every, seed=0)
        if int(layout.steps.max()) == 0:
            continue
        if states is None:
            positions = torch.arange(layout.token_ids.shape[1], device=policy.device).expand_as(layout.token_ids)
            hidden = policy.hidden(layout.token_ids, positions, CausalContext())
        else:
            hidden = pad_sequence(list(states[start : start + batch]), batch_first=True)
        weight = policy.backbone.get_output_embeddings().weight
        steps = unroll(policy.mtp, policy.embed(layout.token_ids), hidden, weight, layout, sampling)
        first = torch.tensor([len(row.prompt) for row in some], device=policy.device)
        row = torch.arange(start, start + len(some), device=policy.device)[:, None].expand_as(layout.anchors)
        chosen = layout.steps > 0
        place = (layout.anchors + 2 - first[:, None])[chosen]
        yield Unrolled(row=row[chosen], place=place, steps=steps, chosen=chosen)


def _numbers(steps: Steps, depth: int, chosen: Tensor) -> tuple[Tensor, ...]:
    """Return the numbers of the n anchors that have a step.

    They are NUMBERS [n, depth, len], the sampled and the greedy estimate of the accept length, each [n], and the
    sampled and the greedy probability that a step is reached, each [n, depth].
    """
    mask, tokens = steps.mask[chosen], steps.tokens[chosen]  # [n, K]
    stats, log_ratio, hit = _pairs(steps.draft[chosen][mask], steps.target[chosen][mask], tokens[mask], steps)
    shape = (*mask.shape[:1], depth)
    where = torch.nn.functional.pad(mask, (0, depth - mask.shape[1]))

    def spread(values: Tensor, blank: float) -> Tensor:
        return torch.full(shape, float(blank), device=values.device).masked_scatter(where, values.float())

    ratio_y, overlap, greedy = spread(log_ratio.clamp_max(0).exp(), 0), spread(stats["overlap"], 0), spread(hit, 0)
    before, before_greedy = (
        torch.cat([torch.ones_like(ok[:, :1]), ok[:, :-1]], 1).cumprod(1) * where for ok in (ratio_y, greedy)
    )
    table = torch.stack([spread(stats[name], float("nan")) for name in NUMBERS], -1)
    return table, 1 + (before * overlap).sum(1), 1 + greedy.cumprod(1).sum(1), before, before_greedy


def _pairs(draft: Tensor, target: Tensor, tokens: Tensor, steps: Steps) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return NUMBERS of m steps, log q(y) - log p(y) of the text's token y, and whether y is the head's top choice."""
    numbers: dict[str, list[Tensor]] = {name: [] for name in NUMBERS}
    log_ratio, hit = [], []
    for q_rows, p_rows, y in zip(draft.split(CHUNK), target.split(CHUNK), tokens.split(CHUNK), strict=True):
        q, p = (_logits(x, steps) for x in (q_rows, p_rows))
        pair = pair_stats(q, p)
        for name in NUMBERS:
            numbers[name].append(getattr(pair, name))
        q_log, p_log = (x.float().log_softmax(-1).gather(1, y[:, None])[:, 0] for x in (q, p))
        log_ratio.append(torch.where(p_log > -torch.inf, q_log - p_log, 0))  # p(y) = 0 is no data of this distribution
        hit.append((q.argmax(-1) == y).float())
    return {name: torch.cat(parts) for name, parts in numbers.items()}, torch.cat(log_ratio), torch.cat(hit)


def _logits(hidden: Tensor, steps: Steps) -> Tensor:
    """Return logits [m, V] of the distribution that rollouts sample with, which truncate draft and target alike."""
    sampling = steps.sampling
    return truncate_(hidden @ steps.weight.T / sampling.temperature, 1.0, sampling.target_top_p, sampling.target_top_k)

"""Evaluation of one head on given text: the numbers of ``bebop.adaptation.probe`` for several samplings from one set of
logits, and the acceptance of its drafts at separate draft temperatures.

With a vocabulary of 49,152 nearly all the time goes to two products with the language-model head and to passes over
their results. Products are therefore made once, and passes are few. Chains follow the text, as the probe's do. The text
is the target's own at temperature 1, so with q the draft's distribution at any temperature of its own,

    1 + sum over k of min(1, q_1/p_1)(y_1) ... min(1, q_{k-1}/p_{k-1})(y_{k-1}) * sum_v min(p_k, q_k)(v)

is an unbiased estimate of the accept length while the target's temperature is 1 (SPEC 0.6). A temperature of 0 is a
greedy draft: q has all its mass on its likeliest token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.probe import NUMBERS, Probe, unrolled
from bebop.errors import UserError
from bebop.kernels.truncation import truncate_
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling

Array = NDArray[np.float64]
Columns = dict[str, Tensor]  # numbers of m steps, each [m]
PRODUCT = 256  # steps whose logits exist at a time
ROWS = 4  # steps in one pass: few enough to stay in the processor's cache
LEAST = -70.0  # below the largest logit: e^-70 a token is negligible, and subnormal numbers are slow
NOTHING = -1e4  # log of a probability of 0, so that 0 times it is 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Acceptance of n chains of K steps with drafts at D temperatures of their own, while the target's is 1."""

    row: NDArray[np.int64]  # [n] as in ``Probe``
    place: NDArray[np.int64]  # [n]
    task: NDArray[np.str_]  # [n]
    temperatures: tuple[float, ...]  # D
    overlap: Array  # [n, K, D] acceptance of a draft; NaN where there is no step
    accept: Array  # [n, D] unbiased estimate of accepted drafts + 1


@torch.no_grad()
def look(
    policy: Policy,
    rows: Sequence[TokenRow],
    depth: int,
    samplings: Sequence[Sampling],
    states: Sequence[Tensor] | None = None,
    every: int = 1,
    drafts: Sequence[float] = (),
    batch: int = 8,
) -> tuple[list[Probe], Drafts]:
    """Return a ``Probe`` for each sampling, and the chains at each temperature of ``drafts``.

    The other arguments are those of ``probe``.

    Raises:
        UserError: None of the requested chains exists.
    """
    kept: list[list[dict[str, Array]]] = [[] for _ in samplings]
    cold: list[dict[str, Array]] = []
    row, place = [], []
    for each in unrolled(policy, rows, depth, Sampling(), batch, states, every):
        row.append(each.row.numpy())
        place.append(each.place.numpy())
        mask = each.steps.mask[each.chosen]
        draft, target, tokens = (getattr(each.steps, name)[each.chosen][mask] for name in ("draft", "target", "tokens"))
        found, own = _columns(draft, target, tokens, each.steps.weight, samplings, drafts)
        for parts, columns in zip(kept, found, strict=True):
            parts.append(_spread(columns, mask, depth))
        cold.append(_spread(own, mask, depth))
    if not row:
        raise UserError(f"no chain to look at: each {every}-th of {len(rows)} answers, and none is long enough")
    anchor = {"row": np.concatenate(row), "place": np.concatenate(place)}
    anchor["task"] = np.array([one.task for one in rows])[anchor["row"]]
    table = {f"{name} {t}": _joined(cold, f"{name} {t}") for t in drafts for name in ("overlap", "ratio")}
    chains = [accepted(table[f"ratio {t}"], table[f"overlap {t}"]) for t in drafts]
    shape = (len(anchor["row"]), depth, 0)
    return [_probe(anchor, parts) for parts in kept], Drafts(
        **anchor,
        temperatures=tuple(drafts),
        overlap=np.stack([table[f"overlap {t}"] for t in drafts], -1) if drafts else np.zeros(shape),
        accept=np.stack(chains, -1) if chains else np.zeros(shape[::2]),
    )


def accepted(ratio: Array, overlap: Array) -> Array:
    """Return the estimate of the accept length [n].

    ``ratio`` is min(1, q/p) of the text's token and ``overlap`` the acceptance of a draft. Both are [n, K], and NaN
    where there is no step.
    """
    before = np.concatenate([np.ones_like(ratio[:, :1]), np.nan_to_num(ratio)[:, :-1]], 1).cumprod(1)
    total: Array = 1 + (before * np.nan_to_num(overlap)).sum(1)
    return total


def _probe(anchor: Mapping[str, NDArray[np.generic]], parts: Sequence[Mapping[str, Array]]) -> Probe:
    numbers = {name: _joined(parts, name) for name in NUMBERS}
    hits = np.nan_to_num(_joined(parts, "hit"))
    return Probe(
        **anchor,  # type: ignore[arg-type]
        numbers=numbers,
        accept=accepted(_joined(parts, "ratio"), numbers["overlap"]),
        accept_greedy=1 + hits.cumprod(1).sum(1),
    )


def _joined(parts: Sequence[Mapping[str, Array]], name: str) -> Array:
    return np.concatenate([part[name] for part in parts])


def _spread(columns: Columns, mask: Tensor, depth: int) -> dict[str, Array]:
    """Return the numbers of the steps [m] at their places [n, K], NaN elsewhere."""
    where, found = mask.numpy(), {}
    for name, values in columns.items():
        found[name] = np.full((len(where), depth), np.nan)
        found[name][:, : where.shape[1]][where] = values.numpy()
    return found


# ---- numbers of steps


def _columns(
    draft: Tensor,
    target: Tensor,
    tokens: Tensor,
    weight: Tensor,
    samplings: Sequence[Sampling],
    drafts: Sequence[float],
) -> tuple[list[Columns], Columns]:
    """Return the numbers of m steps for each sampling, and for each temperature of the draft alone.

    The inputs are hidden states [m, d] and the text's tokens [m].
    """
    kept: list[list[Columns]] = [[] for _ in samplings]
    cold: list[Columns] = []
    for q, p, y in zip(draft.split(PRODUCT), target.split(PRODUCT), tokens.split(PRODUCT), strict=True):
        q, p = q @ weight.T, p @ weight.T
        first = q.argmax(-1)  # the same for every sampling
        for start in range(0, len(y), ROWS):
            a, b, label, top = (column[start : start + ROWS] for column in (q, p, y, first))
            for parts, sampling in zip(kept, samplings, strict=True):
                parts.append(_pair(a, b, label, top, sampling))
            if drafts:
                cold.append(_cold(a, b, label, top, drafts))
    return [_together(parts) for parts in kept], _together(cold)


def _together(parts: Sequence[Columns]) -> Columns:
    return {name: torch.cat([part[name] for part in parts]) for name in (parts[0] if parts else ())}


def _parts(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Return z [m, V], the logits minus their maximum, with e^z and the sum of e^z [m, 1]."""
    z = logits - logits.amax(-1, keepdim=True)
    if sampling.temperature != 1:
        z.div_(sampling.temperature)
    if sampling.target_top_p < 1 or sampling.target_top_k > 0:
        z = truncate_(z, 1.0, sampling.target_top_p, sampling.target_top_k).clamp_min_(NOTHING)
    mass = z.clamp_min(LEAST).exp_()
    return z, mass, mass.sum(-1, keepdim=True)


def _pair(q_logits: Tensor, p_logits: Tensor, tokens: Tensor, first: Tensor, sampling: Sampling) -> Columns:
    """Return NUMBERS of some steps, min(1, q/p) of the text's token, and whether it is the draft's first choice."""
    (q_z, q, q_sum), (p_z, p, p_sum) = (_parts(logits, sampling) for logits in (q_logits, p_logits))
    lost = (
        ((p_z > NOTHING) & (q_z == NOTHING)).any(-1) if sampling.target_top_p < 1 or sampling.target_top_k > 0 else None
    )
    q_log, p_log = (total.log()[:, 0] for total in (q_sum, p_sum))
    q.div_(q_sum)
    p.div_(p_sum)
    draft_entropy, target_entropy = q_log - _dot(q, q_z), p_log - _dot(p, p_z)
    kl = q_log - _dot(p, q_z) - target_entropy
    label = tokens[:, None]
    overlap = torch.minimum(p, q).sum(-1)
    kept = _dot(p, (q >= p).to(p.dtype))
    log_ratio = q_z.gather(-1, label)[:, 0] - q_log - p_z.gather(-1, label)[:, 0] + p_log
    known = p_z.gather(-1, label)[:, 0] > NOTHING  # otherwise this distribution excludes the text's token
    return {
        "overlap": overlap, "target_only": p.gather(-1, first[:, None])[:, 0], "draft_entropy": draft_entropy,
        "target_entropy": target_entropy, "alpha_p_gt_q": overlap - kept, "alpha_q_ge_p": kept,
        "kl_pq": kl if lost is None else kl.masked_fill(lost, torch.inf),
        "ratio": torch.where(known, log_ratio, 0).clamp_max(0).exp(), "hit": (first == tokens).float(),
    }  # fmt: skip


def _cold(q_logits: Tensor, p_logits: Tensor, tokens: Tensor, first: Tensor, drafts: Sequence[float]) -> Columns:
    """Return acceptance and min(1, q/p) of the text's token for each temperature of the draft; the target's is 1."""
    (q_z, _, _), (p_z, p, p_sum) = (_parts(logits, Sampling()) for logits in (q_logits, p_logits))
    p.div_(p_sum)
    label = tokens[:, None]
    p_label = p_z.gather(-1, label)[:, 0] - p_sum.log()[:, 0]
    found = {}
    for t in drafts:
        if t == 0:
            found[f"overlap {t}"] = p.gather(-1, first[:, None])[:, 0]
            found[f"ratio {t}"] = (first == tokens).float()
            continue
        mass = (q_z / t).clamp_min_(LEAST).exp_()
        total = mass.sum(-1, keepdim=True)
        log_ratio = q_z.gather(-1, label)[:, 0] / t - total.log()[:, 0] - p_label
        found[f"overlap {t}"] = torch.minimum(mass.div_(total), p).sum(-1)
        found[f"ratio {t}"] = log_ratio.clamp_max(0).exp()
    return found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    found: Tensor = torch.linalg.vecdot(a, b)
    return found

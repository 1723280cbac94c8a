"""The likeliest tokens at every position of an answer, as a server's prefill gives them, and what can be told of them.

Servers give log-probs of the raw softmax, of the N likeliest tokens. The claim is another distribution where there is a
temperature or truncation; it is known as far as those N tokens decide it, and refused where they do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.errors import UserError
from bebop.trajectory import SamplingParams

# Of the sum over all tokens at a temperature: how well the part beyond the likeliest ones has to be known. A relative
# error of it in every row adds its square to ln E per token: 1e-8 over a hundred thousand tokens is nothing.
KNOWN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefilled:
    """Of one answer of T tokens; ``leading`` rows more come before the first token's."""

    ids: NDArray[np.int64]  # [leading + T, N] the likeliest first
    logprobs: NDArray[np.float64]  # [leading + T, N] of the raw softmax
    own: NDArray[np.float64]  # [T] of the answer's tokens
    leading: int


def likeliest(
    rows: Sequence[Sequence[tuple[int, float]]], own: Sequence[float], *, leading: int, top: int
) -> Prefilled:
    """From (token, log-prob) pairs of each position, in any order; what is beyond the ``top`` likeliest is dropped."""
    ranked = [sorted(row, key=lambda pair: -pair[1])[:top] for row in rows]
    if any(len(row) < top for row in ranked):
        raise UserError(f"the server gave {min(map(len, ranked))} of the {top} likeliest tokens that it was asked for")
    return Prefilled(
        ids=np.array([[token for token, _ in row] for row in ranked], dtype=np.int64).reshape(-1, top),
        logprobs=np.array([[value for _, value in row] for row in ranked], dtype=np.float64).reshape(-1, top),
        own=np.array(own, dtype=np.float64),
        leading=leading,
    )


def full(one: Prefilled, vocabulary: int) -> Tensor:
    """Log-probs [leading + T, V] in the order of ids, where all of them are there."""
    assert one.ids.shape[1] == vocabulary
    rows = torch.empty((len(one.ids), vocabulary), dtype=torch.float64)
    return rows.scatter_(1, torch.from_numpy(one.ids), torch.from_numpy(one.logprobs))


def processed(logprobs: Tensor, params: SamplingParams, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The claim over the N likeliest tokens and one column for all others [n, N + 1], and ln of its normaliser [n].

    ``logprobs`` [n, N]: of the raw softmax, the likeliest first. A token among the others has the log-prob raw / T
    less the normaliser, or none at all where truncation leaves nothing to them. ``UserError`` where the N do not decide
    the claim.
    """
    if params.repetition_penalty != 1.0:
        raise _beyond("repetition_penalty", params.repetition_penalty, logprobs.shape[1])
    weights = (logprobs / params.temperature).exp()
    count = logprobs.shape[1]
    cut = 0 < params.top_k <= count
    rest = torch.zeros(len(logprobs), dtype=logprobs.dtype) if cut else _rest(logprobs, params.temperature, vocabulary)
    if cut:
        weights[:, params.top_k :] = 0
    total = weights.sum(-1) + rest
    probs = weights / total[:, None]
    others = rest / total
    if params.top_k > count:
        raise _beyond("top_k", params.top_k, count)
    if params.top_p < 1:
        before = probs.cumsum(-1) - probs
        if bool(((probs.sum(-1) < params.top_p) & (others > 0)).any()):
            raise _beyond("top_p", params.top_p, count)
        probs, others = torch.where(before < params.top_p, probs, 0.0), torch.zeros_like(others)
    if params.min_p > 0:
        least = params.min_p * probs[:, :1]
        if bool(((probs[:, -1:] >= least)[:, 0] & (others > 0)).any()):
            raise _beyond("min_p", params.min_p, count)
        probs, others = torch.where(probs >= least, probs, 0.0), torch.zeros_like(others)
    kept = probs.sum(-1) + others
    return torch.cat([probs, others[:, None]], -1) / kept[:, None], total.log() + kept.log()


def _rest(logprobs: Tensor, temperature: float, vocabulary: int) -> Tensor:
    """Sum [n] over all other tokens of p^(1/T).

    At T = 1 it is what is missing to 1. Else it lies between that of the missing mass spread evenly and that of as few
    tokens as can hold it, none likelier than the last that is known; the mean is taken where these are near enough.
    """
    left = (1 - logprobs.exp().sum(-1)).clamp_min(0)
    others = vocabulary - logprobs.shape[1]
    if temperature == 1.0 or others == 0:
        return left if others else torch.zeros_like(left)
    power, last = 1 / temperature, logprobs[:, -1].exp()
    even = others * (left / others) ** power
    few = left / last * last**power
    known = (logprobs / temperature).exp().sum(-1)
    if bool(((even - few).abs() > 2 * KNOWN * known).any()):
        raise _beyond("temperature", temperature, logprobs.shape[1])
    return (even + few) / 2


def _beyond(name: str, value: float, count: int) -> UserError:
    return UserError(
        f"{name}={value:g} cannot be certified by the server's {count} likeliest tokens: use reference=model, or "
        "temperature=1 without truncation (and stress=0)"
    )

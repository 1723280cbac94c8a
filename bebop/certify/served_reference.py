"""A server's own prefill as the reference: the server computes log-probs of prompt and completion, teacher-forced.

It sees the effects of drafting and verification on completions, and nothing else. A server whose weights, caches or
attention are wrong in prefill, too, agrees with itself. Prefill and decoding are different kernels. In bf16 their
rounding alone moves log-probs, with the built-in model by 1e-3 in the median against single precision. SGLang promises
equal results with --enable-deterministic-inference.

Up to ``WHOLE`` tokens the reference asks for the whole vocabulary. For a larger one it asks for the likeliest tokens of
the raw softmax, and refuses claims that these do not decide before the first request, see ``processed``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig

from bebop.certify.answers import Answer, Block, make_block, seen
from bebop.certify.model_reference import BORDER, claimed, refuse_rounded_cuts
from bebop.certify.reference import LiveEngine
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.trajectory import SamplingParams

WHOLE = 1024  # the largest vocabulary that is requested whole at every position
LIKELIEST = 64  # tokens requested of a larger vocabulary; a server may allow fewer
# Allowed error of the part beyond the likeliest tokens, relative to the sum over all tokens at a temperature. An error
# in every row adds its square to ln E per token: 1e-8, which is negligible over a hundred thousand tokens.
KNOWN = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefilled:
    """The prefill of one completion of T tokens; ``leading`` more rows precede the first token's row."""

    ids: NDArray[np.int64]  # [leading + T, N] the likeliest first
    logprobs: NDArray[np.float64]  # [leading + T, N] of the raw softmax
    own: NDArray[np.float64]  # [T] of the completion's tokens
    leading: int


def likeliest(
    rows: Sequence[Sequence[tuple[int, float]]], own: Sequence[float], *, leading: int, top: int
) -> Prefilled:
    """Return the ``top`` likeliest of (token, log-prob) pairs at each position, in any order; the rest is dropped.

    Equally likely tokens come in the order of their ids.
    """
    ranked = [sorted(row, key=lambda pair: (-pair[1], pair[0]))[:top] for row in rows]
    if any(len(row) < top for row in ranked):
        raise UserError(f"the server gave {min(map(len, ranked))} of the {top} likeliest tokens that it was asked for")
    return Prefilled(
        ids=np.array([[token for token, _ in row] for row in ranked], dtype=np.int64).reshape(-1, top),
        logprobs=np.array([[value for _, value in row] for row in ranked], dtype=np.float64).reshape(-1, top),
        own=np.array(own, dtype=np.float64),
        leading=leading,
    )


class Prefilling(Protocol):
    """An engine whose prefill returns log-probs."""

    most: int | None  # largest number of likeliest tokens at a position; None: no limit

    def prefilled(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> list[Prefilled]:
        """Return the ``top`` likeliest tokens at every position of each (prompt, completion) pair."""


def make(config: CertifyConfig, engine: LiveEngine) -> "ServerReference":
    """Return the engine's prefill as a reference.

    Raises:
        UserError: The engine has no prefill, or it does not decide the claim. See ``refuse_rounded_cuts``, too: prefill
            and decoding round differently.
    """
    refuse_rounded_cuts(config)
    if not hasattr(engine, "prefilled"):
        raise UserError(f"reference=server is not possible with engine.name={engine.name}: choose model or none")
    vocabulary = int(AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True).vocab_size)
    served = getattr(engine, "vocabulary", vocabulary)
    if served != vocabulary:
        raise UserError(
            f"the server's vocabulary has {served} tokens, that of model.path={config.model.path!r} {vocabulary}: "
            "give the model that it serves"
        )
    found = ServerReference(engine, vocabulary)  # type: ignore[arg-type]
    hot, top_k = {config.sampling.temperature, config.stress or config.sampling.temperature}, config.sampling.top_k
    if found.top < vocabulary and top_k >= found.top:
        raise _beyond("top_k", top_k, found.top)
    if found.top < vocabulary and hot != {1.0} and not top_k:
        fewer = f" or sampling.top_k below {found.top}," if config.model.dtype == "float32" else ""
        raise UserError(
            f"reference=server knows {found.top} of {vocabulary} tokens at a position, and at temperature 1 alone: set "
            f"sampling.temperature=1 and stress=0,{fewer} or reference=model"
        )
    return found


class ServerReference:
    """A ``Reference`` over a server's own prefill."""

    name = "server"

    def __init__(self, engine: Prefilling, vocabulary: int, *, likeliest: int = LIKELIEST) -> None:
        """Set the number of tokens to request at a position.

        ``likeliest``: this number for a vocabulary larger than ``WHOLE``; the engine may allow fewer.
        """
        self.engine, self.vocabulary = engine, vocabulary
        wanted = vocabulary if vocabulary <= WHOLE else min(likeliest, vocabulary)
        self.top = min(wanted, engine.most or wanted)

    def describe(self) -> dict[str, Any]:
        """Return the engine of the prefill, the number of columns, and the faults that the reference cannot see."""
        return {
            "prefill of": getattr(self.engine, "name", type(self.engine).__name__),
            "columns": self.vocabulary if self.top == self.vocabulary else self.top + 1,
            "blind to": "whatever is wrong in the server's prefill, too: weights, attention, the model itself",
        }

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of all nonempty completions."""
        answers = [answer for answer in answers if len(answer.token_ids)]
        pairs = [(answer.prompt, answer.token_ids.tolist()) for answer in answers]
        prefilled = self.engine.prefilled(pairs, self.top) if pairs else []
        both = list(zip(answers, prefilled, strict=True))
        if self.top == self.vocabulary:
            parts = [self._whole(answer, one, params) for answer, one in both]
        else:
            parts = [self._likeliest(answer, one, params) for answer, one in both]
        return make_block(answers, parts, self.vocabulary)

    def _whole(self, answer: Answer, one: Prefilled, params: SamplingParams) -> dict[str, Tensor]:
        """Return the fields of a block in which every token has a column."""
        logprobs, tokens = full(one, self.vocabulary), torch.from_numpy(answer.token_ids)
        first = one.leading
        written = None
        if params.repetition_penalty != 1.0:
            written = seen([answer], None, self.vocabulary)
            written = torch.cat([written[:1].expand(first, -1), written])
        rows, near = claimed(logprobs, params, written)
        found = {
            "probs": rows[first:],
            "near": near[first:],
            "before": _shifted(rows, first),
            "cells": tokens,
            "logprobs": rows[first:].gather(1, tokens[:, None])[:, 0].log(),
        }
        if params.temperature != 1 or params.truncated:
            found["raw"] = logprobs[first:].exp()
        return found

    def _likeliest(self, answer: Answer, one: Prefilled, params: SamplingParams) -> dict[str, Tensor]:
        """Return the fields of a block over the likeliest tokens and all others; only earlier text selects them."""
        raw, ids = torch.from_numpy(one.logprobs), torch.from_numpy(one.ids)
        rows, normaliser, near = processed(raw, params, self.vocabulary)
        first, tokens = one.leading, torch.from_numpy(answer.token_ids)
        hit = ids[first:] == tokens[:, None]
        known = hit.any(1)
        cells = torch.where(known, hit.int().argmax(1), self.top)
        probs = rows[first:]
        at = probs.gather(1, cells[:, None])[:, 0]
        others = torch.from_numpy(one.own) / params.temperature - normaliser[first:]
        own = torch.where(known | (at == 0), at.log(), others)
        found = {
            "probs": probs,
            "near": near[first:],
            "before": _carried(rows, ids, first),
            "cells": cells,
            "logprobs": own,
            "ids": torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)[first:],
        }
        if params.temperature != 1 or params.truncated:
            rest = (1 - raw.exp().sum(-1, keepdim=True)).clamp_min(0)
            found["raw"] = torch.cat([raw.exp(), rest], -1)[first:]
        return found


def _shifted(rows: Tensor, first: int) -> Tensor:
    """Return the row before each row [T, M]; the first row of a text has none and stands in for it."""
    return rows[first - 1 : -1] if first else torch.cat([rows[:1], rows[:-1]])


def _carried(rows: Tensor, ids: Tensor, first: int) -> Tensor:
    """Return the row before each row, over the columns of the row itself [T, N + 1].

    A token that was not among the likeliest ones there has no probability of its own, and counts with all others.
    """
    before, theirs = _shifted(rows, first), _shifted(ids, first)
    same = ids[first:, :, None] == theirs[:, None, :]  # [T, N, N]
    named = (same * before[:, None, :-1]).sum(-1)
    return torch.cat([named, (1 - named.sum(-1, keepdim=True)).clamp_min(0)], -1)


# ---- the claim, from the likeliest tokens


def full(one: Prefilled, vocabulary: int) -> Tensor:
    """Return log-probs [leading + T, V] in the order of ids; ``one`` must hold the whole vocabulary."""
    assert one.ids.shape[1] == vocabulary
    rows = torch.empty((len(one.ids), vocabulary), dtype=torch.float64)
    return rows.scatter_(1, torch.from_numpy(one.ids), torch.from_numpy(one.logprobs))


def processed(logprobs: Tensor, params: SamplingParams, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the claim over the N likeliest tokens and one column for all others, and ln of its normaliser.

    The claim is [n, N + 1], the normaliser [n]. The third result [n] tells where rounding decides what a truncation
    keeps. ``logprobs`` [n, N] come from the raw softmax, the likeliest first. A token among the others has the log-prob
    raw / T minus the normaliser, or probability 0 where truncation removes all others. Top-k keeps all tokens that are
    as likely as the last one of the k, as vLLM does. Each truncation keeps the tokens within ``BORDER`` of its limit,
    and top-p those within ``BORDER`` of the last one that it keeps.

    Raises:
        UserError: The N tokens do not decide the claim. For top-k they do not where the last of them is as likely as
            the last one of the k: further tokens may be so, too.
    """
    if params.repetition_penalty != 1.0:
        raise _beyond("repetition_penalty", params.repetition_penalty, logprobs.shape[1])
    weights = (logprobs / params.temperature).exp()
    near = torch.zeros(len(logprobs), dtype=torch.bool)
    count = logprobs.shape[1]
    cut = params.top_k > 0
    if params.top_k > count:
        raise _beyond("top_k", params.top_k, count)
    rest = torch.zeros(len(logprobs), dtype=logprobs.dtype) if cut else _rest(logprobs, params.temperature, vocabulary)
    if cut:
        least = logprobs[:, params.top_k - 1 : params.top_k]
        if count < vocabulary and bool((logprobs[:, -1:] == least).any()):
            raise _beyond("top_k", params.top_k, count)
        weights[logprobs < least - BORDER] = 0
        near |= (weights > 0).sum(-1) > params.top_k
    total = weights.sum(-1) + rest
    probs = weights / total[:, None]
    others = rest / total
    if params.top_p < 1:
        before = probs.cumsum(-1) - probs
        if bool(((probs.sum(-1) < params.top_p + BORDER) & (others > 0)).any()):
            raise _beyond("top_p", params.top_p, count)
        least = probs.where(before < params.top_p + BORDER, 1.0).amin(-1, keepdim=True)
        probs, others = torch.where(probs >= least * (1 - BORDER), probs, 0.0), torch.zeros_like(others)
        near |= (probs > 0).sum(-1) > (before < params.top_p - BORDER).sum(-1).clamp_min(1)
    if params.min_p > 0:
        least = params.min_p * (1 - BORDER) * probs[:, :1]
        near |= ((probs >= least) & (probs < params.min_p * (1 + BORDER) * probs[:, :1])).any(-1)
        if bool(((probs[:, -1:] >= least)[:, 0] & (others > 0)).any()):
            raise _beyond("min_p", params.min_p, count)
        probs, others = torch.where(probs >= least, probs, 0.0), torch.zeros_like(others)
    kept = probs.sum(-1) + others
    return torch.cat([probs, others[:, None]], -1) / kept[:, None], total.log() + kept.log(), near


def _rest(logprobs: Tensor, temperature: float, vocabulary: int) -> Tensor:
    """Return the sum [n] over all other tokens of p^(1/T).

    At T = 1 it is the mass that is missing to 1. Otherwise it lies between two bounds. One spreads the missing mass
    evenly. The other puts it on as few tokens as can hold it, none likelier than the last known one. The function
    returns their mean if they are near enough.
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

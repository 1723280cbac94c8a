"""A server's own prefill as the reference: prompt and answer go back to it, teacher-forced, for log-probs.

It sees what drafting and verifying do to answers, and nothing else: a server whose weights, caches or attention are
wrong in prefill, too, agrees with itself. Prefill and decoding are different kernels: in bf16 their rounding alone
moves log-probs, with the built-in model by 1e-3 in the median against single precision. SGLang promises that it does
not with --enable-deterministic-inference.

Vocabularies up to ``WHOLE`` come whole. Of larger ones the likeliest tokens come, of the raw softmax: what they do not
decide is refused before the first request, see ``prefill.processed``.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoConfig

from bebop.certify.answers import Answer, Block
from bebop.certify.columns import columns, seen
from bebop.certify.model_reference import processed as whole
from bebop.certify.prefill import Prefilled, full, processed
from bebop.certify.reference import LiveEngine
from bebop.config_certify import CertifyConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.trajectory import SamplingParams

WHOLE = 1024  # the largest vocabulary of which a server is asked for every token at every position
LIKELIEST = 64  # of a larger one; a server may allow fewer


class Prefilling(Protocol):
    """An engine whose prefill gives log-probs."""

    most: int | None  # likeliest tokens that it gives at a position; None: as many as one likes

    def prefilled(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]], top: int) -> list[Prefilled]:
        """Of each (prompt, answer) the ``top`` likeliest tokens at every position."""
        ...


def make(config: CertifyConfig, engine: LiveEngine) -> "ServerReference":
    """The engine's own prefill; ``UserError`` if it has none, or its likeliest tokens do not decide the claim."""
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
    hot = {config.sampling.temperature, config.stress or config.sampling.temperature}
    if found.top < vocabulary and hot != {1.0} and not 0 < config.sampling.top_k <= found.top:
        raise UserError(
            f"reference=server knows {found.top} of {vocabulary} tokens at a position, and at temperature 1 alone: set "
            f"sampling.temperature=1 and stress=0, or sampling.top_k of at most {found.top}, or reference=model"
        )
    return found


class ServerReference:
    """See ``Reference``."""

    name = "server"

    def __init__(self, engine: Prefilling, vocabulary: int, *, likeliest: int = LIKELIEST) -> None:
        """``likeliest``: tokens at a position, of a vocabulary that is larger than ``WHOLE``."""
        self.engine, self.vocabulary = engine, vocabulary
        wanted = vocabulary if vocabulary <= WHOLE else min(likeliest, vocabulary)
        self.top = min(wanted, engine.most or wanted)

    def describe(self) -> dict[str, Any]:
        """See ``Reference``."""
        return {
            "prefill of": getattr(self.engine, "name", type(self.engine).__name__),
            "columns": self.vocabulary if self.top == self.vocabulary else self.top + 1,
            "blind to": "whatever is wrong in the server's prefill, too: weights, attention, the model itself",
        }

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """See ``Reference``: positions of the answers that have any."""
        answers = [answer for answer in answers if len(answer.token_ids)]
        pairs = [(answer.prompt, answer.token_ids.tolist()) for answer in answers]
        prefilled = self.engine.prefilled(pairs, self.top) if pairs else []
        both = list(zip(answers, prefilled, strict=True))
        if self.top == self.vocabulary:
            parts = [self._whole(answer, one, params) for answer, one in both]
        else:
            parts = [self._likeliest(answer, one, params) for answer, one in both]
        names = parts[0] if parts else {}
        rows: dict[str, Any] = {name: torch.cat([part[name] for part in parts]) for name in names}
        if not parts:
            none = torch.zeros(0, dtype=torch.float64)
            rows = {"probs": none.new_zeros((0, self.vocabulary)), "cells": none.long(), "logprobs": none}
        stops = answers[0].stops if answers else ()
        written = seen(answers, rows.get("ids"), self.vocabulary)
        shared: dict[str, Any] = columns(answers)
        return Block(**shared, **rows, stops=stops, seen=written)

    def _whole(self, answer: Answer, one: Prefilled, params: SamplingParams) -> dict[str, Tensor]:
        """Fields of a block where every token has a column."""
        logprobs, tokens = full(one, self.vocabulary), torch.from_numpy(answer.token_ids)
        first = one.leading
        written = None
        if params.repetition_penalty != 1.0:
            written = seen([answer], None, self.vocabulary)
            written = torch.cat([written[:1].expand(first, -1), written])
        rows = whole(logprobs, params, written)
        found = {
            "probs": rows[first:],
            "before": _shifted(rows, first),
            "cells": tokens,
            "logprobs": rows[first:].gather(1, tokens[:, None])[:, 0].log(),
        }
        if params.temperature != 1 or params.truncated:
            found["raw"] = logprobs[first:].exp()
        return found

    def _likeliest(self, answer: Answer, one: Prefilled, params: SamplingParams) -> dict[str, Tensor]:
        """Fields of a block over the likeliest tokens, which the text before alone decides, and all others."""
        raw, ids = torch.from_numpy(one.logprobs), torch.from_numpy(one.ids)
        rows, normaliser = processed(raw, params, self.vocabulary)
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
    """The row before each [T, M]; what comes before the first of a text has none: its own stands in."""
    return rows[first - 1 : -1] if first else torch.cat([rows[:1], rows[:-1]])


def _carried(rows: Tensor, ids: Tensor, first: int) -> Tensor:
    """The row before each over the columns of its own [T, N + 1].

    A token that was not among the likeliest ones there has no probability of its own, and counts with all others.
    """
    before, theirs = _shifted(rows, first), _shifted(ids, first)
    same = ids[first:, :, None] == theirs[:, None, :]  # [T, N, N]
    named = (same * before[:, None, :-1]).sum(-1)
    return torch.cat([named, (1 - named.sum(-1, keepdim=True)).clamp_min(0)], -1)

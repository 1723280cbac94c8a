"""From rows of the trainer's logits to a ``Block``, as the certificate's black box takes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bebop.certify.answers import Answer, Block, columns

COLUMNS = 1024  # of a block; of a larger vocabulary the likeliest tokens have one each, and the rest one in common


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Some places of a completion under one version's weights; columns as in a ``Block``, on the CPU."""

    answer: int  # its number in the reading
    places: Tensor  # [n]
    logprobs: Tensor  # [n] of the tokens themselves
    probs: Tensor  # [n, M]
    before: Tensor  # [n, M]
    raw: Tensor | None  # [n, M]
    ids: Tensor | None  # [n, M]


def score(
    number: int, answer: Answer, places: Tensor, logits: Tensor, temperature: float, stops: Sequence[int]
) -> Scored:
    """Score places [n] of a completion, given the logits [2, n, V] there and at the place before each."""
    logits = logits.double()
    p, before = (logits / temperature).softmax(-1)
    raw = None if temperature == 1.0 else logits[0].softmax(-1)
    tokens, last = (ids[places].to(p.device) for ids in _tokens(answer))
    wide = {"probs": p, "before": before} | ({} if raw is None else {"raw": raw})
    ids = None if p.shape[1] <= COLUMNS else likely(list(wide.values()), last, stops, COLUMNS)
    table = {name: (full if ids is None else narrow(full, ids)).cpu() for name, full in wide.items()}
    return Scored(
        answer=number,
        places=places,
        logprobs=(logits[0] / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu(),
        probs=table["probs"],
        before=table["before"],
        raw=table.get("raw"),
        ids=None if ids is None else ids.cpu(),
    )


def likely(tables: Sequence[Tensor], last: Tensor, stops: Sequence[int], count: int) -> Tensor:
    """Return the ids [n, count] that get columns, known before the token is: the likeliest under any of ``tables`` [n,
    V], the token before [n], and those that end completions. They are in order; the last column is -1, all others."""
    rank = torch.stack(list(tables)).amax(0)
    rank.scatter_(1, last[:, None], torch.inf)
    rank[:, list(stops)] = torch.inf
    ids = rank.topk(count - 1, -1).indices.sort(-1).values
    return torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)


def narrow(probs: Tensor, ids: Tensor) -> Tensor:
    """Return distributions [n, V] over the columns ``ids`` [n, M], the last of which takes what is left."""
    own = probs.gather(1, ids[:, :-1])
    return torch.cat([own, (1 - own.sum(1, keepdim=True)).clamp_min(0)], 1)


def cells(ids: Tensor, tokens: Tensor) -> Tensor:
    """Return the column [N] of each token [N]: its own, or the last."""
    own = ids == tokens[:, None]
    return torch.where(own.any(1), own.int().argmax(1), ids.shape[1] - 1)


def seen(answer: Answer, one: Scored) -> Tensor:
    """Return whether the token of each column occurred before each place, [n, M]."""
    width = one.probs.shape[1] if one.ids is None else int(one.ids.max()) + 1
    never = np.iinfo(np.int64).max
    first = torch.full((width,), never)
    for place, token in reversed(list(enumerate([*answer.prompt, *answer.token_ids.tolist()]))):
        if token < width:
            first[token] = place - len(answer.prompt)
    if one.ids is None:
        return first < one.places[:, None]
    return (first[one.ids.clamp_min(0)] < one.places[:, None]) & (one.ids >= 0)


def block_of(answers: Sequence[Answer], scored: Sequence[Scored], stops: tuple[int, ...]) -> Block:
    """Return what the ledger is shown: the places of all parts, in order. Engines report log p at the temperature."""
    starts = np.cumsum([0, *(len(answer.token_ids) for answer in answers)])
    index = torch.cat([int(starts[one.answer]) + one.places for one in scored])
    common = {name: None if own is None else own[index] for name, own in columns(answers).items()}

    def joined(name: str) -> Tensor | None:
        parts = [getattr(one, name) for one in scored]
        return None if parts[0] is None else torch.cat(parts)

    ids, logprobs, tokens = joined("ids"), joined("logprobs"), common["tokens"]
    assert tokens is not None
    return Block(
        **common,  # type: ignore[arg-type]
        cells=tokens if ids is None else cells(ids, tokens),
        logprobs=logprobs,  # type: ignore[arg-type]
        probs=joined("probs"),  # type: ignore[arg-type]
        before=joined("before"),
        raw=joined("raw"),
        ids=ids,
        seen=torch.cat([seen(answers[one.answer], one) for one in scored]),
        declared=logprobs,
        stops=stops,
    )


def _tokens(answer: Answer) -> tuple[Tensor, Tensor]:
    """Return the tokens of a completion [T], and the one before each."""
    own = torch.from_numpy(answer.token_ids)
    return own, torch.cat([torch.tensor(answer.prompt[-1:], dtype=torch.int64), own])[: len(own)]

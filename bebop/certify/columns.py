"""What the positions of a cohort have whatever the reference is: places, tokens, cycles, twins, what was seen before.

Everything goes answer after answer in the order of submission, and position after position: N in all.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from bebop.certify.answers import Answer


def columns(answers: Sequence[Answer]) -> dict[str, Tensor | None]:
    """Fields of a ``Block`` by name: ``tokens``, ``request``, ``position``, ``last``, ``cycle``, ``reported``,
    ``twin``, each [N]; the last three are None where no answer has them."""
    counts = torch.tensor([len(answer.token_ids) for answer in answers], dtype=torch.long)
    requests = torch.tensor([answer.request for answer in answers], dtype=torch.long)
    return {
        "tokens": _joined([answer.token_ids for answer in answers], np.int64),
        "request": requests.repeat_interleave(counts),
        "position": torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(n) for n in counts.tolist())]),
        "last": _joined([_before(answer) for answer in answers], np.int64),
        "cycle": cycles(answers),
        "reported": reported(answers),
        "twin": twins(answers),
    }


def reported(answers: Sequence[Answer]) -> Tensor | None:
    """Log-probs [N] as engines report them, nan where one gives none; None where none does."""
    if all(answer.logprobs is None for answer in answers):
        return None
    nothing = [np.full(len(answer.token_ids), np.nan) for answer in answers]
    rows = [none if answer.logprobs is None else answer.logprobs for answer, none in zip(answers, nothing, strict=True)]
    return _joined(rows, np.float64)


def cycles(answers: Sequence[Answer]) -> Tensor | None:
    """Place of each token in its decoding cycle [N], from 0; -1 where an answer does not say; None where none does."""
    if all(answer.cycles is None for answer in answers):
        return None
    found = []
    for answer in answers:
        places = np.fromiter(chain.from_iterable(map(range, answer.cycles or ())), dtype=np.int64)
        count = len(answer.token_ids)
        found.append(places if len(places) == count else np.full(count, -1, dtype=np.int64))
    return _joined(found, np.int64)


def twins(answers: Sequence[Answer]) -> Tensor | None:
    """The token that an earlier answer of the cohort has after the very same context [N], -1: there is none.

    Requests 2i and 2i + 1 ask for the same prompt; as far as their answers agree, the second one's tokens are held
    against the first one's.
    """
    earlier = {answer.request: answer for answer in answers}
    found = [_twin(answer, earlier.get(answer.request - 1)) for answer in answers]
    return _joined(found, np.int64) if any((row >= 0).any() for row in found) else None


def seen(answers: Sequence[Answer], ids: Tensor | None, vocabulary: int) -> Tensor:
    """Whether a column's token occurred in prompt or answer before the position [N, M] (bool).

    ``ids`` [N, M]: the token of each column, -1 for all others, which never counts as seen; None: columns are ids.
    """
    parts = [torch.zeros((0, vocabulary if ids is None else ids.shape[1]), dtype=torch.bool)]
    start = 0
    for answer in answers:
        count = len(answer.token_ids)
        written = torch.zeros((count, vocabulary), dtype=torch.bool)
        if count:
            written[:, torch.tensor(answer.prompt, dtype=torch.long)] = True
            places = torch.arange(1, count)
            written[places, torch.from_numpy(answer.token_ids[:-1])] = True
            written = written.cummax(0).values
        if ids is not None:
            own = ids[start : start + count]
            written = written.gather(1, own.clamp_min(0)) & (own >= 0)
        parts.append(written)
        start += count
    return torch.cat(parts)


def _before(answer: Answer) -> list[int]:
    """The token before each one of the answer; -1 where there is none."""
    return [*(answer.prompt[-1:] or (-1,)), *answer.token_ids.tolist()][: len(answer.token_ids)]


def _twin(answer: Answer, other: Answer | None) -> np.ndarray:
    row = np.full(len(answer.token_ids), -1, dtype=np.int64)
    if other is None or answer.request % 2 == 0 or other.prompt != answer.prompt:
        return row
    width = min(len(row), len(other.token_ids))
    same = answer.token_ids[:width] == other.token_ids[:width]
    agreed = int(np.argmin(same)) if not same.all() else width  # tokens before the first that differs
    reach = min(width, agreed + 1)
    row[:reach] = other.token_ids[:reach]
    return row


def _joined(rows: Sequence[object], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *(np.asarray(row, dtype=dtype) for row in rows)]))

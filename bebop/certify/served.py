"""What engines that are asked over HTTP have in common: requests that make no sense there, answers that never came."""

from typing import Any

import numpy as np

from bebop.certify.answers import Answer
from bebop.errors import UserError
from bebop.rollout.engine import Request


def refuse(request: Request, vocabulary: int | None) -> None:
    """Raise ``UserError`` for another claim than by tokens, and for prompts of another model.

    ``vocabulary``: of the server; None: it looks itself.
    """
    if request.params.stop:
        raise UserError(
            f"sampling.stop={list(request.params.stop)} is not possible: a served answer is certified by its tokens, "
            "and ends with stop tokens alone"
        )
    ids = request.token_ids
    if not ids or min(ids) < 0:
        raise UserError(f"prompt {list(ids)[:8]} is not possible: give one or more token ids, 0 or above")
    if vocabulary is not None and max(ids) >= vocabulary:
        raise UserError(
            f"a prompt has token {max(ids)}, but the server's vocabulary has {vocabulary}: is model.path the model "
            "that it serves?"
        )


def fields(request: Request) -> dict[str, Any]:
    """Fields of an ``Answer`` that are known before it is asked for."""
    params = request.params
    return {
        "request": request.id,
        "prompt": request.token_ids,
        "stops": params.stop_token_ids,
        "limit": params.max_new_tokens,
    }


def unanswered(request: Request) -> Answer:
    """The answer to a request that was interrupted before anything came back."""
    return Answer(**fields(request), token_ids=np.zeros(0, dtype=np.int64), finish_reason="abort")

"""A Python function as an engine: ``package.module:function``, or a function object.

The number of required arguments selects one of two signatures:

    function(requests: list[Request]) -> list[Answer | Completion]
    sample(prompts: list[list[int]], seeds: list[int], max_new_tokens: int) -> list[(token_ids, logprobs or None)]

The first one receives ``bebop.rollout.engine.Request`` and returns one ``Answer`` or ``Completion`` for each, in their
order. The second one must know the sampling parameters and the stop tokens itself. A stop token is the last token of
its completion. A completion shorter than ``max_new_tokens`` ends with one.
"""

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bebop.certify.answers import Answer
from bebop.certify.calls import fields, unanswered
from bebop.certify.reference import Progress
from bebop.certify.white_box import WhiteBox
from bebop.config.certify import CertifyConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.trajectory import Completion

Sampled = tuple[Sequence[int], Sequence[float] | None]  # token ids, log-probs
Sample = Callable[[list[list[int]], list[int], int], Sequence[Sampled]]
Answering = Callable[[list[Request]], Sequence[Answer | Completion]]


def make(config: CertifyConfig) -> "FunctionEngine":
    """Return the engine of the function that ``engine.function`` names; raise ``UserError`` if there is none."""
    assert config.engine.function is not None
    return FunctionEngine(find(config.engine.function))


class FunctionEngine:
    """A ``LiveEngine`` over a function. After an interruption all completions of the cohort are missing."""

    name = "function"

    def __init__(self, function: Sample | Answering, white_box: WhiteBox | None = None) -> None:
        """Detect the function's signature.

        ``white_box``: the white box of ``certify``, which receives the function's decoding cycles.
        """
        self.white_box = white_box
        self.function: Callable[..., Any] = function
        self.label = f"{getattr(function, '__module__', '?')}:{getattr(function, '__qualname__', repr(function))}"
        self.simple = takes(function, self.label) == 3

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"function": self.label}

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Call the function for a cohort; raise ``UserError`` for invalid results."""
        if not requests:
            return []
        try:
            given = self._asked(requests)
        except KeyboardInterrupt:
            return [unanswered(request) for request in requests]
        if not isinstance(given, Sequence) or len(given) != len(requests):
            count = len(given) if isinstance(given, Sequence) else type(given).__name__
            raise UserError(f"{self.label} gave {count} for {len(requests)} requests: return a list of an answer each")
        answers = [self._read(request, one) for request, one in zip(requests, given, strict=True)]
        progress(sum(len(answer.token_ids) for answer in answers))
        return answers

    def close(self) -> None:
        """Do nothing: the engine needs no cleanup."""

    def _asked(self, requests: Sequence[Request]) -> Any:
        if not self.simple:
            return self.function(list(requests))
        longest = {request.params.max_new_tokens for request in requests}
        assert len(longest) == 1, "the completions of a cohort may be equally long"
        prompts = [list(request.token_ids) for request in requests]
        return self.function(prompts, [request.params.seed for request in requests], longest.pop())

    def _read(self, request: Request, given: Any) -> Answer:
        if isinstance(given, Answer):
            return given
        own = fields(request) | {"seed": request.params.seed}
        if isinstance(given, Completion):
            return Answer(
                **own,
                token_ids=given.token_ids,
                logprobs=given.logprobs.astype(np.float64),
                versions=given.versions,
                finish_reason=given.finish_reason,
            )
        if not (self.simple and isinstance(given, tuple) and len(given) == 2):
            wanted = "(token ids, log-probs or None)" if self.simple else "an Answer or a Completion"
            raise UserError(f"{self.label} gave {type(given).__name__} for an answer: return {wanted}")
        ids = self._numbers(given[0], np.int64, "token ids")
        logprobs = None if given[1] is None else self._numbers(given[1], np.float64, "log-probs")
        return Answer(**own, token_ids=ids, logprobs=logprobs, finish_reason=_reason(request, ids))

    def _numbers(self, given: Any, kind: type, what: str) -> Any:
        """Return a list, array or tensor of numbers as an array; token ids must be integers."""
        array = np.asarray(given.tolist() if hasattr(given, "tolist") else given)
        whole = array.size == 0 or np.issubdtype(array.dtype, np.integer if kind is np.int64 else np.number)
        if array.ndim != 1 or not whole:
            raise UserError(f"{self.label} gave {what} of type {array.dtype} and shape {array.shape}: return a list")
        return array.astype(kind)


def find(target: str) -> Callable[..., Any]:
    """Return the function at ``package.module:function``; raise ``UserError`` if there is none."""
    module, _, name = target.partition(":")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise UserError(f"engine.function={target!r}: {error}") from error
    for part in name.split("."):
        found = getattr(found, part, None)  # type: ignore[assignment]
    if not callable(found):
        raise UserError(f"engine.function={target!r}: {module} has no function {name}")
    return found


def takes(function: Callable[..., Any], label: str) -> int:
    """Return the number of required arguments of a function; raise ``UserError`` unless 1 or 3."""
    required = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    count = sum(one.kind in required and one.default is inspect.Parameter.empty for one in parameters)
    if count not in (1, 3):
        raise UserError(f"{label} takes {count} arguments: (requests), or (prompts, seeds, max_new_tokens)")
    return count


def _reason(request: Request, ids: Any) -> str:
    stopped = len(ids) < request.params.max_new_tokens or int(ids[-1]) in request.params.stop_token_ids
    return "stop" if stopped else "length"

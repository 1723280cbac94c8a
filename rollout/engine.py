"""Interface of every rollout engine: it takes requests, returns completions, and swaps weights in between."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.trajectory import Completion, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for one completion.

    >>> Request(id=7, token_ids=(2, 17, 4), params=SamplingParams(max_new_tokens=8, seed=1)) # doctest: +SKIP
    """

    id: int  # chosen by the caller, unique among the requests that are not finished
    token_ids: tuple[int, ...]  # [P] prompt
    params: SamplingParams
    partial: Completion | None = None  # an aborted completion to go on with
    # Whether its completion has a trace, as far as the engine can record it: the embedded engine in all cycles of draft
    # and verification, SGLang where its plugin sees them. A system with a custom cycle has none.
    trace: bool = False
    # Whether another request will go on from its tokens, as the next turn of a conversation does. The embedded engine
    # then keeps its caches and finds them again by all of these tokens. SGLang's prefix cache needs no such mark.
    park: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A finished request with its completion."""

    id: int
    completion: Completion


def nothing() -> Completion:
    """Return an empty completion, for a request that was aborted before it began."""
    empty = np.zeros(0, dtype=np.int64)
    return Completion(token_ids=empty, logprobs=empty.astype(np.float32), versions=empty, finish_reason="abort")


class EngineDied(RuntimeError):
    """Error: an engine is gone, hangs, or holds unknown weights. Its worker is replaced and its prompts start again."""


class Engine(Protocol):
    """A decoding engine that one thread drives step by step. Any call may raise ``EngineDied``."""

    version: int  # of the weights in use
    head: str  # fingerprint of the head that drafts, as it was after the last load of weights; empty without one

    def add(self, request: Request) -> None:
        """Queue a request; raise ``UserError`` if it can never fit."""

    def step(self) -> list[Finished]:
        """Admit requests that fit, run one decoding cycle and return finished requests.

        It returns at once if there is nothing to do.
        """

    def abort(self, ids: Sequence[int] | None = None) -> list[Finished]:
        """End requests (all, if None) now; their partial completions can be resumed through ``Request.partial``."""

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Prepare weights so that loading them holds up decoding as little as possible, and return them.

        Any thread may call it, while the engine decodes.
        """

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights in flight, under the names of ``Policy.weights``; weights that are not sent stay."""

    def configure(self, decoding: DecodingConfig) -> None:
        """Use another decoding configuration from the next cycle on; raise ``UserError`` if its drafts do not fit."""

    def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Store all past completions of a prompt that may be drafted from.

        Systems that do not draft from them do nothing.
        """

    @property
    def unfinished(self) -> int:
        """Return the number of requests queued or running."""

    @property
    def redrawn(self) -> int:
        """Return the number of completions so far that were lost and drawn again, which favors short ones."""

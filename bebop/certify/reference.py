"""The protocols of a certificate: a live engine, and a reference that gives the distribution of completions."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bebop.certify.answers import Answer, Block
from bebop.certify.white_box import WhiteBox
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams

Progress = Callable[[int], None]  # called with the number of new tokens


class LiveEngine(Protocol):
    """A running engine behind the interface that any client uses."""

    name: str

    @property
    def white_box(self) -> WhiteBox | None:
        """Return the evidence from inside verification so far; None: the engine exposes nothing."""

    def describe(self) -> dict[str, Any]:
        """Return the engine's own description: versions, weights, drafting, precision."""

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Sample a cohort in parallel; return an ``Answer`` for each request, in their order; later turns may follow.

        On an interruption it ends the running requests and returns the completions so far; unfinished ones have the
        reason ``abort``.
        """

    def close(self) -> None:
        """Release what the engine object has started."""


class Reference(Protocol):
    """The distribution that each token should have been drawn from."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Return a description of the reference and of the faults that it cannot see."""

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of a cohort."""

"""The protocols of a certificate: a live engine, and a reference that knows what completions should follow."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bebop.certify.answers import Answer, Block
from bebop.certify.white_box import WhiteBox
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams

Progress = Callable[[int], None]  # is told how many more tokens have come


class LiveEngine(Protocol):
    """A running engine, asked like any client would ask it."""

    name: str

    @property
    def white_box(self) -> WhiteBox | None:
        """Return what was seen inside verification so far; None: there is no look inside."""

    def describe(self) -> dict[str, Any]:
        """Return what it says of itself: versions, weights, drafting, precision."""

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Ask for a cohort side by side; return an ``Answer`` for each request, in their order; later turns may follow.

        Interrupted, it ends them and returns the completions so far; unfinished ones have the reason ``abort``.
        """

    def close(self) -> None:
        """Give back what was started."""


class Reference(Protocol):
    """The distribution that each token should have been drawn from."""

    name: str

    def describe(self) -> dict[str, Any]:
        """Return what it is, and what it cannot see."""

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of a cohort."""

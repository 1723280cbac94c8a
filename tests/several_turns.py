"""Trajectories of several turns, made by hand, as environments and the engine leave them."""

from collections.abc import Sequence

import numpy as np

from bebop.trajectory import OPENING, Completion, DecodeStats, Ending, Group, Prompt, Trace, Trajectory, Turn
from tests.stored_answers import trace

WRITTEN = (4, 3, 2)  # tokens of each turn
READ = (0, 3, 5)  # and before it


def stats(cycles: int, tokens: int, overlap: float, accepted: float = 1.0) -> DecodeStats:
    """Of two draft positions, the second reached where the first was accepted; ``overlap`` of each in a cycle."""
    reached = np.array([cycles, cycles * accepted])
    made = DecodeStats(cycles=cycles, tokens=tokens, reached=reached, accepted=reached * accepted)
    made.overlap, made.target_only = reached * overlap, reached * overlap / 2
    made.target_entropy, made.draft_entropy = reached * 0.5, reached * 0.25
    return made


def turn(
    number: int, *, read: int, written: int, version: int = 0, overlap: float = 0.5, traced: bool = False,
    first: float | None = None,
) -> Turn:  # fmt: skip
    """Two cycles; ``first``: overlap of the first one, which the engine tells apart."""
    parts: tuple[tuple[int, DecodeStats], ...] = ((0, stats(2, written, overlap)),)
    if first is not None:
        parts = ((OPENING, stats(1, written - 1, first)), (0, stats(1, 1, overlap)))
    completion = Completion(
        token_ids=100 * number + 10 + np.arange(written),
        logprobs=-0.1 * np.arange(1, written + 1, dtype=np.float32),
        versions=np.full(written, version + number),
        text=f"turn {number}",
        stats=sum((own for _, own in parts), DecodeStats()),
        stretches=parts,
        trace=_traced(written, number) if traced else None,
    )
    return Turn(observation=100 * number + 50 + np.arange(read), completion=completion)


def _traced(count: int, seed: int) -> Trace:
    made = trace(count, seed)
    made.target_entropy[:] = 0.5
    return made


def trajectory(
    *, reward: float = 1.0, turns: int = 3, traced: bool = False, ended: Ending = "done", restarts: int = 0,
    seconds: float = 0.0, overlaps: Sequence[float] = (0.8, 0.6, 0.4), first: float | None = None,
) -> Trajectory:  # fmt: skip
    """Turns of ``WRITTEN`` tokens after ``READ`` ones, of versions 0, 1, 2, ..."""
    made = tuple(
        turn(
            i, read=READ[min(i, 2)], written=WRITTEN[min(i, 2)], overlap=overlaps[min(i, 2)], traced=traced,
            first=first,
        )
        for i in range(turns)
    )  # fmt: skip
    return Trajectory(
        turns=made, reward=reward, ended=ended, restarts=restarts, environment_seconds=seconds, counts={"calls": turns}
    )


def group(index: int, *members: Trajectory, lost: int = 0) -> Group:
    prompt = Prompt(index=index, task="store", text="", token_ids=(1, 2, 3 + index), item={})
    return Group(prompt=prompt, trajectories=members, lost=lost)

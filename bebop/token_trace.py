"""How each token of an answer came about: which draft was tested for its place, what became of it, p and q beside it.

A row a token, aligned with ``Completion.token_ids``. A place of an answer is decided by one row of the target, so p is
known at all of them, and q where a draft was tested. Probabilities are those that verification used (temperature and
truncation applied), of the TOP likeliest tokens alone, so that what is kept of a token is bounded.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.config import TraceMode

# What a token is, by its number: drawn where nothing was drafted; a draft that stands; drawn after a rejection; drawn
# after all drafts of its cycle stand; or the engine does not say.
VERDICTS = ("plain", "accepted", "recovered", "bonus", "unknown")
TOP = 8  # tokens of p and of q that are kept by probability
NONE = -1  # in place of a token: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """T tokens; what an engine does not know is NONE or NaN. M is TOP, or the vocabulary where that is smaller."""

    verdicts: NDArray[np.int8]  # [T] index into VERDICTS
    cycles: NDArray[np.int32]  # [T] the cycle that emitted it, from 0; an answer that was interrupted counts on
    drafters: NDArray[np.int8]  # [T] index into ``names``, of the draft that was tested; NONE: none was
    names: tuple[str, ...]  # of drafters, as modules of rollout/decoding/drafters are called
    drafts: NDArray[np.int32]  # [T] the token drafted for this place, be it kept or not; NONE: none was tested
    draft_target_probs: NDArray[np.float32]  # [T] p of that draft
    draft_probs: NDArray[np.float32]  # [T] q of it; 1 of a greedy or looked-up one
    overlap: NDArray[np.float32]  # [T] sum of min(p, q)
    target_entropy: NDArray[np.float32]  # [T] nats
    draft_entropy: NDArray[np.float32]  # [T] nats
    target_ids: NDArray[np.int32]  # [T, M] likeliest tokens of p, the likeliest first
    target_top: NDArray[np.float16]  # [T, M] their p
    draft_ids: NDArray[np.int32]  # [T, M] likeliest tokens of q
    draft_top: NDArray[np.float16]  # [T, M] their q

    def __len__(self) -> int:
        return len(self.verdicts)


def spread(trace: Trace, places: NDArray[np.bool_]) -> Trace:
    """The rows of a trace at those places [T] that are true, in order; of the others nothing is known."""

    def laid(name: str) -> NDArray[Any]:
        rows = getattr(trace, name)
        missing = VERDICTS.index("unknown") if name == "verdicts" else np.nan if rows.dtype.kind == "f" else NONE
        table = np.full((len(places), *rows.shape[1:]), missing, dtype=rows.dtype)
        table[places] = rows
        return table

    return Trace(names=trace.names, **{f.name: laid(f.name) for f in fields(Trace) if f.name != "names"})


def traced(mode: TraceMode, index: int, groups_per_step: int) -> bool:
    """Whether the answers to prompt number ``index`` are traced; of a sample, the first prompt of each batch."""
    return mode == "all" or (mode == "sample" and index % groups_per_step == 0)


def joined(parts: Sequence[Trace]) -> Trace:
    """Traces of consecutive parts of one answer."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    arrays = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Trace) if f.name != "names"}
    places = [np.array([names.index(name) for name in part.names] + [NONE], dtype=np.int8) for part in parts]
    arrays["drafters"] = np.concatenate([own[p.drafters] for own, p in zip(places, parts, strict=True)])
    starts = np.cumsum([0, *(int(part.cycles[-1]) + 1 if len(part) else 0 for part in parts)])
    arrays["cycles"] = np.concatenate(
        [
            np.where(p.cycles == NONE, p.cycles, p.cycles + np.int32(at))
            for p, at in zip(parts, starts[:-1], strict=True)
        ]
    )
    return Trace(names=names, **arrays)

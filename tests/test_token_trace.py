"""Parts of an answer make one trace, whatever is known of each."""

import dataclasses

import numpy as np

from bebop.trajectory import NONE, join_traces
from tests.stored_answers import trace


def test_cycles_go_on_and_what_is_not_known_stays_so() -> None:
    known = trace(4)  # cycles 0, 0, 1, 1
    unknown = dataclasses.replace(known, cycles=np.full(4, NONE, dtype=np.int32))
    assert join_traces([known, unknown, known]).cycles.tolist() == [0, 0, 1, 1, *[NONE] * 4, 2, 2, 3, 3]


def test_drafters_keep_their_names() -> None:
    one = dataclasses.replace(trace(2), names=("mtp",), drafters=np.array([0, NONE], dtype=np.int8))
    other = dataclasses.replace(trace(2), names=("block", "mtp"), drafters=np.array([0, 1], dtype=np.int8))
    whole = join_traces([one, other])
    assert whole.names == ("mtp", "block") and whole.drafters.tolist() == [0, NONE, 1, 0]

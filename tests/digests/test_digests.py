"""Nothing that is decoded, trained or said has changed; and a single bit that differs is seen."""

import numpy as np
import pytest

from tests.cases import slow_but
from tests.digests import decoding, training, watching
from tests.digests.numbers import ROUNDING, Numbers, differences, machine, stored

SCENARIOS = decoding.SCENARIOS | training.SCENARIOS | watching.SCENARIOS
QUICK = (  # every kind of interruption and of update, and every family of systems
    "autoregressive interrupted", "target_only recompute", "bebop_adaptive changed", "history plain",
    "head e2e_tv_corrected", "monitor by accepted",
)  # fmt: skip


def test_every_scenario_is_stored() -> None:
    assert set(stored()["digests"]) == set(SCENARIOS)


@pytest.mark.parametrize("name", slow_but(QUICK, SCENARIOS))
def test_nothing_has_changed(name: str) -> None:
    known = stored()
    found = SCENARIOS[name]()
    assert differences(found.digest(), known["digests"][name], known["machine"] == machine()) == []
    for changed in planted(found):
        assert differences(changed.digest(), known["digests"][name], known["machine"] == machine())


@pytest.mark.parametrize("name", slow_but(["bebop changed"], decoding.SCENARIOS))
@pytest.mark.usefixtures("in_pages")
def test_pages_change_nothing(name: str) -> None:
    known = stored()
    assert differences(decoding.SCENARIOS[name]().digest(), known["digests"][name], known["machine"] == machine()) == []


def planted(numbers: Numbers) -> list[Numbers]:
    """The same with one bit changed: in a whole number, and in the largest real one (its last, elsewhere a high one).

    On another kind of processor only sums are compared, so that the change has to be one of a large number.
    """
    changed = []
    for kind in ("whole", "real"):
        twin = Numbers({n: [a.copy() for a in v] for n, v in numbers.whole.items()},
                       {n: [a.copy() for a in v] for n, v in numbers.real.items()})  # fmt: skip
        arrays = [a for n, v in getattr(twin, kind).items() for a in v if a.size and ROUNDING not in n]
        if not arrays:
            continue
        array = max(arrays, key=lambda a: np.nanmax(np.abs(a)))
        place = int(np.nanargmax(np.abs(array)))
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        byte = 0 if machine() == stored()["machine"] or kind == "whole" else array.itemsize - 2
        bits[place * array.itemsize + byte] ^= 16 if array.dtype != bool else 1
        array[...] = bits.view(array.dtype).reshape(array.shape)
        changed.append(twin)
    return changed

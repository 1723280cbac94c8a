"""Nothing that is decoded, trained or said has changed; and a single bit that differs is seen."""

import numpy as np
import pytest

from tests.digests import decoding, training, watching
from tests.digests.numbers import Numbers, differences, machine, stored

SCENARIOS = decoding.SCENARIOS | training.SCENARIOS | watching.SCENARIOS


def test_every_scenario_is_stored() -> None:
    assert set(stored()["digests"]) == set(SCENARIOS)


@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_has_changed(name: str) -> None:
    known = stored()
    found = SCENARIOS[name]()
    assert differences(found.digest(), known["digests"][name], known["machine"] == machine()) == []
    for changed in planted(found):
        assert differences(changed.digest(), known["digests"][name], known["machine"] == machine())


def planted(numbers: Numbers) -> list[Numbers]:
    """The same with one bit changed: in a whole number, and in a real one (its last, or elsewhere a large one)."""
    changed = []
    for kind in ("whole", "real"):
        twin = Numbers({n: [a.copy() for a in v] for n, v in numbers.whole.items()},
                       {n: [a.copy() for a in v] for n, v in numbers.real.items()})  # fmt: skip
        arrays = [a for v in getattr(twin, kind).values() for a in v if a.size]
        if not arrays:
            continue
        array = max(arrays, key=lambda a: a.size)
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        bits[0 if machine() == stored()["machine"] or kind == "whole" else array.itemsize - 2] ^= 16
        array[...] = bits.view(array.dtype).reshape(array.shape)
        changed.append(twin)
    return changed

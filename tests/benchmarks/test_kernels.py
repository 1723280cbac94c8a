import dataclasses
import sys
import time
from pathlib import Path

import pytest
import torch

from bebop.bench import kernels
from bebop.bench.kernel_arms import Skip, _peer

TINY = dataclasses.replace(
    kernels.on_cpu(), losses=((8, 500),), linear=((4, 500),), chains=((2, 3, 500),), hidden=16, repeats=3
)


@pytest.mark.slow
def test_every_arm_is_measured_or_says_why_not() -> None:
    rows = kernels.run(TINY)
    for row in rows:
        assert (row["ms"] > 0) != bool(row.get("skipped")) if row["ms"] else row["skipped"]
    assert {row["what"] for row in rows} == {"copy", "tv", "linear tv", "verify probs", "verify block"}
    eager = [row for row in rows if row["arm"] == "eager"]
    assert [row["x eager"] for row in eager] == [1.0] * 4
    assert all(row["skipped"] for row in rows if row["arm"] in ("speculators", "liger", "sglang", "vllm"))
    assert set(kernels.charts(rows)) == {"tv", "linear tv", "verify probs", "verify block"}


def test_time_that_is_up_leaves_shapes_out() -> None:
    rows = kernels.run(dataclasses.replace(TINY, seconds=0.0))
    assert [row["shape"] for row in rows[1:]] == ["(8, 500)", "(4, 500)", "(2, 3, 500)"]
    assert {row["skipped"] for row in rows[1:]} == {"time is up"}


def test_timer_measures_time_and_memory() -> None:
    timer = kernels.Timer("cpu", 3)
    assert 10 <= timer(lambda: time.sleep(0.01)) < 100

    # Two tensors of 4 MB at once, a third after the first two are gone.
    def call() -> None:
        a = torch.ones(1 << 20)
        b = a + 1
        del a, b
        torch.ones(1 << 20)

    assert timer.peak(call) == pytest.approx(8 << 20, rel=0.01)


def test_a_peer_is_loaded_from_its_file_where_its_package_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(Skip, match="notapeer is not installed"):
        _peer("notapeer.ops.verify", "notapeer")
    (tmp_path / "notapeer" / "ops").mkdir(parents=True)
    (tmp_path / "notapeer" / "__init__.py").write_text("import something_that_is_not_there")
    (tmp_path / "notapeer" / "ops" / "verify.py").write_text("ANSWER = 42")
    assert _peer("notapeer.ops.verify", "notapeer").ANSWER == 42

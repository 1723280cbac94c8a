"""Sums of decoded answers become rates with intervals."""

import numpy as np
import pytest

from bebop.adaptation.evaluation import change, measured
from bebop.report.adapted import rows
from bebop.trajectory import Completion, DecodeStats
from tests.adaptation import builders


def answer(reached: list[float], accepted: list[float], cycles: int) -> Completion:
    """An answer whose statistics are given."""
    sums = {name: np.array(reached) / 2 for name in ("overlap", "target_only", "draft_entropy", "target_entropy")}
    stats = DecodeStats(
        cycles=cycles,
        tokens=cycles + int(sum(accepted)),
        reached=np.array(reached),
        accepted=np.array(accepted),
        **sums,
    )
    empty = np.zeros(0, dtype=np.int64)
    return Completion(token_ids=empty, logprobs=np.zeros(0, dtype=np.float32), versions=empty, stats=stats)


def test_rates_by_hand() -> None:
    answers = [answer([4.0, 2.0], [2.0, 1.0], 4), answer([1.0], [1.0], 1)]  # the second reached one position alone
    found = measured(["a", "b"], answers, 2)
    assert found.interval("accept_length").value == (5 + 4) / 5
    assert found.interval("accepted", 1).value == 3 / 5 and found.interval("accepted", 2).value == 1 / 2
    assert found.interval("accepted").value == 4 / 7 and found.interval("overlap", 1).value == 0.5
    only = found.of("b")
    assert (
        only.tasks == ("b",)
        and only.interval("accept_length").value == 2
        and np.isnan(only.interval("accepted", 2).low)
    )
    assert list(found.summary())[:4] == ["accept_length", "accept_rate", "accept_rate/1", "accept_rate/2"]


def test_a_change_is_taken_prompt_by_prompt() -> None:
    worse, better = builders.measured(0.5), builders.measured(0.7)
    same = change(worse, worse, "accept_length")
    assert (same.value, same.low, same.high) == (0, 0, 0)
    found = change(better, worse, "accept_length")
    gap = better.interval("accept_length").value - worse.interval("accept_length").value
    assert found.value == pytest.approx(gap) and found.low > 0


def test_the_table_has_every_number_once() -> None:
    found = list(rows(builders.results()))
    names = [(row.system, row.label) for row in found]
    assert len(set(names)) == len(names) == (1 + 2 + 1 + 3 + 4) + (1 + 2 + 1 + 3)
    assert all(row.change.value == pytest.approx(row.after.value - row.before.value, abs=1e-9) for row in found)
    by_name = dict(zip(names, found, strict=True))
    assert by_name["sampled drafts", "overlap Σ min(p, q)"].after.value == pytest.approx(0.75)
    assert (
        by_name["sampled drafts", "acceptance, draft 1"].after.value
        > by_name["greedy drafts", "acceptance, draft 1"].after.value
    )

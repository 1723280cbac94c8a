"""How many drafts pay: the tables by hand, what they learn, and what trials may cost."""

import random

import pytest

from bebop.config.job import Costs
from bebop.rollout.decoding.timed_lengths import FADE, START, TRIALS, WEIGHT, ThroughputModel, sizes


def made(
    most: int = 3, slots: int = 8, seconds: dict[int, list[float]] | None = None, chance: float = 0.5
) -> ThroughputModel:
    """A table of these seconds by batch size, and acceptance that is the same at every position."""
    pace = ThroughputModel(most, slots, Costs(draft=0.15, verify=0.05))
    for rows, row in (seconds or {}).items():
        for k, one in enumerate(row):
            pace.timed(rows, k, one)
    pace.tested, pace.passed = [1000.0] * most, [1000.0 * chance] * most
    return pace


def test_sizes_are_powers_of_two_and_the_largest() -> None:
    assert sizes(1) == (1,) and sizes(8) == (1, 2, 4, 8) and sizes(12) == (1, 2, 4, 8, 12) and sizes(2) == (1, 2)


def test_costs_between_two_sizes_are_on_a_straight_line() -> None:
    pace = made(1, 4, {1: [1.0, 2.0], 2: [2.0, 2.0], 4: [4.0, 8.0]})
    assert [pace.costs(rows)[1] for rows in (1, 2, 3, 4)] == [2.0, 2.0, 5.0, 8.0]
    assert [pace.costs(rows)[0] for rows in (1, 2, 3, 4)] == [1.0, 2.0, 3.0, 4.0]
    assert ThroughputModel(2, 4, Costs(draft=0.2, verify=0.1)).costs(3)[2] == pytest.approx(1.6)


def test_tokens_are_one_and_the_chances_that_a_prefix_stands() -> None:
    pace = made()
    pace.passed = [900.0, 500.0, 100.0]
    assert pace.tokens() == pytest.approx([1.0, 1.9, 2.35, 2.395])
    assert ThroughputModel(2, 1, Costs(draft=0)).tokens()[2] == pytest.approx(1 + START + START**2)


@pytest.mark.parametrize(
    ("row", "chance", "best"),
    [
        ([1.0, 1.1, 1.2, 1.3], 0.9, 3),  # drafts cost little and stand
        ([1.0, 1.4, 1.9, 2.4], 0.5, 1),  # 1.5 / 1.4 and 1.75 / 1.9
        ([1.0, 1.6, 2.2, 2.8], 0.5, 0),  # no number of them pays
        ([1.0, 1.5, 2.0, 2.0], 0.5, 0),  # a tie of 0 and 1
    ],
)
def test_the_best_number_has_most_tokens_a_second(row: list[float], chance: float, best: int) -> None:
    assert made(3, 1, {1: row}, chance).best(1) == best


def test_it_switches_off_for_large_batches_and_on_again() -> None:
    """By rows: what a cycle costs beside a plain one; and again when more is accepted, or less is paid."""
    pace = made(1, 8, {1: [1.0, 1.1], 2: [1.0, 1.2], 4: [1.0, 1.4], 8: [1.0, 1.8]})
    assert [pace.best(rows) for rows in (1, 2, 4, 8)] == [1, 1, 1, 0]
    for _ in range(300):
        pace.accepted([1] * 8, 1)
    assert pace.best(8) == 1
    for _ in range(300):
        pace.accepted([1] * 2 + [0] * 6, 1)
    assert pace.best(8) == 0 == pace.best(4)
    for _ in range(200):
        pace.measured(8, 0, 1.0)
        pace.measured(8, 1, 1.05)
    assert pace.best(8) == 1 and pace.best(1) == 1


def test_what_was_accepted_fades_by_cycles_at_the_positions_that_were_drafted() -> None:
    pace = ThroughputModel(2, 1, Costs(draft=0))
    pace.accepted([1] * 4 + [0] * 6, 1)
    assert pace.tested == pytest.approx([FADE * WEIGHT + 10, WEIGHT])
    assert pace.passed == pytest.approx([FADE * WEIGHT * START + 4, WEIGHT * START])
    pace.accepted([0, 0], 0)
    assert pace.tested[0] == pytest.approx(FADE * WEIGHT + 10)
    both = ThroughputModel(2, 1, Costs(draft=0))
    both.accepted([0, 1, 2, 2], 2)
    assert both.tested == pytest.approx([FADE * WEIGHT + 4, FADE * WEIGHT + 3])
    assert both.passed == pytest.approx([FADE * WEIGHT * START + 3, FADE * WEIGHT * START + 2])


def test_seconds_follow_what_is_measured_and_one_outlier_is_hardly_heard() -> None:
    pace = made(1, 2, {1: [1.0, 2.0], 2: [1.0, 2.0]})
    pace.measured(1, 0, 1000.0)
    assert 1.05 < pace.costs(1)[0] < 1.2 and pace.costs(2)[0] == 1.0
    for _ in range(200):
        pace.measured(1, 0, 3.0)
    assert pace.costs(1)[0] == pytest.approx(3.0, rel=0.01)
    # Most of it is the machine's: cycles with drafts are taken to be slower too, until they are measured.
    assert 3.5 < pace.costs(1)[1] < 6
    for _ in range(200):
        pace.measured(1, 1, 3.5)
        pace.measured(1, 0, 3.0)
    assert [pace.costs(1)[k] for k in (0, 1)] == pytest.approx([3.0, 3.5], rel=0.02)


def test_without_a_measurement_the_first_cycle_gives_the_unit() -> None:
    pace = ThroughputModel(2, 4, Costs(draft=0.15, verify=0.05))
    pace.measured(2, 1, 0.012)
    assert [pace.costs(4)[k] for k in range(3)] == pytest.approx([0.01, 0.012, 0.014])


def run(pace: ThroughputModel, cycles: int, row: list[float], chance: float) -> tuple[list[int], float]:
    """Cycles of one row whose drafts stand with one probability, drawn: their drafts, and tokens a second."""
    chosen, spent, emitted, numbers = [], 0.0, 0, random.Random(0)
    for _ in range(cycles):
        drafts = pace.choose(1)
        stood = next((k for k in range(drafts) if numbers.random() > chance), drafts)
        pace.measured(1, drafts, row[drafts])
        pace.accepted([stood], drafts)
        chosen.append(drafts)
        spent, emitted = spent + row[drafts], emitted + 1 + stood
    return chosen, emitted / spent


def test_trials_cost_what_they_may_and_see_every_number() -> None:
    """What a trial emits is not lost."""
    row = [1.0, 1.3, 1.9, 2.5]
    pace = made(3, 1, {1: row})
    chosen, _ = run(pace, 4000, row, 0.5)
    assert pace.best(1) == 1 and {*chosen} == {0, 1, 2, 3}
    spent = sum(row[k] for k in chosen)
    assert 0.5 * TRIALS < 1 - sum((1.0, 1.5, 1.75, 1.875)[k] for k in chosen) / spent / (1.5 / 1.3) < 1.05 * TRIALS
    assert min(chosen.count(k) for k in (0, 2, 3)) > 10


def test_drafts_that_stop_to_pay_are_given_up_and_taken_up_again() -> None:
    """Because of what they cost, then because of what is accepted; and what it loses meanwhile."""
    dear, cheap = [1.0, 1.6, 2.2, 2.8], [1.0, 1.15, 1.3, 1.45]
    pace = made(3, 1, {1: cheap}, 0.6)
    on, off = 1.75 / 1.3, 1.0  # tokens a second: of two drafts, and of none
    for row, chance, pays, speed in (
        (dear, 0.5, False, off), (cheap, 0.5, True, on), (cheap, 0.02, False, off), (cheap, 0.5, True, on),
    ):  # fmt: skip
        _, slow = run(pace, 1500, row, chance)
        chosen, fast = run(pace, 500, row, chance)
        assert sum((drafts > 0) == pays for drafts in chosen) > 0.75 * len(chosen), (row, chance)
        assert fast > 0.9 * speed and slow > 0.85 * speed

"""Lost overlap is found where it was lost, and nowhere else."""

import numpy as np
import pytest

from bebop.monitor.token_drift import Ints, Places, TokenDrift, share_out

KINDS = 40
BAD = 7


def places(seed: int, bad: float = 0.0, hotter: float = 1.0, answers: int = 30, each: int = 40) -> tuple[Places, Ints]:
    """Overlap falls with entropy, each kind lies off the curve by its own, and kind BAD loses ``bad``."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(KINDS, answers * each, p=np.arange(KINDS, 0, -1) / (KINDS * (KINDS + 1) / 2))
    entropy = hotter * rng.gamma(2.0, 0.3, answers * each)
    own = 0.1 * np.sin(np.arange(KINDS))[kind]
    overlap = 0.85 - 0.25 * entropy + own - bad * (kind == BAD) + rng.normal(0, 0.05, answers * each)
    answer = np.repeat(np.arange(answers), each)
    place = np.tile(np.arange(each), answers)
    found = Places(answer=answer, place=place, overlap=overlap.clip(0, 1), entropy=entropy)
    return found, kind.astype(np.int64)


def shared(bad: float = 0.0, hotter: float = 1.0) -> TokenDrift:
    (before, kinds), (after, later) = places(1), places(2, bad, hotter)
    return share_out(before, after, kinds, later)


def test_the_kind_that_lost_is_named_with_what_it_lost() -> None:
    drift = shared(bad=0.4)
    worst = drift.parts[0]
    assert worst.kind == BAD
    share = worst.after / 1200
    assert worst.loss.point == pytest.approx(0.4 * share, rel=0.2) and worst.loss.low > 0
    assert worst.loss.point / drift.loss.point > 0.8
    assert worst.overlap_after == pytest.approx(worst.overlap_before - 0.4, abs=0.08)
    assert worst.expected == pytest.approx(worst.overlap_before, abs=0.08)
    sure = [p.kind for p in drift.parts[1:] if p.loss.interval(0.999)[0] > 0 and p.loss.point > 0.1 * worst.loss.point]
    assert sure == []


def test_parts_add_up() -> None:
    drift = shared(bad=0.4, hotter=1.4)
    assert sum(part.loss.point for part in drift.parts) == pytest.approx(drift.loss.point, abs=1e-12)
    assert drift.change == pytest.approx(drift.explained - drift.loss.point, abs=1e-12)
    drawn = np.sum([part.loss.draws for part in drift.parts], axis=0)
    np.testing.assert_allclose(drawn, drift.loss.draws, atol=1e-9)


def test_entropy_is_no_loss_of_anybody() -> None:
    drift = shared(hotter=1.3)
    assert drift.change < -0.03 and drift.explained == pytest.approx(drift.change, abs=0.01)
    assert abs(drift.loss.point) < 0.01
    assert shared(bad=0.4).explained == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("certain", "expected"), [(1.0, 1.0), (0.0, 0.0)])
def test_no_overlap_is_expected_that_cannot_be(certain: float, expected: float) -> None:
    """A kind lies far off the curve in the steps before, where the curve is elsewhere than in those after."""
    kinds = (np.arange(400) % 4 == 0).astype(np.int64)
    now = np.full(400, 0.1 if certain else 2.0)
    entropy = np.where(kinds == 1, 2.0 if certain else 0.1, np.repeat([2.0, 0.1], 200))
    entropy += 0.01 * np.random.default_rng(0).random(400)  # bins are of places in the order of their entropies
    rest = np.where(entropy > 1, 0.1, 0.9)
    base = {"answer": np.arange(400) // 20, "place": np.arange(400) % 20}
    before = Places(**base, overlap=np.where(kinds == 1, certain, rest), entropy=entropy)
    after = Places(**base, overlap=np.where(kinds == 1, 0.5, np.where(now > 1, 0.1, 0.9)), entropy=now)
    drift = share_out(before, after, kinds, kinds)
    part = next(part for part in drift.parts if part.kind == 1)
    assert part.expected == expected and part.overlap_after == 0.5
    assert part.loss.point == pytest.approx((expected - 0.5) / 4)  # a quarter of all places
    assert sum(one.loss.point for one in drift.parts) == pytest.approx(drift.loss.point)


def test_examples_are_the_worst_places_of_different_answers() -> None:
    (before, kinds), (after, later) = places(1), places(2, 0.4)
    part = share_out(before, after, kinds, later, worst=4).parts[0]
    assert len(part.worst) == 4 and (later[part.worst] == BAD).all()
    assert len(set(after.answer[part.worst].tolist())) == 4
    assert after.overlap[part.worst].mean() < part.overlap_after


def test_intervals_hold_the_truth_over_runs() -> None:
    """95 % intervals of the planted loss, over 60 runs: 50 is the least that a binomial of .95 has in 999 of 1000."""
    held = {0.4: 0, 0.2: 0}  # what is planted is .4: the interval must not hold half of it
    for seed in range(60):
        (before, kinds), (after, later) = places(100 + seed, answers=20), places(500 + seed, 0.4, answers=20)
        drift = share_out(before, after, kinds, later)
        part = next(part for part in drift.parts if part.kind == BAD)
        for size in held:
            truth = size * part.after / len(after)  # given how often the kind occurred
            held[size] += part.loss.low <= truth <= part.loss.high
    assert held[0.4] >= 50 and held[0.2] < 10


def test_a_kind_that_is_new_or_gone_is_no_mistake() -> None:
    (before, kinds), (after, later) = places(1), places(2)
    drift = share_out(before, after, kinds, np.where(later == 3, 99, later))
    new = next(part for part in drift.parts if part.kind == 99)
    assert new.before == 0 and np.isnan(new.overlap_before) and np.isfinite(new.expected)
    assert 3 not in {part.kind for part in drift.parts}
    with pytest.raises(ValueError, match="no tested places"):
        share_out(before, Places(**{n: getattr(after, n)[:0] for n in after.__slots__}), kinds, later[:0])


def test_a_gain_lists_what_gained_first() -> None:
    (before, kinds), (after, later) = places(2, 0.4), places(1)
    drift = share_out(before, after, kinds, later)
    assert drift.loss.point < 0 and drift.parts[0].kind == BAD and drift.parts[0].loss.high < 0

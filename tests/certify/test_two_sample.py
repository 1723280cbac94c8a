"""Two engines without a reference: what differs is found, what does not is left alone, and nothing is learned early."""

import math

import numpy as np
import pytest

from bebop.certify.answers import Answer
from bebop.certify.two_sample import TwoSample, difference, features, repeated

pytestmark = pytest.mark.slow

ALARM = math.log(20)


def answers(rng: np.random.Generator, probs: np.ndarray, count: int, first: int = 0) -> list[Answer]:
    """Answers of eight tokens from one distribution, whatever came before."""
    drawn = rng.choice(len(probs), size=(count, 8), p=probs)
    return [Answer(request=first + i, prompt=(1,), token_ids=row.astype(np.int64)) for i, row in enumerate(drawn)]


FAIR = np.array([0.4, 0.3, 0.2, 0.1])
OTHER = np.array([0.3, 0.3, 0.2, 0.2])


def evidence(probs: np.ndarray, seed: int, pairs: int = 200, cls: type[TwoSample] = TwoSample) -> tuple[float, float]:
    """ln E at the end, and the highest on the way."""
    rng, test = np.random.default_rng(seed), cls()
    for _ in range(pairs // 10):
        test.update(answers(rng, probs, 10), answers(rng, FAIR, 10))
    return test.log_e, max(log_e for _, log_e in test.history)


def alarms(cls: type[TwoSample], runs: int) -> float:
    """Of runs in which both engines are the same, the share whose E ever reaches 20."""
    return sum(evidence(FAIR, seed, 100, cls)[1] >= ALARM for seed in range(runs)) / runs


class LearnsFirst(TwoSample):
    """Learns from a pair before it bets on it."""

    def _bet(self, apart: dict[tuple[str, int], float]) -> None:
        wins = self._wins.copy()
        super()._bet(apart)
        self._wins = wins
        super()._bet(apart)


def test_equal_engines_are_left_alone_and_a_test_that_learns_before_it_bets_is_caught() -> None:
    assert alarms(TwoSample, 60) <= 0.05
    assert alarms(LearnsFirst, 20) > 1 / 6


def test_engines_that_differ_are_found() -> None:
    assert evidence(OTHER, seed=1, pairs=400)[0] > math.log(1e4)


def test_the_history_counts_tokens_and_ends_at_the_present() -> None:
    rng, test = np.random.default_rng(0), TwoSample()
    assert test.log_e == 0
    test.update(answers(rng, FAIR, 4), answers(rng, FAIR, 4))
    assert test.history == [(32, test.log_e)] and test.pairs == 4


def test_answers_to_different_prompts_are_not_compared() -> None:
    one, other = (Answer(request=0, prompt=(i,), token_ids=np.array([1])) for i in range(2))
    with pytest.raises(ValueError, match="different prompts"):
        TwoSample().update([one], [other])


def test_what_answers_share_is_no_feature_of_their_difference() -> None:
    one = Answer(request=0, prompt=(1,), token_ids=np.array([2, 3, 3]))
    other = Answer(request=0, prompt=(1,), token_ids=np.array([2, 3]), finish_reason="length")
    apart = difference(features(one), features(other))
    assert ("at 0", 2) not in apart and apart[("at 2", 3)] == 1 and apart[("stopped", 0)] == 1
    assert apart[("count", 3)] == pytest.approx(math.sqrt(2) - 1)
    assert difference(features(one), features(one)) == {}


def test_repeats_by_seed_are_counted_by_answer() -> None:
    first = [Answer(request=i, prompt=(1,), token_ids=np.array([i, 1])) for i in range(4)]
    again = [*first[:3], Answer(request=3, prompt=(1,), token_ids=np.array([3]))]
    assert repeated(first, first) == 1 and repeated(first, again) == 0.75

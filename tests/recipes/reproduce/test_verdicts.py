"""p-values, Holm's correction, the noise of the arms and arms that are not what their name says; a fault each."""

import numpy as np
import pytest
from scipy import stats

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.measured import Number, of, over_seeds, quantile, student_tail
from recipes.reproduce.verdicts import LEVEL, Finding, Need, Part, Rule, corrected, floor, holm, judge, met, p_values

RNG = np.random.default_rng(0)


def seeds(mean: float, spread: float, count: int = 3) -> list[float]:
    """Numbers of single seeds with exactly this mean and standard deviation."""
    drawn = RNG.normal(size=count)
    return [float(x) for x in mean + spread * (drawn - drawn.mean()) / drawn.std(ddof=1)]


def rule(*parts: Part, needs: tuple[Need, ...] = (), claim: str = "C3") -> Rule:
    return Rule(claim=claim, statement="A.", text="a rule", evidence="Gain {gain}.", any_of=(parts,), needs=needs)


# ---- p-values


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 10])
def test_students_t_is_the_real_one(degrees: int) -> None:
    for t in (-3.0, -0.5, 0.0, 0.7, 2.0, 9.0):
        assert student_tail(t, degrees) == pytest.approx(stats.t.sf(t, degrees), rel=1e-9)
    assert quantile(degrees) == pytest.approx(stats.t.ppf(0.975, degrees), rel=1e-9)
    assert abs(student_tail(2.0, 2) - stats.norm.sf(2.0)) > 0.05  # the normal (broken) is far off at three seeds


def test_the_interval_gives_back_the_t_test() -> None:
    values = seeds(0.05, 0.02)
    stored = of(across_seeds(values), 3)
    assert 2 * stored.above(0.0) == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-3)
    assert stored.spread == pytest.approx(np.std(values, ddof=1), rel=1e-3)
    assert 2 * stored.above(stored.low) == pytest.approx(0.05, abs=1e-3)  # the bound of a 95 % interval
    bootstrap = Number(value=0.2, low=0.0, high=0.4)
    assert 2 * bootstrap.above(0.0) == pytest.approx(0.05, abs=1e-3)


def test_lost_digits_count_against_a_finding() -> None:
    exact = Number(value=0.016, low=0.0155, high=0.0165, seeds=3)
    rounded = Number(value=0.016, low=0.016, high=0.016, seeds=3, rounding=0.0005)
    assert rounded.above(0.01) > exact.above(0.01) > 0
    assert (
        Number(value=0.016, low=0.016, high=0.016, seeds=3).above(0.01) == 0
    )  # taken at its word, it would be certain


def test_sides_of_each_kind() -> None:
    up, small = Number(value=0.3, low=0.2, high=0.4), Number(value=0.0, low=-0.01, high=0.01)
    numbers = {"up": up, "small": small}
    cases = [
        (Part(number="up"), "confirmed"), (Part(number="up", kind="below"), "refuted"),
        (Part(number="up", bound=0.6), "refuted"), (Part(number="small", kind="within", bound=0.05), "confirmed"),
        (Part(number="up", kind="within", bound=0.05), "refuted"), (Part(number="up", kind="differs"), "confirmed"),
        (Part(number="small", kind="differs", bound=0.05), "refuted"),
    ]  # fmt: skip
    for part, side in cases:
        confirm, refute = p_values(part, numbers)
        assert (confirm < 0.001 < refute) if side == "confirmed" else (refute < 0.001 < confirm), part


def test_a_conjunction_is_as_weak_as_its_weakest_part() -> None:
    numbers = {"gain": over_seeds(seeds(1.0, 0.001)), "weak": over_seeds(seeds(0.01, 0.05))}
    [finding] = judge([rule(Part(number="gain"), Part(number="weak"))], numbers)
    assert finding.p > 0.05
    down = {**numbers, "weak": over_seeds(seeds(-1.0, 0.001))}
    [finding] = judge([rule(Part(number="gain"), Part(number="weak"))], down)
    assert (finding.side, finding.p < 0.01) == ("refuted", True)


# ---- Holm


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def wrong_verdicts(correct: bool, trials: int = 400) -> float:
    """How often a claim of ten findings without any effect gets a verdict."""
    wrong = 0
    for _ in range(trials):
        values = RNG.normal(size=(10, 4))
        numbers = {f"{i}": over_seeds(row) for i, row in enumerate(values)}
        findings = judge([rule(Part(number=name)) for name in numbers], numbers)
        one_by_one = [corrected([f])[0][0] for f in findings]  # the fault: each finding for itself
        words = [word for word, _ in corrected(findings)] if correct else one_by_one
        wrong += any(word != "undecided" for word in words)
    return wrong / trials


@pytest.mark.slow
def test_a_claim_of_many_findings_errs_no_more_than_one_finding() -> None:
    assert wrong_verdicts(correct=True) < LEVEL + 0.03
    assert wrong_verdicts(correct=False) > 0.3  # ten tries at 5 % each


def test_what_was_not_tested_takes_no_part() -> None:
    words = {"claim": "C1", "statement": "", "rule": "", "evidence": ""}
    real = [Finding(**words, p=0.02), Finding(**words, p=0.02)]
    idle = [Finding(**words, p=0.0001, untested="the arm fell") for _ in range(20)]
    assert corrected([*real, *idle])[:2] == corrected(real) == [("confirmed", 0.04)] * 2
    assert corrected([*real, *idle])[2] == ("not tested", None)


# ---- the noise of the arms


def test_a_gain_within_two_runs_of_one_arm_is_undecided() -> None:
    noise = 0.05
    numbers = {
        "gain": over_seeds(seeds(0.04, 0.003)),
        "a": over_seeds(seeds(3.0, noise)),
        "b": over_seeds(seeds(2.96, 0.01)),
    }
    part = Part(number="gain", arms=("a", "b"))
    assert floor(part, numbers) == pytest.approx(np.sqrt(2) * noise, rel=1e-3)
    two = RNG.normal(0, noise, (20_000, 2))
    assert floor(part, numbers) == pytest.approx(np.sqrt(np.mean((two[:, 0] - two[:, 1]) ** 2)), rel=0.03)
    assert corrected(judge([rule(part)], numbers))[0][0] == "undecided"
    assert corrected(judge([rule(Part(number="gain"))], numbers))[0][0] == "confirmed"  # the fault: no floor
    large = {**numbers, "gain": over_seeds(seeds(0.4, 0.003))}
    assert corrected(judge([rule(part)], large))[0][0] == "confirmed"


def test_noise_counts_against_a_refutation_as_well() -> None:
    numbers = {"gain": over_seeds(seeds(0.17, 0.004)), "a": over_seeds(seeds(3.0, 0.05))}
    assert corrected(judge([rule(Part(number="gain", bound=0.2))], numbers))[0][0] == "refuted"
    assert corrected(judge([rule(Part(number="gain", bound=0.2, arms=("a",)))], numbers))[0][0] == "undecided"


def test_the_noise_of_a_ratio_is_relative() -> None:
    numbers = {"gain": over_seeds(seeds(0.5, 0.01)), "speed": over_seeds(seeds(200.0, 10.0))}
    assert floor(Part(number="gain", arms=("speed",), relative=True), numbers) == pytest.approx(
        np.sqrt(2) * 0.05, rel=1e-3
    )


# ---- arms that are not what they are called


RISING = Need(number="entropy change", kind="above", otherwise="entropy did not rise")


def test_an_arm_that_did_not_do_what_its_name_says_is_not_tested() -> None:
    strong = {"gain": over_seeds(seeds(1.0, 0.001))}
    fell, rose = over_seeds(seeds(-0.03, 0.005)), over_seeds(seeds(0.03, 0.005))
    [finding] = judge([rule(Part(number="gain"), needs=(RISING,))], strong | {"entropy change": fell})
    assert finding.untested is not None and finding.untested.startswith("entropy did not rise: -0.030 [")
    assert corrected([finding]) == [("not tested", None)]
    [finding] = judge([rule(Part(number="gain"), needs=(RISING,))], strong | {"entropy change": rose})
    assert corrected([finding])[0][0] == "confirmed"
    [blind] = judge(
        [rule(Part(number="gain"))], strong | {"entropy change": fell}
    )  # the fault: nobody looks at the arm
    assert corrected([blind])[0][0] == "confirmed"


@pytest.mark.parametrize(
    ("kind", "value", "wanted"),
    [("above", 1, True), ("above", 0, False), ("above", -1, False), ("below", -1, True), ("below", 0, False),
     ("not above", 1, False), ("not above", 0, True), ("not above", -1, True), ("not below", -1, False)],
)  # fmt: skip
def test_what_a_name_promises(kind: str, value: float, wanted: bool) -> None:
    need = Need(number="x", kind=kind, otherwise="not so")  # type: ignore[arg-type]
    assert met(need, Number(value=value, low=value - 0.5, high=value + 0.5)) is wanted


def test_numbers_that_were_not_measured_decide_nothing() -> None:
    [finding] = judge([rule(Part(number="gain", arms=("a",)))], {"gain": over_seeds(seeds(1.0, 0.01))})
    assert finding.untested == "not measured: a"

"""What drafts bring on a GPU: rules that come out either way, and a prediction held against rounds of known speed."""

from collections.abc import Mapping

import pytest
import torch

from bebop.errors import UserError
from recipes.reproduce.real_pays.rounds import LENGTHS, Round
from recipes.reproduce.real_pays_gpu import __main__ as study
from recipes.reproduce.real_pays_gpu.analysis import beside_prediction, facts, numbers, prediction_table
from recipes.reproduce.real_pays_gpu.findings import BATCHES, RULES
from recipes.reproduce.verdicts import judge
from tests.recipes.reproduce.test_names import missing
from tests.recipes.reproduce.test_real_pays import COSTS, planted

SECONDS = {0: 0.001, **{k: 0.001 * (k * COSTS.draft + COSTS.verify[k]) for k in LENGTHS}}  # what is planted


def rounds(**options: float) -> dict[int, list[Round]]:
    return {batch: [planted(seed=10 * batch + i, **options) for i in range(4)] for batch in BATCHES}


def judged(seconds: Mapping[int, float], **options: float) -> dict[str, set[str]]:
    found, predicted = rounds(**options), dict.fromkeys(BATCHES, seconds)
    sides: dict[str, set[str]] = {}
    for finding in judge(RULES, numbers(found, predicted), facts(found, predicted)):
        about = "prediction" if "roofline" in finding.statement else finding.claim
        assert finding.p < 0.01 and finding.untested is None
        sides.setdefault(about, set()).add(finding.side)
    return sides


def test_findings_follow_what_was_planted() -> None:
    right = judged(SECONDS)
    assert right == {name: {"confirmed"} for name in ("C5", "C2", "beyond", "prediction")}
    slow = judged(SECONDS, overhead=0.5)  # cycles take more than their passes
    assert slow == {"C5": {"refuted"}, "C2": {"confirmed"}, "beyond": {"refuted"}, "prediction": {"refuted"}}
    dear = judged(SECONDS | {k: 2 * SECONDS[k] for k in LENGTHS})  # draft steps were predicted to cost more
    assert dear == right | {"prediction": {"refuted"}}


def test_the_prediction_is_held_against_what_a_whole_cycle_took() -> None:
    assert beside_prediction(planted(), SECONDS) == pytest.approx(0, abs=0.01)
    assert beside_prediction(planted(prefill=0.5), SECONDS) == pytest.approx(0, abs=0.01), "prefill plays no part"
    assert beside_prediction(planted(overhead=0.25), SECONDS) == pytest.approx(-0.2, abs=0.01)
    line = prediction_table({8: [planted(seed=i) for i in range(3)]}, {8: SECONDS})[1]
    assert (line["K"], line["predicted"]) == (2, pytest.approx(1.6))
    assert line["x predicted"].value == pytest.approx(line["x plain, prefill left out"].value, rel=0.01)


def test_every_name_of_the_rules_is_measured() -> None:
    found, predicted = rounds(), dict.fromkeys(BATCHES, SECONDS)
    names = [*numbers(found, predicted), *facts(found, predicted)]
    assert missing("real_pays_gpu", names) == set()
    assert missing("real_pays_gpu", names[1:]) == {"accept length"}  # the test can fail


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(study, "QUICK", False)
    with pytest.raises(UserError, match=r"needs a GPU, and torch finds none; on a processor: recipes\.reproduce\."):
        study.policy()

"""Speed against acceptance on a real model, on a processor and on a GPU: choices, costs and ratios that are known."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from bebop.errors import UserError
from bebop.metrics.intervals import across_seeds
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams
from recipes.reproduce.real.plan import load
from recipes.reproduce.real_pays import analysis, prediction, rounds
from recipes.reproduce.real_pays.findings import BATCHES, RULES
from recipes.reproduce.real_pays.rounds import ARMS, LENGTHS, PLAIN, Arm, Round, Rounds, Sizes
from recipes.reproduce.real_pays_gpu import __main__ as gpu_study
from recipes.reproduce.real_pays_gpu import analysis as gpu
from recipes.reproduce.real_pays_gpu import findings as gpu_findings
from recipes.reproduce.throughput.timing import Costs, Timed
from recipes.reproduce.verdicts import judge
from tests.recipes.reproduce.real_builders import PLAN
from tests.recipes.reproduce.synthetic import check_names

COSTS = Costs(draft=0.2, verify={1: 1.1, 2: 1.2, 3: 1.3})
LENGTH = {1: 1.5, 2: 1.9, 3: 2.0}  # accept length by K


def timed(speed: float, accept_length: float = 1.0, prefill: float = 0.0) -> Timed:
    cycles = 1000
    return Timed(
        speed=speed, wall=speed, cycles=cycles, accepted=cycles * (accept_length - 1), shares={"prefill": prefill}
    )


def planted(overhead: float = 0.0, seed: int = 0, greedy: float = 0.9, prefill: float = 0.0) -> Round:
    """Speeds as accept length and costs have them, cycles slower by ``overhead``, plus prefill of equal cost in all."""
    rng = np.random.default_rng(seed)

    def speed(arm: Arm) -> float:
        system, k = arm
        length = LENGTH[k] if k else 1.0
        ratio = length / ((0.2 * k + COSTS.verify[k]) * (1 + overhead)) if k else 1.0
        return float(100 * ratio * (greedy if system == "target_only" else 1.0) * (1 + 0.001 * rng.normal()))

    found = {}
    for arm in ARMS:
        alone = speed(arm)
        whole = 1 / (1 / alone + prefill / 100)  # seconds a token
        found[arm] = timed(whole, LENGTH[arm[1]] if arm[1] else 1.0, prefill=1 - whole / alone)
        if arm[0] == "target_only":
            found[arm] = timed(whole, 1 + (LENGTH[arm[1]] - 1) * greedy, prefill=1 - whole / alone)
    return Round(timed=found, costs=COSTS)


def everywhere(batches: Iterable[int] = BATCHES, **options: float) -> Rounds:
    return {batch: [planted(seed=10 * batch + i, **options) for i in range(4)] for batch in batches}


def test_the_number_of_drafts_is_chosen_by_the_other_rounds() -> None:
    """Broken: the best of the round itself, which gains by luck."""
    rng = np.random.default_rng(3)
    lucky = [
        Round(timed={arm: timed(100 * (1 + 0.2 * rng.normal() * (arm != PLAIN))) for arm in ARMS}, costs=COSTS)
        for _ in range(200)
    ]
    honest = analysis.at_best(lucky, "bebop").value
    best = np.mean([max(one.ratio(("bebop", k)) for k in LENGTHS) for one in lucky])
    assert honest == pytest.approx(1, abs=0.05) and best > 1.1
    three = [planted(seed=i) for i in range(3)]
    three[0].timed["bebop", 3] = timed(1000)
    assert analysis.chosen(three, "bebop") == [("bebop", 2), ("bebop", 3), ("bebop", 3)]
    assert analysis.best_length(three, "bebop") == 3


def test_a_cycle_breaks_even_at_what_its_passes_cost() -> None:
    one = planted()
    assert analysis.break_even(one, 3) == pytest.approx(1.9) and analysis.modelled(one, ("bebop", 2)) == pytest.approx(
        1.9 / 1.6
    )
    slow = planted(overhead=0.5)
    assert analysis.cycle(slow, ("bebop", 3)) == pytest.approx(1.9 * 1.5, rel=0.01)
    assert analysis.cycle(planted(overhead=0.5, prefill=1.0), ("bebop", 3)) == pytest.approx(1.9 * 1.5, rel=0.01)


def test_prefill_is_left_out_of_decoding_alone_and_counts_in_what_is_judged() -> None:
    without, long = planted(), planted(prefill=0.5)
    arm = ("bebop", 2)
    assert analysis.decoding_ratio(long, arm) == pytest.approx(without.ratio(arm), rel=0.01)
    assert long.ratio(arm) < without.ratio(arm) - 0.03
    assert analysis.beside_model(long) == pytest.approx(analysis.beside_model(without), abs=0.005)


def test_ratios_are_taken_within_a_round() -> None:
    """Broken: a ratio of means, where one round was slow for all arms."""
    usual, slow = planted(), planted(seed=1)
    slow = Round(timed={arm: timed(one.speed / 10) for arm, one in slow.timed.items()}, costs=COSTS)
    found = analysis.over_rounds([usual, slow], lambda one: one.ratio(("bebop", 1)))
    assert found == across_seeds([usual.ratio(("bebop", 1)), slow.ratio(("bebop", 1))])
    assert found.value == pytest.approx(1.5 / 1.3, rel=0.01)


def test_findings_follow_what_was_planted() -> None:
    for options, faster, beside in (({}, "confirmed", "confirmed"), ({"overhead": 0.5}, "refuted", "refuted")):
        found = everywhere(**options)
        numbers, facts = analysis.numbers(found), analysis.facts(found)
        sides = {(f.claim, f.side) for f in judge(RULES, numbers, facts) if f.p < 0.05 and f.untested is None}
        assert sides == {("C5", faster), ("C2", "confirmed"), ("beyond", beside)}
    gained = {f.side for f in judge(RULES, analysis.numbers(everywhere(greedy=1.2))) if f.claim == "C2"}
    assert gained == {"refuted"}


def test_every_name_of_the_rules_is_measured() -> None:
    found, on_gpu = everywhere(), everywhere(gpu_findings.BATCHES)
    predicted = dict.fromkeys(gpu_findings.BATCHES, SECONDS)
    check_names("real_pays", [*analysis.numbers(found), *analysis.facts(found)])
    check_names("real_pays_gpu", [*gpu.numbers(on_gpu, predicted), *gpu.facts(on_gpu, predicted)])


def test_tables_say_whether_drafts_pay() -> None:
    assert {line["pays"] for line in analysis.costs_table(everywhere())} == {"yes"}
    assert {line["pays"] for line in analysis.costs_table(everywhere(overhead=0.5))} == {"not shown"}
    shares = analysis.speeds_table(everywhere(prefill=0.5))[0]
    assert shares["prefill %"] + shares["other %"] == pytest.approx(100)


def test_the_prediction_is_roofline_arithmetic() -> None:
    model = prediction.shape(load(PLAN))
    gpu = prediction.H100

    def moved(weights: float) -> float:
        return 2 * weights / (gpu.bandwidth * gpu.traffic)

    context = 60 + rounds.NEW_TOKENS / 2
    cache = model.layers * model.kv_bytes * context / (gpu.bandwidth * gpu.traffic)
    plain = gpu.launch + moved(model.multiplied) + cache
    assert prediction.cycle(model, 1, 60.0, 0) == pytest.approx(plain)
    draft = moved(model.head + model.output) + cache / model.layers
    assert prediction.cycle(model, 1, 60.0, 3) == pytest.approx(plain + 3 * draft, rel=1e-3)
    (first, *_), seconds = prediction.table(model, 60.0, {1: 1.5, 2: 1.9, 3: 2.0}), prediction.cycle(model, 1, 60.0, 1)
    assert first["kind"] == "prediction" and first["x plain"] == pytest.approx(1.5 * plain / seconds)
    assert first["x plain, a launch each draft step"] == pytest.approx(1.5 * plain / (seconds + gpu.launch))
    speeds = [line["break-even"] for line in prediction.table(model, 60.0, LENGTH) if line["batch"] == 8]
    assert all(a < b for a, b in pairwise(speeds))


@pytest.mark.slow
def test_rounds_have_prompts_of_their_own_and_all_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "NEW_TOKENS", 4)
    monkeypatch.setattr(rounds, "PLAN", PLAN)
    model = load(PLAN)
    prompts = rounds.held_out_prompts(model)
    asked = [rounds.requests(model, [(i,) for i in range(8)], 8, turn) for turn in (0, 1, 2)]
    assert [r.token_ids[0] for some in asked for r in some] == [i // 4 for i in range(24)]
    assert len({r.params.seed for some in asked for r in some}) == 24
    alone = [rounds.requests(model, [(i,) for i in range(8)], 1, turn)[0].token_ids for turn in (0, 1, 2)]
    assert alone == [(0,), (1,), (2,)]
    assert all(not r.params.stop_token_ids for r in rounds.endless(asked[0]))
    calls: list[int] = []
    sizes = Sizes(rounds=2, answers={1: 1, 2: 2}, repeats=1)
    found = rounds.measure(model, prompts, lambda: calls.append(1), sizes)
    assert {batch: [set(one.timed) for one in each] for batch, each in found.items()} == {
        1: [set(ARMS)] * 2,
        2: [set(ARMS)] * 2,
    }
    assert len(calls) == sizes.runs == 2 * 2 * (len(ARMS) + 1)
    assert all(
        0 < one.costs.draft < 3 and set(one.costs.verify) == set(LENGTHS) for each in found.values() for one in each
    )


def test_no_round_begins_after_the_time_is_up_but_two_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "run", lambda *asked: timed(100.0))
    monkeypatch.setattr(rounds, "costs", lambda *asked: COSTS)
    monkeypatch.setattr(rounds, "requests", lambda *asked: [])
    for seconds, made in ((0.0, 2), (1e9, 5)):
        sizes = Sizes(rounds=5, answers={1: 1}, repeats=1, seconds=seconds)
        assert len(rounds.measure(load(PLAN), [(1,)], lambda: None, sizes)[1]) == made


def test_a_head_that_is_not_trained_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "QUICK", False)
    monkeypatch.setattr(rounds, "HEAD", tmp_path / "best.safetensors")
    with pytest.raises(UserError, match=r"best\.safetensors is not there: run first .* --heads shared"):
        rounds.policy()


# ---- on a GPU

SECONDS = {0: 0.001, **{k: 0.001 * (k * COSTS.draft + COSTS.verify[k]) for k in LENGTHS}}  # what is planted


def judged(seconds: Mapping[int, float], **options: float) -> dict[str, set[str]]:
    found, predicted = everywhere(gpu_findings.BATCHES, **options), dict.fromkeys(gpu_findings.BATCHES, seconds)
    sides: dict[str, set[str]] = {}
    for finding in judge(gpu_findings.RULES, gpu.numbers(found, predicted), gpu.facts(found, predicted)):
        about = "prediction" if "roofline" in finding.statement else finding.claim
        assert finding.p < 0.01 and finding.untested is None
        sides.setdefault(about, set()).add(finding.side)
    return sides


def test_findings_on_a_gpu_follow_what_was_planted() -> None:
    right = judged(SECONDS)
    assert right == {name: {"confirmed"} for name in ("C5", "C2", "beyond", "prediction")}
    slow = judged(SECONDS, overhead=0.5)  # cycles take more than their passes
    assert slow == {"C5": {"refuted"}, "C2": {"confirmed"}, "beyond": {"refuted"}, "prediction": {"refuted"}}
    dear = judged(SECONDS | {k: 2 * SECONDS[k] for k in LENGTHS})  # draft steps were predicted to cost more
    assert dear == right | {"prediction": {"refuted"}}


def test_the_prediction_is_held_against_what_a_whole_cycle_took() -> None:
    assert gpu.beside_prediction(planted(), SECONDS) == pytest.approx(0, abs=0.01)
    assert gpu.beside_prediction(planted(prefill=0.5), SECONDS) == pytest.approx(0, abs=0.01), "prefill plays no part"
    assert gpu.beside_prediction(planted(overhead=0.25), SECONDS) == pytest.approx(-0.2, abs=0.01)
    line = gpu.prediction_table({8: [planted(seed=i) for i in range(3)]}, {8: SECONDS})[1]
    assert (line["K"], line["predicted"]) == (2, pytest.approx(1.6))
    assert line["x predicted"].value == pytest.approx(line["x plain, prefill left out"].value, rel=0.01)


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_study, "QUICK", False)
    with pytest.raises(UserError, match=r"needs a GPU, and torch finds none; on a processor: recipes\.reproduce\."):
        gpu_study.policy()


def test_runs_that_are_not_timed_reach_every_size_of_context() -> None:
    wanted = [Request(id=0, token_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=64))]
    assert rounds.repeated(wanted, 0) == wanted
    assert rounds.repeated(wanted, 7)[0].token_ids == (5, 6, 7, 5, 6, 7, 5)

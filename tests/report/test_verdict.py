"""The first two sentences of a report: right about runs whose course is known, and on the page before anything else."""

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.monitor.controller import Health
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.records import from_averages, from_groups
from bebop.report.__main__ import main
from bebop.report.runs import Run
from bebop.report.verdict import NOTHING, said
from bebop.run_dir.checkpoints import link_model
from bebop.trajectory_db.reader import NAME
from tests.monitor.synthetic import Truth, constant, step_groups
from tests.report.test_drift import watched_run
from tests.report.test_report import write_run

STEPS = 14
SURE, FITTING = constant(0.5), constant(0.0)


def explained(
    entropy: Callable[[int], float] = SURE,
    mismatch: Callable[[int], float] = FITTING,
    steps: int = STEPS,
    health: Health | None = None,
) -> list[Explanation]:
    monitor = DriftMonitor(MonitorSettings(rate="overlap"))
    truth = Truth(entropy=entropy, mismatch=mismatch)
    told = []
    for step in range(1, steps + 1):
        records = from_groups(step_groups(truth, step), step, step - 1)
        told.append(monitor.observe(records, health=health if step == steps else None))
    return [e for e in told if e is not None]


def run(reward: list[float | None] | None = None, columns: Any = None, **config: Any) -> Run:
    rewards = np.linspace(0.2, 0.8, STEPS).tolist() if reward is None else reward
    config = {"decoding": {"system": "bebop"}} | config
    steps = list(range(1, len(rewards) + 1))
    return Run(name="r", config=config, steps=steps, columns={"reward/mean": rewards, **(columns or {})})


def fallen(step: int) -> float:
    return -0.5 if step > 8 else 0.0


def late(by: float) -> Callable[[int], float]:
    return lambda step: 0.5 + by if step > 8 else 0.5


def test_a_head_that_stops_fitting_is_to_be_trained() -> None:
    told = said(run(), explained(mismatch=lambda step: -0.5 if step > 8 else 0.0))
    assert re.match(r"The reward rose in 14 steps \(0\.\d\d → 0\.\d\d\); acceptance lost 0\.\d+ \[0", told.verdict)
    assert "tokens a cycle because the draft head no longer fits the policy." in told.verdict
    assert told.advice == "Train the head beside the policy: go on with cotrain.mode=auto."
    lost = explained(mismatch=fallen)
    assert "has not caught up" in said(run(cotrain={"mode": "always"}), lost).advice
    assert "part=block" in said(run(decoding={"system": "block"}), lost).advice


def test_a_policy_that_is_less_certain_is_no_reason_to_train_the_head() -> None:
    told = said(run(), explained(entropy=late(0.6)))
    assert "because the policy has become less certain; the head still fits." in told.verdict
    assert told.advice.startswith("Leave the head as it is")


def test_gains_and_steadiness_ask_for_nothing() -> None:
    for mismatch, entropy, words in (
        (lambda step: 0.4 if step > 8 else 0.0, SURE, "because drafts fit the policy better"),
        (FITTING, late(-0.4), "because the policy is more certain"),
        (FITTING, SURE, "acceptance held, at 2.8 ["),
    ):
        told = said(run(), explained(entropy=entropy, mismatch=mismatch))
        assert words in told.verdict and told.advice == NOTHING


def averaged(length: Callable[[int], float], entropy: Callable[[int], float], steps: int) -> list[Explanation]:
    """A log of averages, with some scatter; an entropy of NaN was not logged."""
    rng, monitor = np.random.default_rng(8), DriftMonitor(MonitorSettings())
    told = []
    for step in range(1, steps + 1):
        own, noise = rng.normal(size=2)
        values = {"length": length(step) + 0.02 * noise, "entropy": entropy(step) + 0.015 * own}
        told.append(monitor.observe(from_averages(step, **values, cycles=1.0)))
    return [e for e in told if e is not None]


@pytest.mark.parametrize(("by", "word"), [(-1.0, "fell"), (1.0, "rose")])
@pytest.mark.parametrize("entropy", [math.nan, 0.5])
def test_a_change_whose_cause_is_not_known_is_no_steadiness(by: float, word: str, entropy: float) -> None:
    told = said(None, averaged(lambda step: 3.2 + by * (step > 8), constant(entropy), 16))
    assert re.match(rf"Acceptance {word} by 1 \[0\.9\d*, 1\.\d\] tokens a cycle", told.verdict)
    assert told.verdict.endswith(", and why is not known: 5 prompts, it takes 16.")
    assert "held" not in told.verdict and (told.advice == NOTHING) == (by > 0)


def test_a_cause_that_is_known_no_more_is_said_to_be_of_before() -> None:
    parts = averaged(lambda step: 3.0 - 0.4 * (step > 25), lambda step: 0.5 + (step > 35), 45)
    assert {e.state for e in parts[30:]} == {"mismatch-driven"} and not parts[33].parts["length"].unidentified
    assert parts[-1].parts["length"].unidentified
    told = said(None, parts)
    assert re.search(r"Acceptance fell by 0\.\d+ \[0\.\d+, 0\.\d+\] tokens a cycle", told.verdict)
    assert "at first because the draft head no longer fits the policy; why is not known any more: " in told.verdict
    assert "nan" not in told.verdict and "held" not in told.verdict and told.advice != NOTHING


def test_what_was_not_measured_is_not_said_to_have_held() -> None:
    *before, last = explained()
    unknown = Estimate.unknown(400)
    bare = dataclasses.replace(last.parts["length"], change=unknown, unidentified="entropy was not measured")
    told = said(run(), [*before, dataclasses.replace(last, length=unknown, parts={"length": bare})])
    assert told.verdict.endswith("; too little was measured to say whether acceptance moved.")
    assert "held" not in told.verdict and told.advice != NOTHING


def test_what_is_broken_comes_first() -> None:
    told = said(run(), explained(health=Health(worker=1, version=3, expected_version=5)))
    assert "has not drafted or drawn as it should since step 14." in told.verdict
    assert "rollout worker 1's weight version is 3, not 5" in told.advice


@pytest.mark.parametrize(
    ("one", "told", "verdict", "advice"),
    [
        (run(), 3, "takes more steps to say whether it moves", "first five steps"),
        (run(), 0, "why acceptance moved was not watched", "monitor.drift=true"),
        (run(decoding={"system": "autoregressive"}), 0, "nothing was drafted", "decoding=bebop."),
        (run(reward=[0.5, 0.4]), 3, "after 2 steps it is too early", "first five steps"),
        (dataclasses.replace(run(reward=[None, 0.5, 0.4]), steps=[0, 1, 2]), 3, "after 2 steps it is", "first five"),
        (run(reward=[0.5, 0.1] * 7), 0, "the reward did not move clearly", "monitor.drift=true"),
        (run(reward=[0.9] * 5 + [0.1, 0.15] * 4), 0, "the reward fell in 13 steps (0.90 → 0.12)", "monitor.drift"),
        (None, 3, "takes more steps", "first five steps"),
    ],
)
def test_what_is_not_known_is_said(one: Run | None, told: int, verdict: str, advice: str) -> None:
    words = said(one, explained(steps=told) if told else [])
    assert verdict in words.verdict[:1].lower() + words.verdict[1:] and advice in words.advice


def test_a_trainer_that_waits_is_given_something_to_do() -> None:
    idle = {"time/step": [10.0] * STEPS, "time/idle": [4.0] * STEPS}
    told = said(run(columns=idle, rollout={"staleness": 0}), explained())
    assert told.advice == "The trainer waits for completions 40 % of the time: try rollout.staleness=1."
    assert "rollout.workers" in said(run(columns=idle), explained()).advice


@pytest.mark.parametrize(
    ("given", "config", "told", "command"),
    [
        ([], {}, {}, "runtime.dir=PLACE runtime.resume=true monitor.drift=true"),
        ([], {"trainer": {"steps": STEPS}}, {}, f"monitor.drift=true trainer.steps={2 * STEPS}"),
        ([], {"trainer": {"steps": 99}}, {"steps": 3}, "runtime.dir=PLACE runtime.resume=true"),
        ([], {"decoding": {"system": "autoregressive"}}, {}, "runtime.resume=true decoding=bebop"),
        ([], {}, {"entropy": late(0.6)}, "runtime.resume=true decoding=bebop_adaptive"),
        ([], {}, {"mismatch": fallen}, "runtime.resume=true cotrain.mode=auto"),
        (["task=gcd", "seed=3"], {"cotrain": {"mode": "always"}, "model": {"path": "tiny"}}, {"mismatch": fallen},
         "python -m bebop.adapt model.path=PLACE/checkpoints/step_000014/policy task=gcd head.lr=0.002"),
        ([], {"decoding": {"system": "block"}}, {"mismatch": fallen}, "python -m bebop.adapt part=block model.path="),
        ([], {}, {"health": Health(worker=1, version=3, expected_version=5)}, ""),
        ([], {}, {"entropy": SURE}, ""),
    ],
)  # fmt: skip
def test_advice_comes_with_a_command_that_carries_it_out(
    given: list[str], config: Any, told: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (7, 14):
        (tmp_path / f"a b/checkpoints/step_{step:06}/policy").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    one = dataclasses.replace(run(**config), folder=tmp_path / "a b", given=given)
    words = said(one, explained(**told) if told else []).command.replace("'", "")
    assert command.replace("PLACE", "a b") in words and bool(words) == bool(command)


def test_a_model_that_a_link_leads_to_is_adapted_by_its_short_name(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_000014/policy").mkdir(parents=True)
    link_model(tmp_path, tmp_path / "checkpoints/step_000014")
    one = dataclasses.replace(run(cotrain={"mode": "always"}), folder=tmp_path, given=[])
    assert said(one, explained(mismatch=fallen)).command == f"python -m bebop.adapt model.path={tmp_path}/model"
    (tmp_path / "model/adapter_config.json").touch()  # an adapter is no model, until it is merged
    merging = f"python -m bebop.export --run {tmp_path} --out {tmp_path}/merged"
    adapting = f"python -m bebop.adapt model.path={tmp_path}/merged"
    assert said(one, explained(mismatch=fallen)).command == f"{merging} && {adapting}"


def test_a_setting_that_may_not_change_asks_for_the_run_anew(tmp_path: Path) -> None:
    idle = {"time/step": [10.0] * STEPS, "time/idle": [4.0] * STEPS}
    given = ["task=gcd", "rollout.staleness=0", f"runtime.dir={tmp_path}"]
    one = dataclasses.replace(run(columns=idle, rollout={"staleness": 0}), folder=tmp_path, given=given)
    assert said(one, explained()).command == "python -m bebop.run task=gcd rollout.staleness=1"
    one = dataclasses.replace(run(columns=idle, rollout={"staleness": 1, "workers": 2}), folder=tmp_path)
    assert said(one, explained()).command.endswith("runtime.resume=true rollout.workers=3")


def test_the_page_opens_with_it_and_shows_the_way_to_the_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = watched_run(tmp_path / "<spoiled>")
    main([str(one)])
    page = (one / "report.html").read_text()
    first = page.split("<main>")[0]
    assert "because the draft head no longer fits the policy." in first and "go on with cotrain.mode=auto." in first
    assert "bebop.view" not in page  # no answers were kept
    (one / NAME).touch()
    other = write_run(tmp_path / "other")
    out = tmp_path / "both.html"
    main([str(one), str(other), "--out", str(out)])
    first = out.read_text().split("<main>")[0]
    assert first.count("class='verdict'") == 2 and "<b>&lt;spoiled&gt;:</b>" in first and "<b>other:</b>" in first
    assert "python -m bebop.view" in first and "href='http://127.0.0.1:" in first
    monkeypatch.chdir(tmp_path)
    main([str(one), "--out", str(out)])
    assert "<code>python -m bebop.view &#x27;&lt;spoiled&gt;&#x27;</code>" in out.read_text()  # no path of the machine
    main(["--from", str(one / "drift.jsonl"), "--out", str(out)])
    assert "no longer fits the policy." in out.read_text().split("<main>")[0]

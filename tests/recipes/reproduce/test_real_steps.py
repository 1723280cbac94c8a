"""Steps of RL with drafts and without, on the real model and asynchronous ones on the built-in model.

What is taken from the jobs, and that their numbers are those of the rules.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.config.compose import job_config
from bebop.errors import UserError
from recipes import stages
from recipes.reproduce.async_steps import __main__ as asynchronous
from recipes.reproduce.async_steps import jobs
from recipes.reproduce.async_steps.findings import RULES as ASYNC_RULES
from recipes.reproduce.real_steps import __main__ as main
from recipes.reproduce.real_steps import pairs
from recipes.reproduce.real_steps.findings import RULES
from recipes.reproduce.real_steps.pairs import ARMS, NUMBERS, STEPS, Job, carry_out, overrides, ratio, share
from recipes.reproduce.scope import scope_of
from tests.cases import slow_but
from tests.recipes.reproduce.synthetic import check_names


def job(**changes: list[float]) -> Job:
    made = {"step": [10.0, 14.0], "rollout": [2.0, 4.0], "update": [7.0, 8.0], "tokens": [100.0, 200.0]}
    return Job(**{**made, "accept_length": [1.0, 1.0], **changes})


PAIR = {"plain": job(), "drafts": job(step=[9.0, 11.0], rollout=[1.0, 2.0], tokens=[150.0, 250.0])}


def test_times_are_those_of_a_token_and_of_a_step() -> None:
    """Rollouts of the two jobs are not equally long, so their time counts per token."""
    assert ratio(PAIR, "rollouts") == pytest.approx((6 / 300) / (3 / 400))
    assert ratio(PAIR, "steps") == pytest.approx(12 / 10)
    assert share(PAIR) == pytest.approx(6 / 24)
    found = main.numbers([PAIR, PAIR])
    assert {n: found[n].value for n in ("rollouts", "steps")} == {n: ratio(PAIR, n) for n in ("rollouts", "steps")}
    assert {name for rule in RULES for ((part,),) in [rule.any_of] for name in (part.number,)} <= set(found)
    assert [row["arm"] for row in main.rows([PAIR])] == list(ARMS)


@pytest.mark.parametrize("arm", slow_but(["drafts"], ARMS))
def test_jobs_differ_in_their_decoding_alone(arm: str, tmp_path: Path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "?", "answer": "!"}) + "\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    given = overrides(tmp_path / "model", questions, 1, arm, tmp_path / "run")
    config = job_config([one for one in given if not one.startswith("model=")])
    assert config.decoding.system == {"plain": "autoregressive", "drafts": "bebop"}[arm]
    assert (config.model.path, config.trainer.steps) == (str(tmp_path / "model"), STEPS)
    assert config.trainer.save_every == STEPS and config.rollout.staleness == 0 and config.cotrain.mode == "off"
    others = [overrides(tmp_path / "model", questions, 1, one, tmp_path / "run") for one in ARMS]
    assert all(set(given) ^ set(other) <= {one for own in ARMS.values() for one in own} for other in others)


def test_the_first_step_does_not_count_and_a_finished_job_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(command: str, *given: str) -> None:
        ran.append(command)
        folder = Path(next(one.partition("=")[2] for one in given if one.startswith("runtime.dir=")))
        folder.mkdir(parents=True)
        rows = [{name: 100.0 * (not step) + step for name in NUMBERS} for step in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(stages, "bebop", run)
    monkeypatch.setattr(pairs, "STEPS", 3)
    made = [carry_out(tmp_path / "m", tmp_path / "q", 0, "plain", tmp_path) for _ in range(2)]
    assert ran == ["run"] and made[0] == made[1]
    assert made[0].step == made[0].tokens == [1.0, 2.0]
    assert not (tmp_path / "plain-0" / "run").exists()


# ---- asynchronous steps


def async_job(step: float, rollout: float, update: float, reward: list[float], length: float = 1.0) -> jobs.Job:
    """A job of eight steps, of which the first three do not count."""
    row = {"time/step": step, "time/rollout": rollout, "time/update": update, "response/tokens": 100.0}
    rows = {name: [100.0] * 3 + [value] * 5 for name, value in row.items()}
    return jobs.Job(rows={**rows, "reward/mean": reward, "accept length": [length] * 8}, busy=2.0)


LATE, NEVER = [0.4] * 3 + [0.9] * 5, [0.4] * 8
ASYNC = {
    jobs.PLAIN: async_job(12.0, 12.0, 4.0, LATE),
    jobs.GREEDY: async_job(8.0, 8.0, 4.0, LATE, 2.5),
    jobs.SAMPLED: async_job(6.0, 6.0, 4.0, LATE, 3.0),
}


def test_asynchronous_steps_are_compared_within_a_seed() -> None:
    found = asynchronous.numbers({0: ASYNC, 1: ASYNC, 2: ASYNC})
    check_names("async_steps", found)
    value = {name: number.value for name, number in found.items()}
    assert value["steps, RS + TV"] == value["rollouts, RS + TV"] == pytest.approx(2.0)
    assert value["steps, TO + CE"] == pytest.approx(1.5) and value["greedy over sampled"] == pytest.approx(8 / 6)
    assert value["rollout share, plain"] == pytest.approx(0.75) and value["ceiling"] == pytest.approx(3.0)
    assert value["beside formula"] == pytest.approx(0.0), "the longer part is what a step takes"
    waits = {**ASYNC, jobs.SAMPLED: async_job(9.0, 6.0, 4.0, LATE, 3.0)}
    assert asynchronous.beside_formula(waits) == pytest.approx((1.0 + 4 / 3 / 2) / 2 - 1)


def test_the_time_to_a_reward_counts_every_step_until_five_reach_it() -> None:
    """.4, .4, .9, .9, .9 is the first window of five above .65."""
    plain = ASYNC[jobs.PLAIN]
    assert plain.reaching() == 6 and plain.seconds_to_bar() == 3 * 100.0 + 3 * 12.0
    never = async_job(12.0, 12.0, 4.0, NEVER)
    assert never.reaching() is None and never.seconds_to_bar() == 3 * 100.0 + 5 * 12.0
    found = asynchronous.numbers({seed: {**ASYNC, jobs.PLAIN: never} for seed in range(3)})
    assert found["reached, plain"].value == 0.0
    rows = asynchronous.rows({0: {**ASYNC, jobs.PLAIN: never}})
    assert rows[0]["seconds to it"] is None and rows[1]["step of the reward"] == 6


def test_what_a_processor_says_of_asynchronous_steps_does_not_count_for_the_claim() -> None:
    kinds = [scope_of("async_steps", rule.statement) for rule in ASYNC_RULES]
    assert [None if one is None else one.kind for one in kinds] == ["outside", "outside", "outside", "ours", None]


@pytest.mark.slow  # Hydra, three times
def test_asynchronous_jobs_differ_in_drafts_and_head_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    given = {arm: jobs.overrides(arm, 1, tmp_path, tmp_path / "run") for arm in jobs.ARMS}
    configs = {arm: job_config(one) for arm, one in given.items()}
    systems = ["autoregressive", "target_only", "bebop"]
    assert [config.decoding.system for config in configs.values()] == systems
    for config in configs.values():
        assert config.rollout.staleness == 1 and config.rollout.slots == jobs.SLOTS and config.cotrain.mode == "off"
        assert (config.task.seed, config.runtime.seed, config.rollout.threads) == (801, 1, 1)
    own = {one for decoding, _ in jobs.ARMS.values() for one in decoding}
    assert all(set(given[jobs.PLAIN]) ^ set(one) <= own for one in given.values())


def test_a_finished_asynchronous_job_is_kept_and_a_failed_one_names_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], stdout: Any, stderr: Any, check: bool) -> SimpleNamespace:
        ran.append(command)
        folder = Path(next(one.partition("=")[2] for one in command if one.startswith("runtime.dir=")))
        folder.mkdir(parents=True)
        rows = [{"step": step, **dict.fromkeys(jobs.NUMBERS, float(step))} for step in range(4)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return SimpleNamespace(returncode=len(ran) - 1)

    monkeypatch.setattr(jobs, "PLACE", tmp_path)
    monkeypatch.setattr(jobs, "model_of", lambda arm, seed: tmp_path / "model")
    monkeypatch.setattr(jobs.subprocess, "run", run)
    first, again = (jobs.carry_out(jobs.PLAIN, 0) for _ in range(2))
    assert len(ran) == 1 and first == again and first.busy >= 0 and first.rows["time/step"] == [0.0, 1.0, 2.0, 3.0]
    assert first.rows["accept length"] == [1.0] * 4 and not (tmp_path / "plain-0" / "run").exists()
    with pytest.raises(UserError, match=r"arm 'RS \+ TV', seed 0, ended with 1: see .*log"):
        jobs.carry_out(jobs.SAMPLED, 0)

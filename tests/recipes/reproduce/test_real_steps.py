"""Steps of RL with drafts and without: what is taken from the jobs, and that their numbers are those of the rules."""

import json
from pathlib import Path

import pytest

from bebop.config.compose import job_config
from recipes import stages
from recipes.reproduce.real_steps import __main__ as main
from recipes.reproduce.real_steps import pairs
from recipes.reproduce.real_steps.findings import RULES
from recipes.reproduce.real_steps.pairs import ARMS, NUMBERS, STEPS, Job, carry_out, overrides, ratio, share
from tests.cases import slow_but


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

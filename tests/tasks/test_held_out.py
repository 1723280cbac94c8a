"""Held-out questions: training asks none of them, and the same settings give the same ones."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from bebop.config.fields import from_dict
from bebop.config.job import HELD_OUT_SEED, JobConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_tokenizer
from bebop.tasks.environment import seed
from bebop.tasks.held_out import HeldOut, find_held_out
from bebop.tasks.procedural import BLOCK, stream_seed
from bebop.tasks.source import EnvironmentSource, open_items

GCD = {"name": "gcd", "args": {"min_value": 10, "max_value": 60}}


def found(training: dict[str, Any], steps: int = 20, **evaluation: Any) -> tuple[HeldOut, JobConfig]:
    config = from_dict(
        JobConfig, {"task": training, "trainer": {"steps": steps}, "evaluation": {"every": 1, "size": 8, **evaluation}}
    )
    held_out = find_held_out(config, load_tokenizer(ModelConfig()))
    assert held_out is not None
    return held_out, config


def questions(held_out: HeldOut) -> list[str]:
    return [held_out.prompt(-1 - place).item["question"] for place in range(len(held_out.numbers))]


def trained(config: JobConfig) -> list[str]:
    items = open_items(config.task)
    count = config.trainer.steps * config.trainer.groups_per_step
    return [items.item(index)["question"] for index in range(count)]


def test_without_evaluations_there_are_none() -> None:
    assert find_held_out(JobConfig(), None) is None


def test_streams_of_training_and_evaluation_lie_far_apart() -> None:
    """Blocks of a million items, up to the 200th, of both."""
    places = [stream_seed(s, block) for s in (0, HELD_OUT_SEED) for block in range(200)]
    ours, theirs = places[200:], places[:200]
    assert min(min((a - b) % 2**31, (b - a) % 2**31) for a in ours for b in theirs) > 10 * BLOCK


def test_of_a_small_data_set_questions_that_training_asks_are_left_out() -> None:
    held_out, config = found(GCD, size=64)
    asked = questions(held_out)
    assert len(set(asked)) == 64 and not set(asked) & set(trained(config))
    fresh = from_dict(JobConfig, {"task": GCD, "evaluation": {"every": 1}}).held_out_task
    first = [open_items(fresh).item(number)["question"] for number in range(64)]
    assert set(first) & set(trained(config)), "another seed alone would not do"
    assert questions(found(GCD, size=64)[0]) == asked


def test_prompts_are_numbered_below_0_and_have_numbers_of_their_own() -> None:
    held_out, _ = found(GCD)
    prompts = [held_out.prompt(index) for index in range(-8, 0)]
    assert [p.index for p in prompts] == list(range(-8, 0)) and all(p.held_out for p in prompts)
    assert len({p.number for p in prompts}) == 8 and min(p.number for p in prompts) >= 1 << 31
    assert prompts[-1].token_ids and prompts[-1].item["answer"]


def test_too_few_questions_are_said_so() -> None:
    few = {"name": "gcd", "args": {"min_value": 2, "max_value": 3}}
    with pytest.raises(UserError, match=r"evaluation.size=8 is not possible: .* only 0 are new to training"):
        found(few, steps=60)


def test_faults_of_the_task_are_named_as_settings_of_the_evaluation() -> None:
    with pytest.raises(UserError, match=r"^evaluation\.task\.name='gdc': reasoning-gym has no such data set"):
        found(GCD, task={"name": "gdc"})
    with pytest.raises(UserError, match=r"^evaluation\.task\.args\.depth=1: gcd has no such argument"):
        found(GCD, task={"args": {"depth": 1}})


def rows(path: Path, numbers: range) -> str:
    path.write_text("".join(json.dumps({"question": f"What is {n}?", "answer": str(n)}) + "\n" for n in numbers))
    return str(path)


def test_a_file_is_taken_whole_or_in_part_and_what_training_asks_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = {"source": "file", "name": "file", "path": rows(tmp_path / "train.jsonl", range(20))}
    with caplog.at_level(logging.WARNING):
        held_out, _ = found(training, path=rows(tmp_path / "test.jsonl", range(20, 25)))
        assert sorted(questions(held_out)) == [f"What is {n}?" for n in range(20, 25)] and not caplog.records
        held_out, _ = found(training, path=rows(tmp_path / "both.jsonl", range(18, 40)), size=22)
    assert len(set(questions(held_out))) == 22
    assert "2 of 22 evaluation questions" in caplog.text and "both.jsonl" in caplog.text


def test_an_environment_gets_seeds_and_items_that_training_has_not() -> None:
    task = {"source": "environment", "name": "guess"}
    held_out, config = found(task)
    source = EnvironmentSource(config.task)
    training = {seed(config.task.seed, source.prompt(index).number) for index in range(1000)}
    ours = {seed(config.task.seed, held_out.prompt(index).number) for index in range(-8, 0)}
    assert len(ours) == 8 and not ours & training and min(ours) > 0


def test_an_environment_that_asks_the_items_of_training_again_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    methods = "".join(f"    async def {name}(self, *given): ...\n" for name in ("reset", "step", "close"))
    (tmp_path / "desk.py").write_text("class Desk:\n" + methods)
    with caplog.at_level(logging.WARNING):
        found({"source": "environment", "name": "guess"})
        assert not caplog.records
        found({"source": "environment", "name": f"{tmp_path}/desk.py:Desk"})
    assert (
        "8 of the first 8 evaluation questions of" in caplog.text
        and "item(index, seed) should use the seed" in caplog.text
    )


def test_a_question_of_a_file_that_is_too_long_is_left_out_and_no_other_asked_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "test.jsonl"
    texts = [f"What is {n}?" if n % 4 else f"What is {n}?" + " and" * 600 for n in range(8)]
    path.write_text("".join(json.dumps({"question": text, "answer": 1}) + "\n" for text in texts))
    training = {"source": "file", "name": "file", "path": rows(tmp_path / "train.jsonl", range(20, 40))}
    with caplog.at_level(logging.WARNING):
        held_out, _ = found(training, path=str(path))
    assert sorted(questions(held_out)) == sorted(text for text in texts if len(text) < 20)
    assert "2 questions in" in caplog.text and "too long" in caplog.text

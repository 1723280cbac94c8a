"""The task of the runs on SmolLM2: what its rule takes and what it does not."""

import json
from pathlib import Path

import pytest

from bebop.config import TaskConfig
from bebop.errors import UserError
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource
from recipes.reproduce.real.rl import task


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("A dusty bridge over a calm and narrow river.", 1.0),
        ("The bridge is old, isn't it?", 1.0),
        ('"An old bridge that nobody crosses!"\n', 1.0),
        ("A dusty bridge. It is old.", 0.5),  # two sentences
        ("A dusty bridge\nover a river.", 0.5),  # two lines
        ("A dusty bridge over a calm and narrow", 0.5),  # cut off
        ("A dusty bridge over a calm and narrow river that nobody has ever seen.", 0.5),  # 14 words
        ("A dusty bridge.", 0.5),  # 3 words
        ("A dusty bridgehead over a calm river.", 0.5),  # another word
        ("A cambridge scholar wrote this.", 0.5),
        ("It is old. It is narrow.", 0.0),
        ("", 0.0),
    ],
)
def test_half_for_a_short_sentence_half_for_the_word(text: str, reward: float) -> None:
    assert task.score(text, {"answer": "bridge"}) == reward


def test_questions_are_distinct_and_the_same_for_a_seed() -> None:
    some = task.questions(60)
    assert len({row["question"] for row in some}) == 60 and all(row["answer"] in row["question"] for row in some)
    assert task.questions(100)[:60] == some != task.questions(60, seed=1)
    most = len(task.KINDS) * len(task.THINGS)
    assert len({row["question"] for row in task.questions(most)}) == most
    with pytest.raises(UserError, match=rf"{most + 1} questions are not possible: give 1 to {most}"):
        task.questions(most + 1)


def test_a_job_asks_and_rewards_it(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    task.write_questions(path, 8)
    assert [json.loads(line) for line in path.read_text().splitlines()] == task.questions(8)
    config = TaskConfig(source="file", name="short", path=str(path), reward=f"{task.__file__}:score", system=None)
    prompt = PromptSource(config, lambda question: (question, (1, 2)), 8).prompt(0)
    reward = make_reward(config)
    assert checked(reward, f"An old and quiet {prompt.item['answer']} in the rain.", prompt) == 1.0
    assert checked(reward, "Nothing", prompt) == 0.0

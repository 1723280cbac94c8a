import random
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from bebop.config import TaskConfig
from bebop.errors import UserError
from bebop.parsing import from_dict
from bebop.tasks.procedural import ProceduralItems, make_dataset
from bebop.tasks.rewards import MathReward, RewardFunction, UserReward, checked, make_reward
from bebop.trajectory import Prompt
from recipes.tiny.data import TASKS
from recipes.tiny.solutions import SOLVERS
from tests.cases import slow_but

CONF = Path(__file__).parents[2] / "conf" / "task"


def conf(name: str) -> TaskConfig:
    return from_dict(TaskConfig, yaml.safe_load((CONF / f"{name}.yaml").read_text()))


def ask(item: dict[str, Any], index: int = 7) -> Prompt:
    return Prompt(index=index, task="t", text="", token_ids=(1,), item=item)


def dataset_prompt(name: str, index: int = 0, **args: Any) -> tuple[RewardFunction, Prompt]:
    config = TaskConfig(name=name, args=args)
    return make_reward(config), ask(ProceduralItems(name, args, 0).item(index))


def math_score(text: str, gold: Any) -> float:
    return checked(MathReward(), text, ask({"answer": gold, "question": "?", "metadata": {}}))


@pytest.mark.parametrize("name", TASKS)
def test_settings_are_those_of_the_training_data(name: str) -> None:
    assert (conf(name).name, conf(name).args) == (name, TASKS[name][2])


@pytest.mark.parametrize("name", ["lcm", "reasoning_gym"])
def test_other_settings_give_items_whose_answer_scores_1(name: str) -> None:
    config = conf(name)
    items, reward = ProceduralItems(config.name, config.args, config.seed), make_reward(config)
    for n in range(10):
        item = items.item(n)
        assert checked(reward, f"So <answer>{item['answer']}</answer>", ask(item)) == 1.0


def test_file_settings_ask_for_a_path() -> None:
    with pytest.raises(UserError, match="source=file needs"):
        from_dict(TaskConfig, {"source": "file", "name": "file"})


@pytest.mark.parametrize("name", TASKS)
def test_worked_solutions_score_1_and_slips_do_not(name: str) -> None:
    config, rng = conf(name), random.Random(0)
    items, reward = ProceduralItems(config.name, config.args, config.seed), make_reward(config)
    right, wrong = [], []
    for n in range(60):
        item = items.item(n)
        right.append(checked(reward, SOLVERS[name](item["metadata"], rng, 0.0), ask(item)))
        wrong.append(checked(reward, SOLVERS[name](item["metadata"], rng, 1.0), ask(item)))
    assert right == [1.0] * 60
    assert sum(score < 1 for score in wrong) > 40


def test_the_last_answer_counts_and_none_is_0() -> None:
    reward, prompt = dataset_prompt("chain_sum")
    gold = prompt.item["answer"]
    assert checked(reward, f"<answer>no</answer> or <answer> {gold} </answer>", prompt) == 1.0
    assert checked(reward, f"<answer>{gold}</answer> or <answer>no</answer>", prompt) == 0.0
    assert checked(reward, f"it is {gold}", prompt) == checked(reward, f"<answer>{gold}", prompt) == 0.0


@pytest.mark.parametrize(
    ("name", "answer"), [("prime_factorization", "two"), ("game_of_life", "{}"), ("boxnet", "12"), ("countdown", "((")]
)
def test_a_verifier_that_raises_gives_at_most_its_floor(name: str, answer: str) -> None:
    reward, prompt = dataset_prompt(name)
    assert checked(reward, f"<answer>{answer}</answer>", prompt) <= 0.01


def test_nan_is_no_answer_although_the_verifier_takes_it() -> None:
    args = TASKS["number_sorting"][2]
    reward, prompt = dataset_prompt("number_sorting", **args)
    trick = str(["nan"] * prompt.item["metadata"]["numbers"])
    assert make_dataset("number_sorting", args).score_answer(trick, prompt.item) == 1.0
    assert checked(reward, f"<answer>{trick}</answer>", prompt) == 0.0


def test_a_data_set_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="did you mean chain_sum"):
        make_reward(TaskConfig(name="chainsum"))


def test_countdown_by_its_own_verifier() -> None:
    reward, prompt = dataset_prompt("countdown")
    expression = prompt.item["metadata"]["expression"]
    assert checked(reward, f"<answer>{expression}</answer>", prompt) == 1.0
    assert checked(reward, f"<answer>{expression} + 1</answer>", prompt) < 0.1


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("so \\boxed{72}. Check: 71", "72", 1),
        ("first \\boxed{71}, no: \\boxed{72}", "72", 1),
        ("first \\boxed{72}, no: \\boxed{71}", "72", 0),
        ("<answer>\\frac12</answer>", "0.5", 1),
        ("<answer>1/2</answer>", "\\frac{1}{2}", 1),
        ("<answer>x = 4</answer>", "4", 1),
        ("<answer>2</answer>", "(1,2)", 0),
        ("<answer>(1, 2)</answer>", "(1,2)", 1),
        ("<answer>50%</answer>", "50\\%", 1),
        ("<answer>Paris</answer>", "Paris", 1),
        ("<answer>Rome</answer>", "Paris", 0),
        ("\\boxed{5}", "2+3=5\n#### 5", 1),
        ("\\boxed{1000}", "a lot\n#### 1,000", 1),
        ("\\boxed{5}", 5, 1),
        ("The answer is 5.", 5.0, 1),
        ("", "5", 0),
        ("\\boxed{", "5", 0),
    ],
)
def test_math_verify(text: str, gold: Any, score: int) -> None:
    assert math_score(text, gold) == score


def test_math_verify_is_the_reward_of_files_and_runs_in_threads(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?", "answer": "2"}')
    reward = make_reward(TaskConfig(source="file", path=str(tmp_path / "q.jsonl")))
    prompt, scores = ask({"answer": "2"}), list[float]()

    def work() -> None:
        for text in ("\\boxed{2}", "\\boxed{3}"):
            scores.append(checked(reward, text, prompt))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(scores) == [0, 0, 0, 1, 1, 1]


def test_math_verify_wants_a_gold_answer() -> None:
    with pytest.raises(UserError, match="prompt 7 has answer None"):
        math_score("5", None)


USER = """
import math
def length(text, item): return len(text) + len(item["answer"])
def half(text, item): return 0.5 if text else True
def broken(text, item): return item["no such key"]
def nothing(text, item): pass
def nan(text, item): return math.nan
number = 3
"""


def user(tmp_path: Path, name: str) -> RewardFunction:
    (tmp_path / "mine.py").write_text(USER)
    return make_reward(TaskConfig(reward=f"{tmp_path}/mine.py:{name}"))


def test_a_function_of_the_users(tmp_path: Path) -> None:
    prompt = ask({"answer": "four"})
    assert checked(user(tmp_path, "length"), "<answer>4</answer>", prompt) == 22.0
    assert checked(user(tmp_path, "half"), "x", prompt) == 0.5
    assert checked(user(tmp_path, "half"), "", prompt) == 1.0
    dotted = make_reward(TaskConfig(reward="operator.contains"))
    assert isinstance(dotted, UserReward) and checked(dotted, "abc", ask("b")) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", ["mine.py:broken", "prompt 7", "KeyError: 'no such key'"]),
        ("nothing", ["mine.py:nothing", "prompt 7", "'None'"]),
        ("nan", ["mine.py:nan", "prompt 7", "'nan'"]),
    ],
)
def test_a_function_that_fails_is_named(tmp_path: Path, name: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        checked(user(tmp_path, name), "x", ask({"answer": ""}))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)
    assert name != "broken" or 'return item["no such key"]' in str(error.value.__cause__)


IMPORTS = [
    ("mathverify", ["mathverify", "auto, math_verify"]),
    ("no_such_package.f", ["cannot be imported", "no_such_package"]),
    ("math.sqroot", ["no function 'sqroot'", "sqrt"]),
    ("math.pi", ["no function 'pi'"]),
    ("nowhere/mine.py:f", ["no Python file 'nowhere/mine.py'"]),
    ("{0}/syntax.py:f", ["cannot be imported", "SyntaxError"]),
    ("{0}/raises.py:f", ["cannot be imported", "ZeroDivisionError"]),
]


@pytest.mark.parametrize(("spec", "words"), slow_but([IMPORTS[0], IMPORTS[2], IMPORTS[5]], IMPORTS, several=True))
def test_functions_that_cannot_be_imported(tmp_path: Path, spec: str, words: list[str]) -> None:
    (tmp_path / "syntax.py").write_text("def f(:")
    (tmp_path / "raises.py").write_text("1 / 0")
    with pytest.raises(UserError) as error:
        make_reward(TaskConfig(reward=spec.format(tmp_path)))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)

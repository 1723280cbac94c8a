import contextlib
import json
import math
import random
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bebop.config.fields import from_dict
from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.tasks import functions, rewards
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.procedural import ProceduralItems, make_dataset
from bebop.tasks.rewards import (
    Answer,
    HeldOutReward,
    MathReward,
    RewardFunction,
    Score,
    Scorer,
    UserReward,
    check_reward,
    checked,
    make_reward,
    part_names,
    scorer,
)
from bebop.tasks.source import open_items
from bebop.trajectory import Prompt
from recipes.tiny.data import SOLVERS, TASKS
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
        ("The answer is $cat$", "act", 0),
        ("It is 1e-5", 1, 0),
        ("<answer>It is $\\boxed{11}$.</answer>", "11", 1),
    ],
)
def test_math_verify(text: str, gold: Any, score: int) -> None:
    assert math_score(text, gold) == score


# Gold answer, what equals it, what does not; between tags and in a box alike.
SHORT: list[tuple[Any, list[str], list[str]]] = [
    # Words are no products of letters; formulas are.
    ("cat", ["cat", "Cat.", "**cat**", "\\text{cat}", "$cat$"], ["act", "\\text{act}", "It is a cat", "c a t"]),
    ("\\text{New York}", ["New  York", "new york."], ["York New", "New Yorker"]),
    ("listen", ["'listen'"], ["tinsel", "silent"]),
    ("no", ["No"], ["on"]),
    ("H2O", ["H2O"], ["OH2"]),
    ("hot day", ["hot day"], ["hot"]),
    ("11 USD", ["11 usd"], ["11 EUR"]),
    ("10 km", ["10", "10 km", "It is 10 km"], ["11 km"]),
    ("x^2+2x+1", ["(x+1)^2", "$1 + x^2 + 2x$"], ["x^2+2x"]),
    ("2xy", ["2yx", "y*2x"], ["2"]),
    ("2\\pi", ["2pi", "\\pi \\cdot 2"], ["2", "2\\rho"]),
    ("\\sin x", ["sin x", "sin(x)"], ["i n s x"]),
    # What running text may have around a number.
    (
        "11",
        ["11.", "It is 11", "**11**.", "11 USD", "11USD", "$11", "\\$11", "€11", "`11`", "x = 11", "\\text{It is }11"],
        ["12.", "12 USD", "11 of 12", "10 or 11", "10, 11", "11alpha"],
    ),
    ("7%", ["7.0%", "7\\%", "7 percent", "0.07"], ["8%", "0.7%"]),
    # Blanks join thousands, and multiply nothing.
    ("0", ["0"], ["1 000", "3 0"]),
    ("1000", ["1 000", "1,000", "1\\,000", "1{,}000", "1'000", "1\u202f000"], ["1 00", "10 00"]),
    ("6", ["6"], ["2 3"]),
    ("-3", ["-3", "\u22123", "It is \u20133"], ["3"]),
    ("1000", ["10\u00b3", "\\$1{,}000"], ["103"]),
    ("3/2", ["1 1/2", "1\\frac{1}{2}"], ["1/2", "1 1/3"]),
    # Numbers of JSON, however small or large.
    (0.00001, ["0.00001", "1e-5", "1E-05", "10^{-5}", "1/100000"], ["e-5", "0", "0.00002", "0.0000104"]),
    (1e-7, ["0.0000001"], ["0", "0.0000002"]),
    (2e-5, ["2e-5", "0.00002"], ["2"]),
    (1e22, ["10000000000000000000000"], ["e+22"]),
    ("2e - 1", ["2e-1"], ["0.2"]),
]


@pytest.mark.parametrize(("gold", "right", "wrong"), SHORT, ids=[str(row[0]) for row in SHORT])
def test_short_answers(gold: Any, right: list[str], wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = types.SimpleNamespace(score=lambda function, *args: function(*args))  # where a planted fault is seen
    monkeypatch.setattr(rewards, "isolated", lambda: here)
    put = ("<answer>{}</answer>", "so \\boxed{{{}}}")
    scores = {form.format(text): math_score(form.format(text), gold) for text in right + wrong for form in put}
    assert scores == {form.format(text): float(text in right) for text in right + wrong for form in put}


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


@pytest.mark.parametrize("gold", [None, ["16"], {"a": 1}, "", " ", "a sum\n#### ", math.nan, -math.inf])
def test_golds_that_nothing_can_equal_are_refused_with_their_place(tmp_path: Path, gold: Any) -> None:
    with pytest.raises(UserError, match="prompt 7 has answer"):
        math_score("5", gold)
    rows = [{"question": "q", "answer": {"is": gold if n == 7 else n}} for n in range(9)]
    (tmp_path / "q.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = TaskConfig(source="file", path=str(tmp_path / "q.jsonl"), answer_key="answer.is")
    with pytest.raises(UserError, match=r"line 8 of .*q\.jsonl has") as error:
        check_reward(config, open_items(config))
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("broken", "raised KeyError"),
        ("nothing", "returned 'None'"),
        ("sleeps", "took more than task.reward_timeout=0.2 s: raise it"),
        ("half", ""),
    ],
)
def test_a_function_is_called_once_before_anything_starts(
    tmp_path: Path, name: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(f"{USER}\nimport time\ndef sleeps(text, item): print('zzz'); time.sleep(100)\n")
    config = TaskConfig(reward=f"{tmp_path}/mine.py:{name}", reward_timeout=0.2 if name == "sleeps" else 30)
    with pytest.raises(UserError, match=words) if words else contextlib.nullcontext():
        check_reward(config, open_items(config))
    assert ("reward: zzz\n" in capfd.readouterr().err) == (name == "sleeps")


# ---- several functions, and parts

SEVERAL = """
import asyncio, os, time
def correct(text, item): return float(item["answer"] in text)
def words(prompts, completions, **columns):
    if "hang" in completions: time.sleep(100)
    return [None if text == "none" else float(len(completions)) for text in completions]
def compute_score(solution_str, ground_truth): return {"score": 2.0 * (ground_truth in solution_str), "acc": 0.5}
def parts(text, item):
    if text == "number": return 1.0
    return {"short": len(text) < 3, "code": None} | ({"late": 1.0} if text == "late" else {})
async def judge(text, item):
    if text == "block": time.sleep(100)
    await asyncio.sleep(100 if text == "slow" else 0.01)
    return os.getpid()
async def stubborn(text, item):
    while text == "stay":
        try: await asyncio.sleep(100)
        except asyncio.CancelledError: pass
    return os.getpid()
def reserved(text, item): return {"mean": 1.0}
def std(text, item): return 1.0
def nothing(completions): return [None] * len(completions)
"""


@pytest.fixture
def several(tmp_path: Path) -> Iterator[Callable[..., Scorer]]:
    """Makes rewards of the functions above, whose processes end with the test."""
    made: list[Scorer] = []

    def make(*names: str, **settings: Any) -> Scorer:
        file = tmp_path / "a.py"
        file.write_text(SEVERAL)
        specs = [name if name == "math_verify" else f"{file}:{name}" for name in names]
        settings = {"reward": specs[0] if len(specs) == 1 else specs, "reward_timeout": 0.3} | settings
        reward = make_reward(from_dict(TaskConfig, settings))
        assert isinstance(reward, Scorer)
        made.append(reward)
        return reward

    yield make
    for one in made:
        one.close()


def answers(*texts: str) -> list[Answer]:
    return [Answer(text, ask({"question": "2+2", "answer": "4"}, index)) for index, text in enumerate(texts, 7)]


def test_several_functions_are_a_weighted_sum_with_parts(several: Callable[..., Scorer]) -> None:
    reward = several("correct", "math_verify", "words", "compute_score", reward_weights=[1, 10, 0.5, 0.1])
    assert reward.batched
    found = reward.scores(answers("\\boxed{4}", "none", "5"))
    assert found == [
        Score(value=12.7, parts={"correct": 1.0, "math_verify": 1.0, "words": 3.0, "compute_score": 2.0, "acc": 0.5}),
        Score(value=0.0, parts={"correct": 0.0, "math_verify": 0.0, "words": None, "compute_score": 0.0, "acc": 0.5}),
        Score(value=1.5, parts={"correct": 0.0, "math_verify": 0.0, "words": 3.0, "compute_score": 0.0, "acc": 0.5}),
    ]
    assert reward(*answers("4")[0][:2]) == pytest.approx(1 + 10 + 0.5 + 0.2)  # a completion alone, as recipes ask


def test_one_function_may_return_parts_and_the_same_each_time(several: Callable[..., Scorer]) -> None:
    reward = several("parts")
    assert reward.scores(answers("ab")) == [Score(value=1.0, parts={"short": 1.0, "code": None})]
    for text, words in (
        ("late", "code, late, short, and before that code, short"),
        ("number", "a number, and"),
    ):
        with pytest.raises(UserError, match=f"a.py:parts on prompt 7 returned {words}.*: return the same") as error:
            reward.scores(answers(text))
        assert "\n" not in str(error.value)


def test_names_of_parts_are_unique_and_no_metric_has_them(several: Callable[..., Scorer], tmp_path: Path) -> None:
    assert part_names(["a.py:score", "x/b-1.py:score", "my.module.score", "auto"]) == [
        "a_score", "b_1_score", "module_score", "auto",
    ]  # fmt: skip
    assert part_names(["math_verify", "my.py:math_verify"]) == ["math_verify", "my_math_verify"]
    with pytest.raises(UserError, match="returned a part 'mean': reward/mean is a metric already, rename it"):
        several("reserved").scores(answers("x"))
    with pytest.raises(UserError, match=r"task.reward: 'std' names a part, and reward/std is a metric already"):
        several("std", "correct")
    (tmp_path / "b.py").write_text("def acc(text, item): return 1.0\n")
    twice = several("compute_score", "correct", reward=[f"{tmp_path}/a.py:compute_score", f"{tmp_path}/b.py:acc"])
    with pytest.raises(UserError, match=r"two of .* have a part 'acc': rename one of them"):
        twice.scores(answers("x"))


def test_a_completion_to_which_no_reward_applies_is_one_line(several: Callable[..., Scorer]) -> None:
    for names in (("nothing",), ("nothing", "words")):
        with pytest.raises(UserError, match="on prompt 7 returned None, which says that it does not apply: every"):
            several(*names).scores(answers("none"))


def test_held_out_questions_have_a_reward_of_their_own_within_a_batch() -> None:
    held_out = ask({}, index=-1)
    both = HeldOutReward(scorer(lambda text, prompt: len(text)), scorer(lambda text, prompt: -len(text)))
    answers = [Answer("a", ask({})), Answer("bb", held_out), Answer("ccc", ask({})), Answer("dddd", held_out)]
    assert [score.value for score in both.scores(answers) if isinstance(score, Score)] == [1, -2, 3, -4]


def test_a_batch_that_hangs_is_asked_one_by_one(several: Callable[..., Scorer]) -> None:
    """Only the one that is to blame is late, and the others have their own values."""
    good, bad, last = several("words").scores(answers("a", "hang", "b"))
    assert (good, last) == (Score(value=1.0), Score(value=1.0)) and isinstance(bad, RewardTimeout)
    assert "prompt 8 took more than task.reward_timeout=0.3 s" in str(bad)


def test_a_function_of_a_list_that_hangs_makes_the_completion_late(several: Callable[..., Scorer]) -> None:
    first, late = several("correct", "words").scores(answers("4", "hang"))
    assert first == Score(value=2.0, parts={"correct": 1.0, "words": 1.0})
    assert isinstance(late, RewardTimeout)


def test_coroutines_that_do_not_end_go_with_their_process(several: Callable[..., Scorer]) -> None:
    reward = several("stubborn")
    [first] = reward.scores(answers("a"))
    [late] = reward.scores(answers("stay"))
    [other] = reward.scores(answers("a"))
    assert isinstance(late, RewardTimeout) and isinstance(first, Score) and isinstance(other, Score)
    assert first.value != other.value  # its process


def test_coroutines_that_hang_or_block_are_late_alone(
    several: Callable[..., Scorer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "LATE_SECONDS", 0.3)
    reward = several("judge")
    first, late, second = reward.scores(answers("a", "slow", "b"))
    assert isinstance(late, RewardTimeout) and "prompt 8 took more" in str(late)
    assert isinstance(first, Score) and first == second  # of one process, which serves on
    assert reward.scores(answers("c")) == [first]
    blocked, other = reward.scores(answers("block", "d"))
    assert isinstance(blocked, RewardTimeout) and isinstance(other, Score) and other != first  # of a new process


def test_every_function_of_a_list_is_called_once_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("def one(text, item): return 1\ndef two(completions): return []\n")
    (tmp_path / "q.jsonl").write_text('{"question": "q", "answer": {"is": ["no gold"]}}')
    for second, words in ((f"{tmp_path}/a.py:two", "two on prompt 0 returned 0 rewards for 1 completions"),
                          ("math_verify", "line 1 of .*q.jsonl has answer")):  # fmt: skip
        config = TaskConfig(
            source="file", path=f"{tmp_path}/q.jsonl", answer_key="answer.is", reward=(f"{tmp_path}/a.py:one", second)
        )
        with pytest.raises(UserError, match=words):
            check_reward(config, open_items(config))


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

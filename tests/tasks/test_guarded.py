"""No string from a model is evaluated: attacks on every reasoning-gym verifier that would, watched by an audit hook."""

import contextlib
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from bebop.config.job import TaskConfig
from bebop.tasks.guarded import Refused, algebra, literal
from bebop.tasks.math_answers import score_math
from bebop.tasks.procedural import QUICK, ProceduralItems, is_quick, make_dataset, score_entry
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Prompt
from tests.cases import slow_but

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")  # eval
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
EVALUATING = LISTS + FORMULAS
ANSWERED = {"countdown": 0.01, "puzzle24": 0.01}  # what their authors give to any text at all
ATTACKS = (
    "oracle_answer", "[oracle_answer]", "(oracle_answer)", "entry", "self", "[self.config]", "valid_solutions",
    "list(oracle_answer)", "[c for c in oracle_answer]", "(lambda: oracle_answer)()", "f'{oracle_answer}'",
    "__import__('os').system('touch {file}')", "[open('{file}', 'w')]", "open('{file}', 'w') or 1", "eval('open')",
    "exec('open(\"{file}\", \"w\")')", "().__class__.__base__.__subclasses__()", "x.__class__", "Symbol('x').func",
    "sympify('oracle_answer')", "S('x').diff", "[y := oracle_answer]", "print(1)", "sin.__module__", "9**9**9",
    "2**(10**9)", "10**10**10", "[9**9**9]", "sqrt(2)**(10**9)", "(10**9)!", "'a'*10**10", "x if x else y",
)  # fmt: skip


class Watch:
    """The code objects that this process executed while it was switched on, those of imports left out."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[CodeType] = []
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event == "exec" and isinstance(arguments[0], CodeType):
            code = arguments[0]
            if code.co_filename in ("<string>", "<unknown>"):
                self.seen.append(code)

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[CodeType]]:
        self.seen, self.on = [], True
        try:
            yield self.seen
        finally:
            self.on = False


@functools.cache
def watch() -> Watch:
    """One for all tests here: an audit hook stays for as long as its process lives, and slows all that it does."""
    return Watch()


def item(name: str, index: int = 0) -> dict[str, Any]:
    return ProceduralItems(name, {}, 0).item(index)


def test_these_are_all_that_evaluate_and_they_run_apart() -> None:
    """A new version of reasoning-gym may evaluate more: whatever a verifier calls by such a name is looked at here."""
    from reasoning_gym.factory import DATASETS

    pattern = re.compile(r"\b(?:eval|exec|sympify|S|parse_expr)\(")
    names = {name for name, (kind, _) in DATASETS.items() if pattern.search(inspect.getsource(kind.score_answer))}
    # number_sorting evaluates its own item's answer; propositional_logic has a parser of its own under that name.
    assert names - {"number_sorting", "propositional_logic"} == set(EVALUATING)
    assert not any(is_quick(name) for name in EVALUATING) and all(is_quick(name) for name in ("gcd", *QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("name", EVALUATING)
def test_attacks_are_not_evaluated_and_gain_nothing(name: str, tmp_path: Path) -> None:
    asked, file = item(name), tmp_path / "planted"
    assert score_entry(name, "{}", "two", asked) == ANSWERED.get(name, 0.0)
    for attack in (attack.replace("{file}", str(file)) for attack in ATTACKS):
        with watch().watching() as executed:
            score = score_entry(name, "{}", attack, asked)
        assert score <= ANSWERED.get(name, 0.0) and not executed, (attack, score, executed)
    assert not file.exists()


@pytest.mark.parametrize("name", LISTS[2:])
def test_the_verifier_itself_would_evaluate_them(name: str, tmp_path: Path) -> None:
    """The watch sees it, the file is there, and the attack pays: what the guard keeps away."""
    verifier, asked, file = make_dataset(name, {}), item(name), tmp_path / "planted"
    with watch().watching() as executed:
        verifier.score_answer(f"[open({str(file)!r}, 'w')]", asked)
        assert verifier.score_answer("oracle_answer" if name == "string_insertion" else "oracle_answer.split()", asked)
    assert len(executed) == 2 and file.exists()


def test_attacks_through_the_reward_and_through_a_mixture(tmp_path: Path) -> None:
    file = tmp_path / "planted"
    parts = {"datasets": [{"name": name} for name in ("spiral_matrix", "string_insertion")]}
    for config in (TaskConfig(name="string_insertion"), TaskConfig(name="composite", args=parts)):
        reward = make_reward(config)
        for index in range(4):
            asked = ProceduralItems(config.name, config.args, 0).item(index)
            prompt = Prompt(index=index, task="t", text="", token_ids=(1,), item=asked)
            for attack in ("oracle_answer", "oracle_answer.split()", f"[open({str(file)!r}, 'w')]"):
                assert checked(reward, f"<answer>{attack}</answer>", prompt) == 0.0
            assert checked(reward, f"<answer>{asked['answer']}</answer>", prompt) == 1.0
    assert not file.exists()


@pytest.mark.parametrize("name", slow_but(("spiral_matrix", "string_insertion", "countdown"), EVALUATING))
def test_right_answers_score_as_before(name: str) -> None:
    verifier = make_dataset(name, {})
    for index in range(12 if name != "puzzle24" else 4):
        asked = item(name, index)
        forms = [str(asked["answer"]), f" {asked['answer']} ", *other_forms(name, asked)]
        before = [float(verifier.score_answer(form, asked)) for form in forms]
        with watch().watching() as executed:
            assert [score_entry(name, "{}", form, asked) for form in forms] == before
        assert before[0] == 1.0 and (name not in LISTS or before[-1] in (0.1, 0.5)) and not executed


def other_forms(name: str, asked: dict[str, Any]) -> list[str]:
    """Other ways to write the answer down that a verifier takes, as a list at the end of those that are lists."""
    answer = str(asked["answer"])
    if name in FORMULAS:
        more = ["{} + 0", "({})*1.0", "0*5! + {}", "{}*sqrt(1)", "({})**1 + log(1)", "{} + 1", "x*y - {}"]
        return [form.format(answer) for form in more]
    if name == "spiral_matrix":
        return [str([int(n) for n in answer.split()])]
    if name == "string_insertion":
        return [str(list(answer))]
    return [str([[int(c) if c.isdigit() else c for c in row.split()] for row in answer.split("\n")])]


@pytest.mark.parametrize(
    "text",
    ["1/2 + 3.25*x", "-x**2*sin(3*x)/exp(x)", "5! - 2", "7//2 + 7 % 4", "2x", "x y", "log(x + 1)**(1/2)", "3*pi*I"],
)
def test_formulas_are_read_as_sympy_reads_them(text: str) -> None:
    import sympy

    def value(reader: Any) -> Any:
        try:
            return reader(text)
        except Exception as error:
            return type(error)

    assert value(algebra) == value(sympy.parse_expr)


def test_literals_alone_are_literals() -> None:
    assert literal(" [[1, 'a'], (2, -3.5), {'k': None}] ") == [[1, "a"], (2, -3.5), {"k": None}]
    for text in ("x", "[1].copy()", "1 + x", "[*range(3)]"):
        with pytest.raises(Refused):
            literal(text)


def test_math_verify_evaluates_sums_where_nothing_else_is() -> None:
    import math_verify.parser
    import sympy

    assert score_math("1/2 + 3/4 = 5/4", "\\boxed{5/4}") == 1.0 and score_math("2*(3+4)", "\\boxed{14}") == 1.0
    scope = math_verify.parser.parse_expr.keywords["global_dict"]
    assert scope["__builtins__"] == {} and all(getattr(sympy, k) is v for k, v in scope.items() if k[0] != "_")
    assert len(json.dumps(sorted(scope))) < 120
    with pytest.raises(NameError):
        eval("open", dict(scope))

"""A rule keeps its hash wherever it stands and however it is formatted, and loses it when anything of it changes."""

import re
from pathlib import Path

import pytest

from recipes.reproduce import rule_hash
from recipes.reproduce.__main__ import STUDIES
from recipes.reproduce.rule_hash import ENTRIES, ROOT, of_sources, of_study
from tests.cases import slow_but

ENGINE = '''
"""Shared."""
import math
from somewhere import Number

LEVEL = 0.05


def judge(x: float) -> bool:
    """Whether it holds."""
    return verdict(x) and beside() is None


def verdict(x: float) -> bool:
    return x < LEVEL


def beside():
    return None


def drawn():
    return 1
'''
RULES = "from engine import judge\n\nRULES = (('gain', 0.2),)\n"


def hashed(engine: str = ENGINE, rules: str = RULES) -> str:
    return of_sources([rules, engine], ENTRIES)


def test_moves_formatting_imports_and_words_change_nothing() -> None:
    moved = ENGINE.replace("import math\nfrom somewhere import Number\n", "from elsewhere.numbers import Number\n")
    first, second = moved.split("def verdict")
    assert of_sources([first, "def verdict" + second, RULES], ENTRIES) == hashed()  # one file became two
    assert of_sources([ENGINE + RULES], ENTRIES) == hashed()  # two files became one
    assert hashed(ENGINE.replace('"""Whether it holds."""', '"""Other words."""  # a comment')) == hashed()
    assert hashed(ENGINE.replace("(x: float) -> bool", "(\n    x: int,\n) -> object")) == hashed()
    assert hashed(rules=RULES.replace("('gain', 0.2),", '("gain", 0.20),')) == hashed()
    assert hashed(rules=RULES.replace("RULES =", "RULES: tuple[object, ...] =")) == hashed()
    assert hashed(ENGINE.replace("def drawn():\n    return 1", "def drawn():\n    return 2")) == hashed()  # not a part


@pytest.mark.parametrize(
    ("before", "after"),
    [("LEVEL = 0.05", "LEVEL = 0.06"), ("x < LEVEL", "x <= LEVEL"), ("and beside() is None", "or beside() is None"),
     ("def beside():\n    return None", "def beside():\n    return 1")],
)  # fmt: skip
def test_any_part_of_the_rule_counts(before: str, after: str) -> None:
    assert before in ENGINE and hashed(ENGINE.replace(before, after)) != hashed()


def test_a_bound_in_the_rules_counts() -> None:
    assert hashed(rules=RULES.replace("0.2", "0.1")) != hashed()


@pytest.mark.parametrize("name", slow_but(["drift", "real.rl"], STUDIES))
def test_every_bound_and_word_of_a_study_is_hashed(name: str) -> None:
    """Each number in the source of the rules is changed in turn; docstrings are the only places that may not count."""
    code = of_study(name)
    sources = [(ROOT / file).read_text() for file in code.files]
    assert of_sources(sources, ENTRIES) == code.hash
    bare = re.sub(r'""".*?"""', lambda match: " " * len(match[0]), sources[0], flags=re.DOTALL)
    bare = re.sub(r"#.*", lambda match: " " * len(match[0]), bare)
    places = [match.span() for match in re.finditer(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", bare)]
    for start, end in places:
        changed = sources[0][:start] + "7" + sources[0][start:end] + sources[0][end:]
        assert of_sources([changed, *sources[1:]], ENTRIES) != code.hash, sources[0][start - 30 : end + 30]
    renamed = re.sub(r'statement="', 'statement="Not: ', sources[0], count=1)
    assert renamed == sources[0] or of_sources([renamed, *sources[1:]], ENTRIES) != code.hash


def test_the_engine_is_a_part_of_every_rule() -> None:
    [engine] = [(ROOT / file).read_text() for file in of_study("drift").files if file.endswith("/verdicts.py")]
    for before, after in (("LEVEL = 0.05", "LEVEL = 0.2"), ("math.sqrt(2) *", "1.0 *"), ("2 * confirm", "confirm")):
        assert before in engine
        code = of_study("drift")
        sources = [Path(ROOT / file).read_text().replace(before, after) for file in code.files]
        assert of_sources(sources, ENTRIES) != code.hash, before


def test_the_rules_are_found_beside_the_package() -> None:
    assert rule_hash.module("drift").__name__ == "recipes.reproduce.drift.findings"

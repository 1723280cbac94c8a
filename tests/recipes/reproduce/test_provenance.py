"""Results carry the rule that judged them, whose hash sees any change; a rule changed after a result stops the page."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from shutil import copyfile, copytree
from typing import Any

import pytest

from bebop.bench import record as measurement
from bebop.errors import UserError
from recipes.reproduce import __main__ as reproduce
from recipes.reproduce import record, rule_hash
from recipes.reproduce.__main__ import RECIPES, checked, rebuild
from recipes.reproduce.__main__ import STUDIES as NAMES
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.pages import within
from recipes.reproduce.rule_hash import ENTRIES, ROOT, of_sources, of_study, reached
from recipes.reproduce.verdicts import Finding, Part, Rule, judge
from tests.cases import slow_but

STUDIES = Path(rule_hash.__file__).parent
# A study may have its rule before its results: what it found is held to the same, from the day on that it is there.
STORED = [name for name in NAMES if within(STUDIES, name).joinpath("results.json").is_file()]


def content(name: str) -> dict[str, Any]:
    results = record.read(within(STUDIES, name) / "results.json")
    assert results is not None
    return results


@pytest.fixture
def copied(tmp_path: Path) -> dict[str, Path]:
    """The stored results of all studies, to be spoilt."""
    for name in STORED:
        copytree(within(STUDIES, name) / "figures", within(tmp_path, name) / "figures")
        (within(tmp_path, name) / "results.json").write_text((within(STUDIES, name) / "results.json").read_text())
    return {name: within(tmp_path, name) for name in NAMES}


# ---- the page


@pytest.mark.slow
def test_pages_are_built_from_what_is_stored_and_twice_the_same(copied: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "RESULTS.md"
    assert rebuild(copied, target) == [name for name in RECIPES if name not in STORED]
    built = target.read_bytes()
    assert built == (ROOT / "RESULTS.md").read_bytes() and len(built) <= 40_000
    rebuild(copied, target)
    assert target.read_bytes() == built


def test_a_rule_changed_after_its_result_stops_the_page(
    copied: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked(copied)
    real = rule_hash.of_study
    other = rule_hash.RuleCode(hash="0123456789abcdef", files=())
    monkeypatch.setattr(rule_hash, "of_study", lambda name: other if name == "drift" else real(name))
    with pytest.raises(UserError, match=r"the rule of drift is 0123456789abcdef.*changed after its results"):
        rebuild(copied, tmp_path / "RESULTS.md")
    assert not (tmp_path / "RESULTS.md").exists()


@pytest.mark.slow
def test_the_command_fails_with_one_line_when_a_bound_is_changed(tmp_path: Path) -> None:
    """The whole of it, in a copy of the studies: a bound of 0.01 becomes 0.02, and nothing is written."""
    tree = tmp_path / "tree"
    copytree(STUDIES, tree / STUDIES.relative_to(ROOT), ignore=lambda *_: ["__pycache__", "verl", "megatron", "sglang"])
    copyfile(ROOT / "recipes/__init__.py", tree / "recipes/__init__.py")  # else that of the checkout is the package
    copytree(ROOT / "bebop", tree / "bebop", symlinks=True)
    copytree(ROOT / "benchmarks", tree / "benchmarks")  # its place says where the tree is
    for name in ("rollout", "trainer", "kernels", "conf"):
        (tree / name).symlink_to(ROOT / name)
    rules = tree / rule_hash.of_study("drift").files[0]
    rules.write_text(rules.read_text().replace("MISMATCH = 0.01", "MISMATCH = 0.02"))
    command = [sys.executable, "-m", "recipes.reproduce", "--rebuild"]
    done = subprocess.run(command, cwd=tree, env={"PYTHONPATH": str(tree)}, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: the rule of drift is ") and not (tree / "RESULTS.md").exists()


@pytest.mark.parametrize("what", ["number", "finding", "figure"])
def test_what_was_tampered_with_is_refused(copied: dict[str, Path], what: str) -> None:
    path = copied["objectives"] / "results.json"
    results = json.loads(path.read_text())
    if what == "number":
        results["numbers"]["e2e_tv - hard_ce"]["value"] += 0.1
    elif what == "finding":
        results["judgements"][-1]["findings"][0]["p"] = 0.001
    else:
        figure = next(iter(results["figures"]))
        (copied["objectives"] / "figures" / figure).write_text("<svg/>")
    path.write_text(json.dumps(results))
    with pytest.raises(UserError, match=r"of objectives is not the one|stored for objectives are not what"):
        checked(copied)


# ---- what is stored


@pytest.mark.parametrize("name", STORED)
def test_every_number_of_a_rule_is_stored(name: str) -> None:
    numbers, rules = content(name)["numbers"], record.rules_of(name)
    if name not in RECIPES:  # a head that took too long is left out, and what was to be found with it says so
        found = record.judged(content(name))
        rules = tuple(r for r, f in zip(rules, found, strict=True) if "not measured: " not in (f.untested or ""))
    asked = {n for r in rules for group in r.any_of for part in group for n in (part.number, *part.arms)}
    asked |= {need.number for r in rules for need in r.needs}
    quoted = {n for r in rules for n in re.findall(r"\{([^}]+)\}", r.evidence)}
    assert asked <= numbers.keys() and quoted <= {*numbers, *content(name)["facts"]}


@pytest.mark.parametrize("name", STORED)
def test_numbers_read_back_are_those_of_the_run(name: str) -> None:
    """Each entry names the place that it was read from, and is what stands there."""
    stored = content(name)
    if not any(number.get("source") for number in stored["numbers"].values()):
        return  # stored as numbers of their own, at the run
    read = 0
    for number in stored["numbers"].values():
        place = (number.get("source") or "").split(" > ")
        if place[0] == "judgements":
            evidence = stored["judgements"][0]["findings"][int(place[3])]["evidence"]
            text = str(Number(**number))
            assert re.findall(r"-?\d+\.\d+ \[-?\d+\.\d+, -?\d+\.\d+\]", evidence)[int(place[5])] == text
            assert number["rounding"] == 0.0005
        elif place[0] == "tables" and len(place) == 4 and "minus" not in place[3].replace("minus counts", ""):
            pairs = [pair.partition("=") for pair in re.split(r", (?=[a-z][\w ]*=[^ ])", place[2])]
            wanted = {key: value for key, _, value in pairs}
            rows = [r for r in stored["tables"][place[1]] if all(str(r[k]) == v for k, v in wanted.items())]
            assert [row[place[3]] for row in rows] == [{k: number[k] for k in ("value", "low", "high")}]
        else:
            continue
        read += 1
    assert read > 10


@pytest.mark.parametrize("name", STORED)
def test_what_was_not_recorded_is_said_and_not_made_up(name: str) -> None:
    stored = content(name)
    for judgement in stored["judgements"]:
        assert re.fullmatch(r"[0-9a-f]{16}", judgement["rule"]["hash"])
    for field, gap in (("dirty", "whether the tree differed"), ("command", "the command")):
        excused = any(missing.startswith(gap) for missing in stored.get("missing", ()))
        assert (stored["place"].get(field) is None) == excused
    for before, judgement in pairwise(stored["judgements"]):
        if "translated" in judgement:
            assert judgement["translated"]["from"] == before["rule"]["hash"]
            assert judgement["translated"]["to"] == judgement["rule"]["hash"]
            continue
        assert judgement["post_hoc"] is True and judgement["reason"]
        assert judgement["origin"]["dirty"] is False and judgement["origin"]["commit"]


def test_a_run_keeps_its_rule_and_what_was_at_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rules = (Rule(claim="C3", statement="A.", text="t", evidence="{gain}", any_of=((Part(number="gain"),),)),)
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="f" * 16, files=("a.py",)))
    monkeypatch.setattr(record, "rules_of", lambda name: rules)
    started = record.begin("made_up")
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="0" * 16, files=("a.py",)))
    numbers = {"gain": over_seeds([1.0, 1.01, 0.99])}
    folder = tmp_path / "made_up"
    (folder / "figures").mkdir(parents=True)
    (folder / "figures" / "a.svg").write_text("<svg/>")
    record.keep(folder, started, numbers, {"T": [{"x": 1.5}]}, {"a.svg": "A figure."}, {"seeds": 3})
    stored = record.read(folder / "results.json")
    assert stored is not None and stored["judgements"][0]["rule"]["hash"] == "f" * 16  # the rule at the start
    assert stored["place"]["commit"] and stored["place"]["began"] and "dirty" in stored["place"]
    assert stored["judgements"][0]["findings"] == [asdict(f) for f in judge(rules, numbers)]
    assert "post_hoc" not in stored["judgements"][0]


def test_judging_again_keeps_the_older_judgement_and_calls_itself_late(monkeypatch: pytest.MonkeyPatch) -> None:
    before = content("drift")
    assert record.rejudge("drift", before, "None.", {}) == before  # the same rule has nothing to add
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="1" * 16, files=("a.py",)))
    after = record.rejudge("drift", before, "A new bound.", {"commit": "abc", "dirty": False})
    *older, newest = after["judgements"]
    assert older == before["judgements"] and {**after, "judgements": older} == before
    assert (newest["post_hoc"], newest["reason"], newest["rule"]["hash"]) == (True, "A new bound.", "1" * 16)


def test_a_rule_has_to_be_committed_before_it_judges_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git("init", "-q", str(tmp_path), root=tmp_path)
    (tmp_path / "findings.py").write_text("RULES = ()\n")
    monkeypatch.setattr(reproduce, "ROOT", tmp_path)
    monkeypatch.setattr(rule_hash, "of_study", lambda name: rule_hash.RuleCode(hash="1", files=("findings.py",)))
    with pytest.raises(UserError, match=r"findings\.py holds a rule of drift and is not committed"):
        reproduce.rejudge(["drift"], "A new bound.")
    git("add", ".", root=tmp_path)
    git("commit", "-qm", "the rule", root=tmp_path)
    reproduce.rejudge([], "A new bound.")
    (tmp_path / "findings.py").write_text("RULES = (1,)\n")
    with pytest.raises(UserError, match="is not committed"):
        reproduce.rejudge(["drift"], "A new bound.")


# ---- the history


def git(*arguments: str, root: Path = ROOT) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, check=True).stdout


def whole_history(root: Path = ROOT) -> bool:
    """Whether there is a repository with all of its commits."""
    try:
        return git("rev-parse", "--is-shallow-repository", root=root).strip() == "false"
    except (subprocess.CalledProcessError, FileNotFoundError):
        return False


needs_history = pytest.mark.skipif(not whole_history(), reason="no git history, or a shallow one")


def mixed(root: Path = ROOT) -> Iterator[str]:
    """Commits in which a result and a file of the rule that judged it both changed; a move changes neither.

    Results from before rules were hashed do not name any, and are left out. So is a translation of a rule, if every
    finding is the one of the judgement before: it judged nothing.
    """
    log = git("log", "--no-merges", "--format=%H", "--diff-filter=AMR", "--", "*results.json", root=root)
    for commit in log.split():
        lines = git("show", "-M", "--raw", "--no-abbrev", "--format=", commit, root=root).splitlines()
        changes = [(line.split()[2:5], line.split("\t")[1:]) for line in lines]
        changed = {paths[-1] for (before, after, _), paths in changes if before != after}
        for path in (path for path in changed if path.endswith("results.json")):
            kept = json.loads(git("show", f"{commit}:{path}", root=root))
            judgements = kept.get("judgements", ()) if isinstance(kept, dict) else ()
            same = translates(judgements)
            held = {file for judgement in judgements[-1:] for file in judgement["rule"]["files"] if not same}
            yield from (f"{commit[:7]}: {path} and {file}" for file in sorted(held & changed))


def translates(judgements: Sequence[dict[str, Any]]) -> bool:
    """Whether the newest judgement words the one before anew, and says the same."""
    if len(judgements) < 2 or "translated" not in judgements[-1]:
        return False
    pairs = zip(*([Finding(**one) for one in made["findings"]] for made in judgements[-2:]), strict=True)
    return all(record.equal_verdicts(before, after) for before, after in pairs)


@pytest.mark.slow
@needs_history
@pytest.mark.parametrize("name", [name for name in STORED if rule_hash.declared(name)])
def test_the_rule_before_a_translation_is_to_be_found(name: str) -> None:
    """The commit that is named holds the older rule: its hash is the one that the older judgement carries."""
    told = content(name)["judgements"][-1]["translated"]
    sources = [git("show", f"{told['commit']}:{file}") for file in told["files"]]
    assert of_sources(sources, ENTRIES) == told["from"]
    assert translates(content(name)["judgements"])


@pytest.mark.slow
@needs_history
def test_no_commit_holds_both_a_rule_and_its_result() -> None:
    assert list(mixed()) == []


def test_a_commit_with_both_is_caught_and_moves_are_not(tmp_path: Path) -> None:
    git("init", "-q", str(tmp_path), root=tmp_path)
    study = tmp_path / "recipes" / "a"
    study.mkdir(parents=True)

    def store(value: int, folder: Path) -> None:
        rule = {"hash": "x", "files": [(folder / "findings.py").relative_to(tmp_path).as_posix()]}
        lines = {"judgements": [{"rule": rule}], "value": value, "table": list(range(50))}
        (folder / "results.json").write_text(json.dumps(lines, indent=1))

    def commit(message: str) -> None:
        git("add", "-A", root=tmp_path)
        git("commit", "-qm", message, root=tmp_path)

    (study / "findings.py").write_text("RULES = (1, 2, 3, 4, 5)\n")
    commit("the rule")
    store(1, study)
    commit("its result")
    moved = tmp_path / "recipes" / "reproduce" / "a"
    moved.parent.mkdir()
    study.rename(moved)
    commit("a move of both")
    assert list(mixed(tmp_path)) == []
    (moved / "findings.py").write_text("RULES = (1, 2, 3, 4, 6)\n")
    store(2, moved)
    commit("both at once")
    assert [line.partition(": ")[2] for line in mixed(tmp_path)] == [
        "recipes/reproduce/a/results.json and recipes/reproduce/a/findings.py"
    ]


def test_a_translation_that_says_something_else_is_none() -> None:
    finding = {"claim": "C3", "statement": "A.", "rule": "r", "evidence": "e", "p": 0.01}
    before: dict[str, Any] = {"findings": [finding]}
    worded = {"translated": {}, "findings": [finding | {"rule": "other words", "evidence": "more"}]}
    assert translates([before, worded])
    for change in ({"p": 0.02}, {"side": "refuted"}, {"untested": "fell"}, {"statement": "B."}):
        assert not translates([before, {"translated": {}, "findings": [finding | change]}])
    assert not translates([before, {"findings": [finding]}]) and not translates([worded])


@pytest.mark.slow
@needs_history
@pytest.mark.parametrize("name", STORED)
def test_derived_hashes_are_those_of_the_commit_that_stored_the_result(name: str) -> None:
    first = content(name)["judgements"][0]["rule"]
    if not first["derived"]:
        pytest.skip("the rule was hashed at the run")
    sources = [git("show", f"{first['commit']}:{file}") for file in first["files"]]
    assert of_sources(sources, first["entries"]) == first["hash"]
    assert of_sources([source.replace("0", "1") for source in sources], first["entries"]) != first["hash"]
    assert "results.json" in git("show", "--stat=200", "--format=", first["commit"])


def test_a_measurement_says_by_which_command_and_nothing_of_the_machine_s_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--out", f"{tmp_path}/here", f"--record={tmp_path}/there", "runs/a", "--looks=2"]
    monkeypatch.setattr("sys.orig_argv", ["python3", "-m", "recipes.history", *given])
    told = "python -m recipes.history --out here --record=there runs/a --looks=2"
    assert measurement.begin(tmp_path)["command"] == told


# ---- the hash of a rule

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


@pytest.mark.parametrize("name", slow_but(["drift", "real.rl"], NAMES))
def test_every_bound_and_word_of_a_study_is_hashed(name: str) -> None:
    """Each number in the source of the rules is changed in turn; docstrings are the only places that may not count."""
    code = of_study(name)
    sources = [(ROOT / file).read_text() for file in code.files]
    assert of_sources(sources, ENTRIES) == code.hash
    # Line breaks stay: definitions are found by the numbers of their lines.
    bare = re.sub(r'""".*?"""', lambda match: re.sub(r"[^\n]", " ", match[0]), sources[0], flags=re.DOTALL)
    bare = re.sub(r"#.*", lambda match: " " * len(match[0]), bare)
    if rule_hash.declared(name):  # what is measured and drawn stands in the same file, and is no part of the rule
        rule = {line for place, node in reached(sources, ENTRIES) if not place
                for line in range(node.lineno, (node.end_lineno or 0) + 1)}  # fmt: skip
        lines = bare.split("\n")
        bare = "\n".join(line if i in rule else " " * len(line) for i, line in enumerate(lines, start=1))
    places = [match.span() for match in re.finditer(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", bare)]
    for start, end in places:
        changed = sources[0][:start] + "7" + sources[0][start:end] + sources[0][end:]
        assert of_sources([changed, *sources[1:]], ENTRIES) != code.hash, sources[0][start - 30 : end + 30]
    renamed = re.sub(r'(statement|says)="', r'\1="Not: ', sources[0], count=1)
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

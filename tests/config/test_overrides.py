"""Which settings a resumed run takes from its folder, in every spelling that Hydra accepts."""

import dataclasses
import datetime
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, job_config, merge_overrides, resumed_overrides, write_down
from bebop.config.fields import resume_refusals
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from tests.cases import slow_but


def job(overrides: list[str]) -> JobConfig:
    return job_config(resumed_overrides(overrides, "config", "runtime."))


def adaptation(overrides: list[str]) -> AdaptConfig:
    return adapt_config(resumed_overrides(overrides, "adapt"))


def keep(folder: Path, saved: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "overrides.json").write_text(json.dumps(saved))
    return folder


DIRS = [
    "{p}dir={d}", "{p}dir='{d}'", '{p}dir="{d}"', "++{p}dir={d}", "+{p}dir={d}", "++{p}dir='{d}'", "{p}dir= {d}",
    "{p}dir=${{oc.env:RUN_FOLDER}}", "{p}dir=${{.of}}/run", "{p}dir={d}/", "{p}dir={d}/../run",
]  # fmt: skip
RESUMES = ["{p}resume=true", "{p}resume=True", "{p}resume=TRUE", "++{p}resume=true", "++{p}resume=tRuE",
           "{p}resume= true", "{p}resume=${{oc.decode:'true'}}",
           "++{p}resume='${{oc.decode:${{oc.env:YES}}}}'"]  # fmt: skip
NEW_RUNS = ["{p}resume=false", "++{p}resume=False", "{p}resume=${{oc.decode:'false'}}"]


def spelled(text: str, section: str, folder: Path) -> str:
    if "${{.of}}" in text:  # a reference to another setting of the same call
        setting = "runtime.temp_dir" if section else "out"
        text = text.replace("${{.of}}", "${{" + setting + "}}")
    return text.format(p=section, d=folder)


PAIRS = [*((where, RESUMES[0]) for where in DIRS), *((DIRS[1], resume) for resume in RESUMES[1:])]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "resume"), slow_but(PAIRS[::6], PAIRS, several=True))
def test_the_folder_and_the_resume_are_read_as_hydra_reads_them(
    where: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = keep(tmp_path / "a b" / "run", ["task=gcd", "trainer.lr=0.5"])
    monkeypatch.setenv("RUN_FOLDER", str(folder))
    monkeypatch.setenv("YES", "true")
    more = [f"runtime.temp_dir={folder.parent}"]
    made = job([spelled(where, "runtime.", folder), spelled(resume, "runtime.", folder), *more])
    assert made.runtime.resume is True and Path(str(made.runtime.dir)).resolve() == folder
    assert (made.task.name, made.trainer.lr) == ("gcd", 0.5)


OF_AN_ADAPTATION = [PAIRS[1], PAIRS[3], PAIRS[7], PAIRS[8], PAIRS[-2]]


@pytest.mark.parametrize(("where", "resume"), slow_but(OF_AN_ADAPTATION[2:3], OF_AN_ADAPTATION, several=True))
def test_the_same_for_an_adaptation(where: str, resume: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = keep(tmp_path / "run", ["task=gcd", "head.lr=0.5"])
    monkeypatch.setenv("RUN_FOLDER", str(folder))
    made = adaptation([spelled(where, "", folder), spelled(resume, "", folder), f"out={folder.parent}"])
    assert made.resume is True and (made.task.name, made.head.lr) == ("gcd", 0.5)


@pytest.mark.parametrize("resume", slow_but(NEW_RUNS[1:2], NEW_RUNS))
def test_a_new_run_takes_nothing(resume: str, tmp_path: Path) -> None:
    folder = keep(tmp_path / "run", ["task=gcd"])
    assert job([f"runtime.dir={folder}", spelled(resume, "runtime.", folder)]).task.name == "chain_sum"
    assert job([f"runtime.dir={folder}"]).task.name == "chain_sum"
    assert job([f"runtime.dir={folder}/none", "runtime.resume=true"]).task.name == "chain_sum"


# saved, new, a setting, its value afterwards
MERGES: list[tuple[list[str], list[str], str, Any]] = [
    (["trainer.lr=1e-4"], [], "trainer.lr", 1e-4),
    (["trainer.lr=1e-4"], ["trainer.lr=2e-4"], "trainer.lr", 2e-4),
    (["trainer.lr=1e-4"], ["++trainer.lr=2e-4"], "trainer.lr", 2e-4),
    (["++trainer.lr=1e-4"], ["trainer.lr=2e-4"], "trainer.lr", 2e-4),
    (["++trainer.lr=1e-4"], ["trainer.lr= 2e-4"], "trainer.lr", 2e-4),
    (["++trainer.lr=1e-4"], ["++trainer.lr=2e-4"], "trainer.lr", 2e-4),
    (["trainer.lr=1e-4", "trainer.lr=3e-4"], [], "trainer.lr", 3e-4),
    (["task=gcd"], ["task=lcm"], "task.name", "lcm"),
    (["task=gcd"], ["task='lcm'"], "task.name", "lcm"),
    (["task=gcd", "task.seed=5"], ["task=lcm"], "task.seed", 0),
    (["task=gcd", "task.seed=5"], ["task=gcd"], "task.seed", 5),
    (["task.seed=5"], ["task=chain_sum"], "task.seed", 5),
    (["task=gcd", "task.args.max_value=7"], ["task=lcm"], "task.args", {"min_value": 2, "max_value": 30}),
    (["task=gcd", "++task.args.max_value=7"], ["task=lcm", "task.args.max_value=9"], "task.args.max_value", 9),
    (["decoding.draft_tokens=5"], ["decoding=target_only"], "decoding.draft_tokens", 3),
    (["decoding.draft_tokens=5"], ["decoding.system=target_only"], "decoding.draft_tokens", 5),
    (["cotrain=always"], ["trainer.steps=9"], "cotrain.mode", "always"),
    (["+task.args.extra=1"], [], "task.args.extra", 1),
    (["+task.args.extra=1"], ["+task.args.extra=2"], "task.args.extra", 2),
    (["+task.args.extra=1"], ["++task.args.extra=2"], "task.args.extra", 2),
    (["+task.args.extra=1"], ["task.args.extra=2"], "task.args.extra", 2),
    (["++task.args.extra=1"], ["task.args.extra=2"], "task.args.extra", 2),
    (["++task.args.extra=1"], ["+task.args.extra=2"], "task.args.extra", 2),
    (["+task.args.extra=1", "task.args.extra=2"], ["task.args.extra=3"], "task.args.extra", 3),
    (["+task.args.extra=1"], ["~task.args.extra"], "task.args.extra", None),
    (["~task.args.max_digits"], [], "task.args.max_digits", None),
    (["~task.args.max_digits"], ["~task.args.max_digits"], "task.args.max_digits", None),
    (["~task.args.max_digits"], ["task.args.max_digits=4"], "task.args.max_digits", 4),
    (["~task.args.max_digits"], ["+task.args.max_digits=4"], "task.args.max_digits", 4),
    (["~task.args.max_digits"], ["++task.args.max_digits=4"], "task.args.max_digits", 4),
    (["task.args.max_digits=4"], ["~task.args.max_digits"], "task.args.max_digits", None),
    (["task.args={max_digits:4}"], ["task.args={min_digits:2}"], "task.args.max_digits", 4),
    (["+task.args={more:4}"], ["+task.args={most:2}"], "task.args.more", 4),
    (["task.args.max_digits=4"], ["task.args={min_digits:2}"], "task.args.max_digits", 4),
    (["rollout.sampling.stop=[a,b]"], ["rollout.sampling.stop=[c]"], "rollout.sampling.stop", ["c"]),
    (["rollout.sampling.stop=[a,b]"], [], "rollout.sampling.stop", ["a", "b"]),
    (["rollout.sampling.stop=['a=b','{','x,y']"], [], "rollout.sampling.stop", ["a=b", "{", "x,y"]),
    (["trainer.lr=${cotrain.head.lr}"], ["cotrain.head.lr=.25"], "trainer.lr", 0.25),
    (["trainer.lr=.125"], ["trainer.lr=${cotrain.head.lr}", "cotrain.head.lr=.25"], "trainer.lr", 0.25),
    (
        ["rollout=sglang", "rollout.sglang.urls=['http://a:1']"],
        ["trainer.steps=7"],
        "rollout.sglang.urls",
        ["http://a:1"],
    ),
    (["task.system=null"], [], "task.system", None),
    (["task.system='a = b, \"c\"'"], [], "task.system", 'a = b, "c"'),
    (["task.system=null"], ["task.system=auto"], "task.system", "auto"),
]


@pytest.mark.parametrize(
    ("saved", "new", "name", "value"),
    slow_but(MERGES[::6], MERGES, several=True),
    ids=lambda v: " ".join(v) if type(v) is list else "",
)
def test_new_settings_win_and_the_others_stay(
    saved: list[str], new: list[str], name: str, value: Any, tmp_path: Path
) -> None:
    """And once they are one list, nothing is lost or doubled in it by another resume."""
    overrides = merge_overrides(saved, new)
    found: Any = json.loads(json.dumps(dataclasses.asdict(job_config(overrides))))
    for part in name.split("."):
        found = found.get(part)
    assert found == value
    assert merge_overrides(overrides, []) == overrides
    assert len(overrides) <= len(saved) + len(new)


@pytest.mark.slow
def test_what_is_written_down_is_what_the_next_resume_begins_with(tmp_path: Path) -> None:
    folder = keep(tmp_path / "run", ["task=gcd", "+task.args.extra=1", "trainer.lr=.5"])
    again = [f"++runtime.dir='{folder}'", "++runtime.resume=True"]
    first = resumed_overrides([*again, "trainer.lr=.25", "task.args.extra=2"], "config", "runtime.")
    write_down(job_config(first), first, folder, "runtime.")
    kept = ["task=gcd", "+task.args.extra=1", "trainer.lr=.25", "task.args.extra=2"]
    assert json.loads((folder / "overrides.json").read_text()) == kept
    assert resumed_overrides(again, "config", "runtime.") == [*kept, *again]


@pytest.mark.slow
def test_what_is_wrong_in_the_new_settings_is_said_as_ever(tmp_path: Path) -> None:
    folder = keep(tmp_path, ["task=gcd"])
    for wrong in ("trainer.foo=1", "trainer.lr=${nope}", "task=warp", "trainer.lr={"):
        with pytest.raises(UserError):
            job([f"runtime.dir={folder}", "runtime.resume=true", wrong])


def test_a_resume_that_is_not_true_or_false_is_refused(tmp_path: Path) -> None:
    folder = keep(tmp_path, ["task=gcd"])
    for word in ("yes", "1", "'true'"):
        with pytest.raises(UserError, match=r"runtime.resume"):
            job([f"runtime.dir={folder}", f"runtime.resume={word}"])


def test_a_folder_that_the_saved_settings_would_change_is_refused(tmp_path: Path) -> None:
    """runtime.dir refers to the task's name, which the settings saved there change: whose settings are meant?"""
    keep(tmp_path / "chain_sum", ["task=gcd"])
    with pytest.raises(UserError, match=r"runtime.dir is .*chain_sum' before the saved settings are read and another"):
        job([f"runtime.dir={tmp_path}/${{task.name}}", "runtime.resume=true"])


def test_settings_of_another_configuration_are_merged_and_left_alone(tmp_path: Path) -> None:
    """Those of megatron-core, which ``conf/adapt.yaml`` does not know."""
    folder = keep(tmp_path, ["task=gcd", "parallel.tensor=2", "parallel.evaluate=false"])
    new = [f"dir='{folder}'", "++resume=true", "parallel.tensor=1"]
    merged = resumed_overrides(new, "adapt", apart="parallel.")
    assert merged == ["task=gcd", "parallel.evaluate=false", *new]


@pytest.mark.slow
def test_the_day_on_which_a_run_began_is_that_of_its_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the model's chat template prints one: prompts of another day would be others."""

    class Day(datetime.date):
        @classmethod
        def today(cls) -> "Day":
            return cls(2026, 11, 29)

    model, folder = tmp_path / "model", tmp_path / "run"
    for path in (model, folder):
        path.mkdir()
    for file in resolve("tiny").iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}")
    monkeypatch.setattr(datetime, "date", Day)
    first = ["model=folder", f"model.path={model}", f"runtime.dir={folder}"]
    write_down(job_config(first), first, folder, "runtime.")
    monkeypatch.setattr(Day, "today", classmethod(lambda cls: cls(2026, 11, 30)))
    again = [f"runtime.dir={folder}", "runtime.resume=true"]
    assert job(again).model.date == "2026-11-29" and job(first).model.date == "2026-11-30"
    assert not resume_refusals(yaml.safe_load((folder / "config.yaml").read_text()), job(again))

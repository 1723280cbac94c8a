"""What cannot be done with answers in pairs is refused in one line that says why, before anything is written."""

from pathlib import Path
from typing import Any

import pytest

from bebop.compose import job_config
from bebop.config import DecodingConfig, JobConfig
from bebop.config_engines import SglangConfig
from bebop.decoding import SYSTEMS
from bebop.errors import UserError
from bebop.parsing import from_dict
from bebop.rollout.sglang.arguments import refuse_system
from bebop.run import main
from bebop.verl_job.settings import parse_engine

PAIRS = {"system": "pipo", "draft_tokens": 1}


def line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize("rescore", [False, True])
def test_a_job_cannot_train_on_them_and_names_what_does(rescore: bool) -> None:
    """Rescoring, which helps other inexact systems, does not help here."""
    with pytest.raises(UserError) as error:
        from_dict(JobConfig, {"decoding": PAIRS, "algorithm": {"rescore": rescore}})
    text = line(error)
    assert (
        text.startswith("decoding.system='pipo' is not possible: ") and "cannot be scored again token by token" in text
    )
    assert "python -m bebop.adapt part=pipo options.stage=opd" in text
    assert from_dict(JobConfig, {"decoding": {"system": "pad"}}).decoding.system == "pad"


def test_the_command_ends_before_anything_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(UserError, match=r"'pipo' is not possible: .*stage=opd"):
        main(["decoding=pipo", f"runtime.dir={folder}"])
    assert not folder.exists()
    assert job_config(["decoding=bebop"]).decoding.system == "bebop", "the same command with another system"


def test_other_engines_say_what_they_lack() -> None:
    with pytest.raises(UserError) as error:
        refuse_system(DecodingConfig(**PAIRS), SglangConfig(), "cuda")
    assert line(error).startswith(
        "decoding.system='pipo' is not possible with SGLang: its caches hold an entry for two"
    )
    with pytest.raises(UserError) as error:
        parse_engine({"system": "pipo"})
    assert line(error).startswith("engine_kwargs.bebop.system='pipo' is not possible: answers drawn in pairs cannot be")


def test_no_other_system_is_refused_for_it() -> None:
    assert [name for name, system in SYSTEMS.items() if system.untrainable] == ["pipo"]
    reason = SYSTEMS["pipo"].unserved
    assert reason and [name for name, system in SYSTEMS.items() if system.unserved == reason] == ["pipo"]


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"draft_tokens": 3}, "draft_tokens=3 is not possible: give 1 to 1"),
        ({"draft_tokens": 0}, "draft_tokens=0 is not possible: give 1 to 1"),
        ({"options": {"tau": float("inf")}}, "options.tau=inf is not possible: "),
        ({"options": {"keep": 1.5}}, "options.keep=1.5 is not possible: give a number from 0 to 1"),
        ({"options": {"gate": "head"}}, "options.gate='head' is not possible"),
        ({"options": {"threshold": 0.5}}, "threshold"),
    ],
)
def test_a_mistake_in_its_options_is_one_line(own: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        DecodingConfig(**{**PAIRS, **own})
    assert words in line(error)

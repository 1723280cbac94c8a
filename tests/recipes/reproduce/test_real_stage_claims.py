"""The stage that runs the studies of the claims: each in turn; and both from nothing on the built-in model."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from bebop.errors import UserError
from recipes.reproduce.real import __main__ as real

STUDIES = ("real_entropy", "real_drafts")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which modules were run; those of drafts fail."""
    modules: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        modules.append(command[2])
        return SimpleNamespace(returncode=int("drafts" in command[2]))

    monkeypatch.setattr(real.subprocess, "run", run)
    return modules


def test_every_study_is_run_whether_or_not_the_one_before_succeeded(
    ran: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert real.CLAIMS == (*STUDIES, "real_losses")
    monkeypatch.setattr(real, "CLAIMS", ("real_drafts", "real_nothing", "real_entropy"))
    with pytest.raises(UserError, match=r"^failed: real_drafts$"):
        real.judge_claims([], Namespace(share=(1, 1)))
    assert ran == ["recipes.reproduce.real_drafts", "recipes.reproduce.real_entropy"]
    assert "real_nothing: nothing computes its numbers yet\n" in capsys.readouterr().out


def test_a_share_of_the_heads_is_not_judged(ran: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    real.judge_claims([], Namespace(share=(1, 2)))
    assert not ran and "run --stage claims when all have ended" in capsys.readouterr().out


def command(module: str, *options: str, place: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"recipes.reproduce.{module}", "--quick", *options],
        env=os.environ | {"BEBOP_REPRODUCE": str(place)}, capture_output=True, text=True, check=False, cwd=real.ROOT,
    )  # fmt: skip


@pytest.mark.slow
def test_a_smoke_run_ends_in_results_of_both_studies(tmp_path: Path) -> None:
    for name in STUDIES:
        found = command(name, place=tmp_path)
        assert found.returncode != 0 and "run first python -m recipes.reproduce.real --stage heads" in found.stderr
        assert "Traceback" not in found.stderr
    stages = ("corpus", "states", "heads", "evaluation")
    heads = ("shared", "hard_ce-0", "ce-0", "e2e_tv-0")
    assert command("real", "--stage", *stages, "--heads", *heads, place=tmp_path).returncode == 0
    for name in STUDIES:
        found = command(name, place=tmp_path)
        assert found.returncode == 0, found.stderr
        content = json.loads((tmp_path / name / "results.json").read_text())
        assert len(content["figures"]) == 4 and all(content["tables"].values())
        assert all(len(seeds) == 1 for seeds in content["settings"]["seeds"].values())
        assert {f["untested"][:13] for f in content["judgements"][0]["findings"]} == {"not measured:"}, "one seed alone"

"""The plug-in for tests of other projects: the embedded engine passes, a faulty function fails, pages are written."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.certify.certificate import Certificate
from bebop.certify.offline import live_engine
from bebop.errors import UserError
from bebop.rollout.engine import Request
from tests.certify.test_certificate import certificate

pytest_plugins = ["bebop.pytest_plugin"]
FEW = ("tokens=300", "cohort=4", "stress=0", "threads=1", "sampling.max_new_tokens=24")
Certify = Callable[..., Certificate]


@pytest.mark.slow
def test_the_embedded_engine_passes_and_its_pages_are_written(certify_engine: Certify, tmp_path: Any) -> None:
    found = certify_engine(None, "tiny", "quick=true", "limit_tv=0.9", *FEW).require_pass()
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "certificate.json").read_text())["log_e"] == found.log_e
    assert (folder / "report.html").exists() and found.engine["name"] == "embedded"


@pytest.mark.slow  # the first import of Hydra
def test_without_plotly_a_certificate_is_written_without_its_page(
    certify_engine: Certify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("plotly", "bebop.certify.report"):
        monkeypatch.setitem(sys.modules, name, None)
    wanted = certificate()
    monkeypatch.setattr("bebop.certify.run.make_run", lambda *_: SimpleNamespace(run=lambda: wanted))
    assert certify_engine(None, "tiny", "quick=true", *FEW) is wanted
    [file] = tmp_path.rglob("*.*")
    assert file.name == "certificate.json" and json.loads(file.read_text())["verdict"] == "pass"
    assert "plotly is not installed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_function_that_says_the_same_whatever_it_is_asked_fails(certify_engine: Certify) -> None:
    def stuck(requests: list[Request]) -> list[Any]:
        import numpy as np

        from bebop.certify.answers import Answer
        from bebop.certify.calls import fields

        return [Answer(**fields(one), token_ids=np.full(24, 7), finish_reason="length") for one in requests]

    with pytest.raises(AssertionError, match="Fail: the function engine"):
        certify_engine(stuck, "tiny", *FEW).require_pass()


def test_what_is_no_engine_is_named() -> None:
    with pytest.raises(UserError, match="int is no engine that can be certified: give vLLM's LLM"):
        live_engine(5)


def test_certificates_of_one_test_have_folders_of_their_own(tmp_path: Any) -> None:
    from bebop.pytest_plugin import _free  # after pytest has it, which rewrites its asserts

    first = _free(tmp_path, "test_a[x/y]")
    first.mkdir()
    assert first.name == "test_a-x-y" and _free(tmp_path, "test_a[x/y]").name == "test_a-x-y-2"

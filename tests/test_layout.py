"""Rules about the sources: the contracts of pyproject.toml find what is planted, and some words stay in their places.

``make lint`` holds the tree against the contracts and the lengths: ``tests/lint.py``. ``test_packaging.py`` has the
rules about files, names and the wheel.
"""

import re
import tomllib
from pathlib import Path
from shutil import copyfile, copytree, ignore_patterns

import pytest

from bebop.systems import SYSTEMS
from tests.lint import FILE, FUNCTION, check_imports, too_long
from tests.tree import LINKS, ROOT, SKIPPED, sources, under

# Where a rollout may speak of the MTP head: in its drafter, and where weights are handed to an engine.
HEADED = ("bebop.rollout.decoding.mtp", "bebop.rollout.served_weights", "bebop.rollout.sglang", "bebop.rollout.vllm")
NAMES = rf"""["'](?:{"|".join(SYSTEMS)})["']"""
COMPARED = re.compile(rf"[=!]= *{NAMES}|{NAMES} *[=!]=|\bin *[(\[{{][^)\]}}\n]*{NAMES}")
LOOP = re.compile(r"\bfor [\w, ]+ in\b")


def words(module: str, source: str) -> list[str]:
    """Return the lines of a module that compare with a decoding system's name, or speak of the MTP head elsewhere.

    Decoding systems are asked for their properties. "bebop" is also an engine of verl, which may be compared with.
    """
    head = under(module, "bebop.rollout") and not any(under(module, place) for place in HEADED)
    return [
        f"{module}:{number}: {line.strip()}"
        for number, line in enumerate(source.splitlines(), 1)
        if (head and "mtp" in line.lower()) or ("rollout.name" not in line and COMPARED.search(LOOP.sub("", line)))
    ]


def test_words_stay_in_their_places() -> None:
    tree = sources()
    assert {"bebop.runtime.job", "bebop.rollout.worker", "bebop.trainer.losses", "recipes.tiny.data"} <= set(tree)
    assert [line for module, source in tree.items() for line in words(module, source)] == []
    assert [place for place in HEADED if not any(under(module, place) for module in tree)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bebop.driver.loop", "if config.decoding.system == 'target_only': pass"),
        ("bebop.driver.loop", 'if "target_only" != config.decoding.system: pass'),
        ("bebop.monitor.watch", "fixed = system in ('autoregressive', other)"),
        ("bebop.rollout.torch_engine", "if policy.mtp is not None:\n    pass"),
        ("bebop.rollout.decoding.draft_verify", "heads = weights('MTP')"),
    ],
)
def test_planted_words_are_caught(module: str, source: str) -> None:
    assert len(words(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bebop.driver.loop", "pairs = [f(name) for name in ('target_only', 'pad')]"),
        ("bebop.driver.loop", "near = sums['target_only'] > 1\nif rollout.name == 'bebop': pass"),
        ("bebop.rollout.decoding.mtp", "head = policy.mtp"),
        ("bebop.trainer.policy", "head = policy.mtp"),
    ],
)
def test_words_in_their_places_pass(module: str, source: str) -> None:
    assert words(module, source) == []


# A file, what is added to it, and the import that import-linter has to report. Each contract has one; the floors have
# one for each way in which an import can be written.
PLANTED = [
    ("kernels/verify.py", "from bebop.model.backbone import Policy", "bebop.kernels.verify -> bebop.model.backbone"),
    ("bebop/driver/buffer.py", "from bebop.driver import loop", "bebop.driver.buffer -> bebop.driver.loop"),
    ("bebop/driver/loop.py", "def f():\n    import bebop.runtime.job", "bebop.driver.loop -> bebop.runtime.job"),
    ("bebop/driver/protocols.py", "from bebop.driver.pool import Pool", "bebop.driver.protocols -> bebop.driver.pool"),
    ("bebop/somewhere.py", "", "bebop.somewhere"),  # a module without a floor
    ("trainer/losses.py", "import bebop.trainer.rank", "bebop.trainer.losses -> bebop.trainer.rank"),
    ("trainer/policy.py", "from bebop.rollout import slots", "bebop.trainer.policy -> bebop.rollout.slots"),
    ("rollout/worker.py", "from bebop.trainer import losses", "bebop.rollout.worker -> bebop.trainer.losses"),
    ("trainer/rank.py", "from recipes.tiny.data import examples", "bebop.trainer.rank -> recipes.tiny.data"),
    (
        "bebop/systems/firp/losses.py",
        "from bebop.systems.block import losses",
        "bebop.systems.firp.losses -> bebop.systems.block.losses",
    ),
    (
        "rollout/decoding/lengths.py",
        "def f():\n    import bebop.trajectory",
        "bebop.rollout.decoding.lengths -> bebop.trajectory",
    ),
    ("bebop/driver/pool.py", "import ray.util", "bebop.driver.pool -> ray"),
    ("bebop/config/job.py", "from omegaconf import DictConfig", "bebop.config.job -> omegaconf"),
    ("rollout/torch_engine.py", "import sglang.srt", "bebop.rollout.torch_engine -> sglang"),
    ("rollout/capacity.py", "import vllm", "bebop.rollout.capacity -> vllm"),
    ("recipes/megatron/job.py", "import verl", "bebop.megatron_job.job -> verl"),
    ("trainer/optim.py", "import megatron.core", "bebop.trainer.optim -> megatron"),
    ("bebop/adapt.py", "from plotly import graph_objects", "bebop.adapt -> plotly"),
    ("rollout/engines.py", "def f():\n    from wandb import init", "bebop.rollout.engines -> wandb"),
    ("rollout/engines.py", "def g():\n    from trackio import init", "bebop.rollout.engines -> trackio"),
    ("bebop/tasks/environment.py", "import verifiers", "bebop.tasks.environment -> verifiers"),
    ("trainer/policy.py", "def f():\n    import peft", "bebop.trainer.policy -> peft"),
    ("bebop/monitor/window.py", "def f():\n    import torch", "bebop.monitor.window -> torch"),
]


@pytest.mark.slow
def test_planted_imports_are_caught(tmp_path: Path) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    for name in ("bebop", "recipes", "benchmarks", *LINKS):
        copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignore_patterns(*SKIPPED))
    copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for file, line, _ in PLANTED:
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{line}\n")
    done = check_imports(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = " ".join(done.stdout.split())  # import-linter breaks long lines
    assert [found for _, _, found in PLANTED if f" {found} (" not in report and f"- {found} " not in report] == []
    assert [contract["name"] for contract in contracts if f" {contract['name']} BROKEN" not in report] == []


def test_planted_lengths_are_caught() -> None:
    body = "    x = 1\n" * (FUNCTION - 1)
    assert list(too_long("a.py", f"def f():\n{body}")) == []
    said = f"f has {FUNCTION + 1} lines, {FUNCTION} are allowed in a function"
    assert list(too_long("a.py", f"def f():\n{body}    x = 1\n")) == [f"a.py:1: {said}"]
    assert list(too_long("a.py", f"@cache\ndef f():\n{body}")) == [f"a.py:1: {said}"]
    inside = "class A:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION
    assert list(too_long("a.py", inside)) == [f"a.py:2: {said}"]
    assert list(too_long("a.py", "x = 1\n" * FILE)) == []
    assert list(too_long("a.py", "x = 1\n" * (FILE + 1))) == [f"a.py: {FILE + 1} lines, {FILE} are allowed in a file"]

"""Violations of the rules of ``test_layout.py``, each of which its rule finds; and what the rules let pass."""

import pytest

from tests.test_layout import (
    FILE,
    FUNCTION,
    door_violations,
    floor_violations,
    form_violations,
    head_violations,
    length_violations,
    library_violations,
    numpy_violations,
    part_violations,
    side_violations,
    stale,
    system_violations,
)
from tests.tree import sources

MODULES = ("bebop.loop", "bebop.runtime", "bebop.rollout.worker", "bebop.trainer.policy", "bebop.rollout.engine")
PLANTED = [
    (floor_violations, "bebop.kernels.verify", "from bebop.model.backbone import Policy"),
    (floor_violations, "bebop.buffer", "from bebop import loop"),
    (floor_violations, "bebop.loop", "def f():\n    import bebop.runtime"),
    (floor_violations, "bebop.rollout.decoding.sampling", "from bebop.rollout.decoding.registry import make_part"),
    (floor_violations, "bebop.rollout.engine", "import importlib\nimportlib.import_module('bebop.rollout.worker')"),
    (floor_violations, "bebop.trainer.rank", "from recipes.tiny.data import examples"),
    (floor_violations, "bebop.somewhere", ""),
    (side_violations, "bebop.trainer.policy", "from bebop.rollout.engine import Request"),
    (side_violations, "bebop.rollout.worker", "from bebop.trainer import policy"),
    (door_violations, "bebop.loop", "import ray"),
    (door_violations, "bebop.config", "from omegaconf import DictConfig"),
    (door_violations, "bebop.rollout.torch_engine", "import sglang.srt"),
    (door_violations, "bebop.rollout.worker", "def f():\n    from wandb import init"),
    (form_violations, "bebop.loop", "from rollout.worker import RolloutWorker"),
    (form_violations, "bebop.loop", "import kernels"),
    (form_violations, "bebop.loop", "from . import buffer"),
    (system_violations, "bebop.loop", "if config.decoding.system == 'target_only': pass"),
    (system_violations, "bebop.monitor.watch", "fixed = system in ('autoregressive', other)"),
    (part_violations, "bebop.rollout.decoding.drafters.mtp", "from bebop.rollout.target import Target"),
    (part_violations, "bebop.rollout.decoding.rules.block", "from bebop.rollout.decoding.rules import rejection"),
    (part_violations, "bebop.rollout.decoding.lengths.entropy", "def f():\n    import bebop.trajectory"),
    (head_violations, "bebop.rollout.torch_engine", "if policy.mtp is not None:\n    pass"),
    (head_violations, "bebop.rollout.decoding.emit", "heads = weights('MTP')"),
    (numpy_violations, "bebop.monitor.window", "def f():\n    import torch"),
    (numpy_violations, "bebop.monitor.watch", "from scipy.stats import norm"),
    (floor_violations, "bebop.protocols", "from bebop.pool import Pool"),
    (floor_violations, "bebop.adaptation.job", "import bebop.tasks.__main__"),
]


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_planted_imports_are_caught(rule, module: str, source: str) -> None:
    assert len(rule(module, source, MODULES)) == 1


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (floor_violations, "bebop.runtime", "from bebop.loop import Loop"),
        (floor_violations, "bebop.rollout.decoding.draft_verify", "from bebop.rollout.target import Target"),
        (side_violations, "bebop.runtime", "from bebop.rollout import worker\nfrom bebop.trainer import policy"),
        (door_violations, "bebop.rollout.sglang.engine", "import sglang"),
        (door_violations, "bebop.runtime", "import ray.util"),
        (system_violations, "bebop.loop", "near = sums['target_only'] > 1\nif rollout.name == 'bebop': pass"),
        (part_violations, "bebop.rollout.decoding.rules.block", "from bebop.rollout.decoding.base import Draft"),
        (part_violations, "bebop.rollout.decoding.drafters.mtp", "import torch\nfrom bebop.model.mtp import MTPHead"),
        (head_violations, "bebop.rollout.decoding.drafters.mtp", "head = policy.mtp"),
        (head_violations, "bebop.trainer.cotrain", "head = policy.mtp"),
        (
            numpy_violations,
            "bebop.monitor.window",
            "import json\nimport numpy as np\nfrom bebop import errors",
        ),
        (numpy_violations, "bebop.trainer.losses", "import torch"),
        (floor_violations, "bebop.tasks.__main__", "from bebop.runtime import run"),
        (form_violations, "bebop.loop", "import trainers\nfrom bebop.rollout.worker import RolloutWorker"),
    ],
)
def test_what_is_allowed_passes(rule, module: str, source: str) -> None:
    assert rule(module, source, MODULES) == []


def test_planted_lengths_are_caught() -> None:
    body = "    x = 1\n" * (FUNCTION - 1)
    assert length_violations("a.py", f"def f():\n{body}") == []
    assert length_violations("a.py", f"def f():\n{body}    x = 1\n") == [f"a.py:f: {FUNCTION + 1} lines"]
    assert length_violations("a.py", f"@cache\ndef f():\n{body}") == [f"a.py:f: {FUNCTION + 1} lines"]
    inside = "class A:\n    async def f(self):\n" + "        x = 1\n" * FUNCTION
    assert length_violations("a.py", inside) == [f"a.py:f: {FUNCTION + 1} lines"]
    assert length_violations("a.py", "x = 1\n" * FILE) == []
    assert length_violations("a.py", "x = 1\n" * (FILE + 1)) == [f"a.py: {FILE + 1} lines"]


def test_names_that_no_module_has_are_caught() -> None:
    tree = [module for module in sources() if module not in ("bebop.loop", "bebop.sinks")]
    assert stale(tree) == ["bebop.loop", "bebop.sinks"]


def test_a_library_that_comes_along_is_caught() -> None:
    assert library_violations(["bebop.buffer", "bebop.trainer.advantages"], "numpy") == ["numpy"]

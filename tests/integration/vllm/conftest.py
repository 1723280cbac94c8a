"""Real vLLM on the CPU, in its own environment (make test-vllm); elsewhere nothing here is collected.

``make test-vllm`` runs it twice, with each of vLLM's model runners (see ``builders.py``).
"""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
V2 = os.environ.get("BEBOP_VLLM_RUNNER") == "v2"
if V2:  # these say nothing of a runner, or are of the first alone
    collect_ignore_glob += [f"test_{name}.py" for name in ("bench", "distributions", "job", "suffixes", "upstream")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if find_spec("vllm"):  # its classes of Qwen3.5 import torchvision, which has no build for this torch, for images only
    STUBS = str(Path(__file__).parents[1] / "stubs")
    sys.path.append(STUBS)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STUBS]))
    if V2:  # before a test imports vLLM, whose modules look for Triton as they are loaded
        from bebop.rollout.vllm.cpu import interpret

        interpret()


@pytest.fixture(scope="session", autouse=True)
def one_seed() -> Iterator[None]:
    """Give engines of this process the same seed in each run: bounds of p-values hold for these draws."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("bebop.rollout.vllm.arguments.fresh_seed", lambda: 0)
        yield


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[Any]:
    """An engine that decodes with the model's MTP head."""
    from tests.integration.vllm.builders import engine  # vLLM
    from tests.served_models import job

    with engine(job(folder)) as found:
        yield found

"""Real SGLang on the CPU, in its own environment (make test-sglang); elsewhere nothing here is collected."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

# SGLang imports two packages that have no build for this torch; its processes, and Ray's, look for them as well.
STUBS = [str(place / "stubs") for place in (Path(__file__).parent, Path(__file__).parents[1])]
if find_spec("sglang"):
    sys.path += STUBS
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *STUBS]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session", autouse=True)
def one_seed() -> Iterator[None]:
    """Give engines of this process the same seed in each run: bounds of p-values hold for these draws."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("bebop.rollout.sglang.arguments.fresh_seed", lambda: 0)
        yield

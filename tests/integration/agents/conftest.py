"""Real OpenEnv servers and verifiers environments, in their own environment (make test-agents); elsewhere nothing is
collected."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

collect_ignore_glob = [] if find_spec("verifiers") and find_spec("openenv") else ["test_*.py"]

sys.path.append(str(Path(__file__).with_name("packages")))  # an environment package, as verifiers finds installed ones
os.environ.setdefault("HF_HUB_OFFLINE", "1")

"""Real vLLM on the CPU, in its own environment (make test-vllm); elsewhere nothing here is collected."""

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

"""Real SGLang on the CPU, in its own environment (make test-sglang); elsewhere nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("sglang") else ["test_*.py"]

"""Real jobs of verl on the CPU, in their own environment (make test-verl); elsewhere nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") else ["test_*.py"]

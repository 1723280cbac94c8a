"""Tests in an environment of their own (make test-megatron); elsewhere nothing here is collected."""

from importlib.util import find_spec

if find_spec("megatron") is None or find_spec("megatron.core") is None:
    collect_ignore_glob = ["*.py"]

"""Lets every process that is started with this folder on its path run Triton kernels on a CPU.

vLLM asks for Triton as it is imported, in processes that it starts itself. So the interpreter is put in place, and the
name of vLLM's distribution for CPUs known, when somebody looks for vLLM.
"""

import sys
from importlib.abc import MetaPathFinder
from typing import Any


class Before(MetaPathFinder):
    """Finds nothing; the first search for vLLM is what it waits for."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname == "vllm":
            sys.meta_path.remove(self)
            import bebop.verl_job.plugin  # noqa: F401
            from bebop.rollout.vllm.cpu import interpret

            interpret()


sys.meta_path.insert(0, Before())

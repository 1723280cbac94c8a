"""Check of the ``bebop`` block before Ray starts; the driver then passes it to the job's processes."""

import dataclasses
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

from packaging.version import Version

from bebop.config.engines import ModelRunner
from bebop.config.fields import check
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.sglang.backend import INTERPRETER, WHOLE_ANSWERS
from bebop.rollout.vllm.plugin import CPU, DRAFTS, EVERY, RUNNER
from bebop.systems import SYSTEMS
from bebop.verl_job.hooks import wrap
from bebop.verl_job.plugin import on_cpu
from bebop.verl_job.settings import (
    EXTERNAL,
    HEADS,
    MODULE,
    SELECTOR,
    VARIABLE,
    VerlConfig,
    parse,
    parse_engine,
    plain,
    to_variable,
)

LEVEL = "VERL_LOGGING_LEVEL"


def hand_over(constants: ModuleType) -> None:
    """Hook the function that makes the environment of verl's processes; verl calls it just before it starts Ray."""

    def around(original: Any, config: Any = None) -> dict[str, Any]:
        environment: dict[str, Any] = original(config)
        block = None if config is None else config.get("bebop")
        if block is None:
            return environment
        try:
            wanted = with_rollout(config, parse(block))
            check_job(config, wanted)
            wanted = choose_runner(config, wanted)
        except UserError as error:
            sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
            raise SystemExit(2) from None
        modules = _external(config)
        environment["env_vars"] |= {VARIABLE: to_variable(wanted), EXTERNAL: modules}
        environment["env_vars"][SELECTOR] = "all" if sends_head(config, wanted) else "target"
        if wanted.metrics and wanted.verify_every:
            environment["env_vars"][EVERY] = str(wanted.verify_every)
        environment["env_vars"] |= for_vllm(config, wanted) | for_sglang(config, wanted) | for_verl(config)
        return environment

    wrap(constants, "get_ppo_ray_runtime_env", around)


def for_verl(config: Any) -> dict[str, str]:
    """Return the variables that verl's own processes need.

    The trainer of ``separate_async`` (verl 0.9.1) gives ``logger.info`` an argument that it does not have, which only a
    higher level of logging avoids.
    """
    apart = config.trainer.get("v1", {}).get("trainer_mode") == "separate_async"
    return {LEVEL: os.environ.get(LEVEL, "WARNING")} if apart else {}


def with_rollout(config: Any, wanted: VerlConfig) -> VerlConfig:
    """Return the block with truncation and acceptance rule of rollouts; verl's ``top_k`` is -1 for all tokens."""
    rollout = config.actor_rollout_ref.rollout
    own = plain(rollout.engine_kwargs.get(rollout.name) or {})
    if rollout.name == "bebop":
        rule = SYSTEMS[parse_engine(own).system].rule_name
    else:
        rule = "block" if own.get("speculative_use_block_verification") else "rejection"
    top_p, top_k = float(rollout.get("top_p", 1.0)), max(0, int(rollout.get("top_k", 0)))
    return dataclasses.replace(wanted, rollout_top_p=top_p, rollout_top_k=top_k, rollout_rule=rule)


def drafts(config: Any) -> bool:
    """Return whether SGLang or vLLM drafts with an MTP head in a verl job."""
    mtp = config.actor_rollout_ref.model.mtp
    return bool(mtp.enable and mtp.enable_rollout)


def choose_runner(config: Any, wanted: VerlConfig) -> VerlConfig:
    """Return the block with vLLM's model runner; for the first runner, also turn off asynchronous scheduling.

    If no drafts are measured, vLLM chooses the runner itself, unless the block names one.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm" or not (wanted.metrics and drafts(config)):
        return wanted
    runner = model_runner(wanted)
    if runner == "v1":
        rollout.engine_kwargs.vllm.async_scheduling = False  # ``_check_vllm``: it is set, to false or null
    return dataclasses.replace(wanted, model_runner=runner)


def model_runner(wanted: VerlConfig) -> ModelRunner:
    """Return the model runner of vLLM; on a CPU the one with compiled kernels, unless the block names the other."""
    return wanted.model_runner or ("v1" if on_cpu(os.environ) else "v2")


def for_vllm(config: Any, wanted: VerlConfig) -> dict[str, str]:
    """Return the variables for vLLM's processes; Bebop's vLLM plug-in reads no other settings."""
    if config.actor_rollout_ref.rollout.name != "vllm":
        return {}
    variables = {CPU: "1"} if on_cpu(os.environ) else {}
    if wanted.metrics and drafts(config):
        own = plain(config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}).get("speculative_config") or {}
        own = json.loads(own) if isinstance(own, str) else own  # verl takes it as a text, too, and lets it decide
        drafted = own.get("num_speculative_tokens") or config.actor_rollout_ref.model.mtp.num_speculative_tokens
        variables |= {EVERY: str(wanted.verify_every), DRAFTS: str(drafted)}
    if wanted.model_runner is not None:
        variables[RUNNER] = str(int(wanted.model_runner == "v2"))
    return variables


def for_sglang(config: Any, wanted: VerlConfig) -> dict[str, str]:
    """Return the variables for SGLang's processes: complete entries of verification steps, and kernels for a CPU."""
    if config.actor_rollout_ref.rollout.name != "sglang":
        return {}
    # If SGLang reports on a completion before its end, it cuts off the entries after the first report.
    variables = dict(WHOLE_ANSWERS) if wanted.metrics and wanted.verify_every else {}
    return variables | (INTERPRETER if on_cpu(os.environ) else {})


def _external(config: Any) -> str:
    """Return the modules that every process imports first: the user's, then the plug-in.

    The plug-in is named although it has an entry point: verl silently skips an entry point that fails to load. The
    configuration's list of modules overrides the environment's, so it also gets all names.
    """
    own = plain(config.get("ray_kwargs") or {}).get("ray_init", {}).get("runtime_env", {}).get("env_vars") or {}
    named = f"{os.environ.get(EXTERNAL, '')},{own.get(EXTERNAL, '')}".split(",")
    modules = ",".join(dict.fromkeys([*(name for name in named if name and name != MODULE), MODULE]))
    if EXTERNAL in own:
        config.ray_kwargs.ray_init.runtime_env.env_vars[EXTERNAL] = modules
    return modules


# ---- impossible settings are refused in one line, before anything heavy starts

OLDEST_SGLANG = "0.5.14"
OLDEST_VLLM = "0.31"
PARALLEL = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
REJECTION = "speculative_use_rejection_sampling"


def check_job(config: Any, wanted: VerlConfig) -> None:
    """Raise ``UserError`` for the first conflict in a verl configuration."""
    rollout = config.actor_rollout_ref.rollout
    _check_sizes(config)
    if rollout.name == "bebop":
        _check_embedded(config.actor_rollout_ref, int(config.trainer.nnodes) * int(config.trainer.n_gpus_per_node))
    if rollout.name == "sglang":
        _check_sglang(config, sends_head(config, wanted))
    named = wanted.model_runner is not None
    check(not named or rollout.name == "vllm", "bebop.model_runner", wanted.model_runner, "it is vLLM's; give null")
    if rollout.name == "vllm":
        _check_vllm(config, wanted, sends_head(config, wanted))
    if wanted.train_head:
        _check_head(config, wanted)


def sends_head(config: Any, wanted: VerlConfig) -> bool:
    """Return whether the trainer sends an MTP head: Bebop's always does, verl's Megatron engine if it has one."""
    job = config.actor_rollout_ref
    return bool(wanted.train_head or (job.actor.strategy == "megatron" and job.model.mtp.enable))


def _check_sizes(config: Any) -> None:
    """Check sizes that verl also asserts, but only in a worker, long after the start."""
    rollout = config.actor_rollout_ref.rollout
    devices = config.trainer.n_gpus_per_node * config.trainer.nnodes
    size = 1
    for name in PARALLEL:
        size *= int(rollout[name])
    if not rollout.nnodes:  # the replicas share the trainer's devices
        why = f"{devices} devices of the trainer must be a multiple of the {size} that one replica takes"
        check(devices % size == 0, "rollout." + PARALLEL[0], rollout[PARALLEL[0]], why)
    rows = config.data.train_batch_size * rollout.n
    why = f"with rollout.n={rollout.n} that is {rows} answers, which must be a multiple of {devices} devices"
    check(rows % devices == 0 or bool(config.actor_rollout_ref.actor.use_dynamic_bsz), "data.train_batch_size",
          config.data.train_batch_size, why)  # fmt: skip


def _check_embedded(job: Any, devices: int) -> None:
    rollout, lora = job.rollout, _lora_rank(job.model)
    check(lora == 0, "model.lora_rank", lora, "rollout.name=bebop takes whole weights, no adapters; give 0")
    wrong = next((name for name in PARALLEL if rollout[name] != 1), None)
    if wrong is not None:
        raise UserError(f"rollout.{wrong}={rollout[wrong]} is not possible with rollout.name=bebop: give 1")
    if not on_cpu(os.environ) and devices > 1:  # all engines would decode on the first GPU
        raise UserError(f"rollout.name=bebop is not possible with {devices} GPUs: give one, or sglang or vllm")
    engine = parse_engine(rollout.engine_kwargs.get("bebop"))
    DecodingConfig(system=engine.system, draft_tokens=engine.draft_tokens)  # says what is wrong with them


def _lora_rank(model: Any) -> int:
    """Return the rank of the adapters that a job trains; 0 without any. ``model.lora`` is that of Megatron."""
    return int(max(model.get("lora_rank", 0), (model.get("lora") or {}).get("rank", 0)))


def _check_sglang(config: Any, head_sent: bool) -> None:
    """Check the settings of rejection sampling, which needs a newer SGLang and chains of drafts."""
    options = config.actor_rollout_ref.rollout.engine_kwargs.get("sglang") or {}
    mtp = config.actor_rollout_ref.model.mtp
    if not options.get(REJECTION):
        return
    setting = f"rollout.engine_kwargs.sglang.{REJECTION}"
    drafts = bool(mtp.enable and mtp.enable_rollout)
    check(drafts, setting, True, "it takes model.mtp.enable=true and model.mtp.enable_rollout=true")
    check(mtp.speculative_eagle_topk == 1, "model.mtp.speculative_eagle_topk", mtp.speculative_eagle_topk,
          "rejection sampling verifies chains: give 1")  # fmt: skip
    steps, tokens = mtp.speculative_num_steps, mtp.speculative_num_draft_tokens
    check(tokens == steps + 1, "model.mtp.speculative_num_draft_tokens", tokens, f"with {steps} steps give {steps + 1}")
    _check_loading(config, head_sent)
    installed = _installed("sglang", "SGLang")
    new = Version(installed) >= Version(OLDEST_SGLANG)
    check(new, setting, True, f"SGLang {installed} lacks rejection sampling; install {OLDEST_SGLANG} or newer")


def _check_vllm(config: Any, wanted: VerlConfig, head_sent: bool) -> None:
    """Check that log-probs belong to the distribution sampled from, and that statistics of drafts can be read."""
    rollout, mtp = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model.mtp
    interpreted = on_cpu(os.environ) and os.environ.get("TRITON_INTERPRET") != "1"
    why = "on a CPU its kernels run in Triton's interpreter, for tests: set TRITON_INTERPRET=1, or give v1"
    check(wanted.model_runner != "v2" or not interpreted, "bebop.model_runner", wanted.model_runner, why)
    if not drafts(config):
        return
    options = rollout.engine_kwargs.get("vllm") or {}
    check(mtp.method == "mtp", "model.mtp.method", mtp.method, "give mtp: the head in the checkpoint")
    _check_loading(config, head_sent)
    mode = rollout.logprobs_mode
    why = "what is trained on are log-probs of what was drawn from; give processed_logprobs"
    check(mode == "processed_logprobs", "rollout.logprobs_mode", mode, why)
    stepwise = wanted.metrics and model_runner(wanted) == "v1"
    name = "async_scheduling"
    why = "bebop.metrics reads the first model runner step by step; give false or null, or bebop.model_runner=v2"
    check(not stepwise or (name in options and not options[name]), f"rollout.engine_kwargs.vllm.{name}",
          options.get(name), why)  # fmt: skip
    installed = _installed("vllm", "vLLM")
    new = Version(installed) >= Version(OLDEST_VLLM)
    check(
        new, "rollout.name", "vllm", f"vLLM {installed} takes no new weights for drafts; install {OLDEST_VLLM} or newer"
    )


def _check_loading(config: Any, head_sent: bool) -> None:
    """Check that a head which the trainer does not send is whole from the start.

    With ``quantization=fp8`` verl tells engines that the checkpoint is in float8. So they copy its bfloat16 values as
    they are, without scales, and only updates bring both.
    """
    rollout = config.actor_rollout_ref.rollout
    loading, quantization = rollout.load_format, rollout.get("quantization")
    why = "the head is not sent, so the draft would stay as it was made, at random; give auto"
    check(head_sent or loading != "dummy", "rollout.load_format", loading, why)
    why = "the head is not sent, so its weights would have no scales; give null, or bebop.train_head=true"
    check(head_sent or quantization != "fp8", "rollout.quantization", quantization, why)


def _installed(name: str, shown: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        raise UserError(f"rollout.name={name!r} is not possible: {shown} is not installed here") from None


def _check_head(config: Any, wanted: VerlConfig) -> None:
    """Check that the whole model runs in one place, and that the rollout engine uses the head."""
    job = config.actor_rollout_ref
    on, strategy = "bebop.train_head", job.actor.strategy
    check(strategy in HEADS, on, True, f"actor.strategy={strategy!r} does not have it; choose {' or '.join(HEADS)}")
    if strategy == "megatron":
        trained = bool(job.model.mtp.enable and job.model.mtp.enable_train)
        check(trained, on, True, "the Megatron engine needs model.mtp.enable=true and model.mtp.enable_train=true")
    else:
        parallel = int(job.actor.fsdp_config.get("ulysses_sequence_parallel_size", 1))
        parallel = max(parallel, int(job.actor.get("ulysses_sequence_parallel_size", 1) or 1))
        check(parallel == 1, on, True, f"sequences are split {parallel} ways; give ulysses_sequence_parallel_size=1")
        offloads = bool(job.actor.fsdp_config.get("offload_policy"))
        check(not offloads, on, True, "actor.fsdp_config.offload_policy keeps tables on the CPU; use param_offload")
    transfer = job.rollout.checkpoint_engine.backend
    check("delta" not in transfer, on, True, f"checkpoint_engine.backend={transfer!r} sends differences, no head")
    check(_lora_rank(job.model) == 0, on, True, "LoRA leaves the head's inputs to an adapter; train all weights")
    if job.rollout.name == "bebop":
        engine = parse_engine(job.rollout.engine_kwargs.get("bebop"))
        check(SYSTEMS[engine.system].head, on, True, f"the rollout engine drafts nothing with it ({engine.system})")
    else:
        drafts = bool(job.model.mtp.enable and job.model.mtp.enable_rollout)
        check(drafts, on, True, "the rollout engine uses no head; set model.mtp.enable and model.mtp.enable_rollout")
    if wanted.rollout_top_p < 1 or wanted.rollout_top_k > 0:
        _check_truncated(job.actor, wanted.head.objective)
    _check_checkpoint(job.model.path, wanted.init_head)


def _check_truncated(actor: Any, objective: str) -> None:
    """Check that a head can learn the distribution that ``rollout.top_p`` and ``top_k`` truncate."""
    from bebop.kernels.draft_losses import LOSSES

    divergence = None if objective not in LOSSES else LOSSES[objective].divergence
    why = "it is infinite where rollout.top_p or top_k leave tokens out; choose another"
    check(divergence is None or divergence.bounded, "bebop.head.objective", objective, why)
    ranks = int((actor.get("megatron") or {}).get("tensor_model_parallel_size", 1))
    why = "with train_head, rollout.top_p and top_k need the whole vocabulary in one place: give 1"
    check(ranks == 1, "actor.megatron.tensor_model_parallel_size", ranks, why)


def _check_checkpoint(path: str, init_head: bool) -> None:
    """Refuse a local folder without MTP weights before it is loaded; the worker checks other paths."""
    if init_head or not Path(path).is_dir():
        return
    from bebop.config.job import ModelConfig
    from bebop.model.checkpoint import require_mtp

    try:
        require_mtp(ModelConfig(path=path))
    except UserError as error:
        raise UserError(f"bebop.train_head=True: {str(error).split(';')[0]}; set bebop.init_head=true") from None

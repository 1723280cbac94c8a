"""vLLM's arguments from a job's configuration, and refusals of settings that it cannot host or would ignore.

``HOSTINGS`` says what vLLM has in place of our drafters. This module needs no vllm.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from bebop.config.engines import ModelRunner
from bebop.config.job import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import read_draft, resolve
from bebop.model.memory import bytes_per_token
from bebop.model.skeleton import read_object
from bebop.rollout.decoding.ngram import MAX_SUFFIX
from bebop.rollout.engines import fresh_seed
from bebop.rollout.served_weights import draft_folder
from bebop.rollout.vllm import suffixes
from bebop.rollout.vllm.plugin import CPU, EVERY, RUNNER
from bebop.systems import SYSTEMS
from bebop.systems.base import System
from bebop.systems.block.dflash import read_settings, refuse_other_target
from bebop.systems.history.options import HistoryOptions
from bebop.trajectory import SamplingParams

OLDEST = (0, 31)  # the first with draft weights in updates
COLDEST = 0.01  # vLLM raises temperatures below it
BLOCK = 32  # tokens of keys and values that vLLM's CPU kernels take at a time
SPARE = 1.25  # times the need of all slots: prompts of ended completions stay for others of their group
# Set before vLLM is imported: the engine runs in this process, on threads that Ray or the user gave it, without usage
# statistics.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

# ---- vLLM's methods for our drafters


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How vLLM drafts in place of one of our drafters, and which options it has."""

    arguments: Callable[[DecodingConfig], dict[str, Any] | None]  # its speculative_config
    sampled: bool = True  # drafts can be draws from q
    model: bool = False  # it drafts with weights, which updates may reach
    package: str = ""  # what it needs beside vLLM, as it is imported
    past: Callable[[DecodingConfig], int] | None = None  # tokens of past completions that it keeps; None: it takes none
    drafter: Callable[[JobConfig], Path] | None = None  # the folder of weights that draft and stay; None: it has none
    at_once: bool = False  # its drafter makes all drafts of a cycle in one pass
    part: str = ""  # the trained part that it drafts with; empty: none, or what is in the target's checkpoint
    runners: tuple[ModelRunner, ...] = ("v2", "v1")  # that have it, the first by preference
    ahead: bool = True  # steps may be launched ahead of the results of the one before


def head_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for drafts of the MTP head in the target's checkpoint; vLLM's own default is greedy."""
    method = "probabilistic" if SYSTEMS[decoding.system].sampled else "greedy"
    return {"method": "mtp", "num_speculative_tokens": decoding.limit, "draft_sample_method": method}


def eagle3_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for drafts of an EAGLE-3 drafter; its folder is added, see ``engine_arguments``."""
    return {**head_arguments(decoding), "method": "eagle3"}


def ngram_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for drafts that follow the longest suffix that occurred before, as in the embedded engine."""
    return {
        "method": "ngram",
        "num_speculative_tokens": decoding.limit,
        "prompt_lookup_max": MAX_SUFFIX,
        "prompt_lookup_min": 1,
    }


def suffix_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for suffix decoding (Oliaro et al. 2024); ``suffixes.py`` keeps its tree within bounds."""
    return {
        "method": "suffix",
        "num_speculative_tokens": decoding.limit,
        "suffix_decoding_max_tree_depth": suffixes.MAX_MATCH + decoding.limit,
        "suffix_decoding_max_cached_requests": UNBOUNDED,
        "suffix_decoding_max_spec_factor": suffixes.MAX_DRAFTS_PER_TOKEN,
    }


def model_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for drafts of a separate model."""
    return head_arguments(decoding) | {"method": "draft_model"}


def block_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Return arguments for drafts of whole blocks."""
    return head_arguments(decoding) | {"method": "dflash"}


def block_folder(config: JobConfig) -> Path:
    """Return the folder of a job's block drafter; raise ``UserError`` for another model's, or for shorter blocks."""
    given, drafts = config.rollout.vllm.draft, config.decoding.limit
    if given is None:
        raise UserError(
            f"decoding.system={config.decoding.system} needs rollout.vllm.draft with vLLM: the folder that "
            "python -m bebop.export --out DIR writes"
        )
    settings = read_settings(Path(given))
    target = read_object(resolve(config.model.path) / "config.json")
    refuse_other_target(settings, target, f"rollout.vllm.draft={given!r} is not possible")
    if drafts >= (slots := settings["block_size"]):
        raise UserError(
            f"decoding.draft_tokens={drafts} is not possible with vLLM: the drafter's blocks have {slots} slots, so "
            f"give 1 to {slots - 1}"
        )
    return Path(given)


UNBOUNDED = (1 << 31) - 1  # requests, the largest number that it accepts
HOSTINGS = {  # by drafter
    "none": Hosting(arguments=lambda decoding: None),
    "mtp": Hosting(arguments=head_arguments, model=True),
    "draft_model": Hosting(arguments=model_arguments, drafter=partial(draft_folder, engine="vLLM")),
    "block": Hosting(arguments=block_arguments, drafter=block_folder, at_once=True),
    "eagle3": Hosting(arguments=eagle3_arguments, model=True, part="eagle3"),
    "ngram": Hosting(arguments=ngram_arguments, sampled=False, ahead=False),  # it looks drafts up in the results
    "history": Hosting(
        arguments=suffix_arguments,
        sampled=False,
        package="arctic_inference",
        past=lambda decoding: decoding.of(HistoryOptions).tokens,
        runners=("v1",),  # init_speculator of v2 raises NotImplementedError for the method suffix
    ),
}


def missing(system: System) -> str | None:
    """Return what vLLM lacks for a system; None if it hosts it, and "" where there is no more to say."""
    if system.serve_error:
        return f"{system.serve_error}; "
    hosting = HOSTINGS.get(system.drafter_name)
    if hosting is None or system.custom_cycle:
        return f"it has no drafter {system.drafter_name!r}; " if hosting is None else ""
    if system.rule_name != "rejection":
        return f"it verifies by rejection sampling alone, not by {system.rule_name!r}; "
    if not system.fixed_length:
        return "it has one number of drafts for all requests; "
    return None


HOSTED = [name for name, system in SYSTEMS.items() if missing(system) is None]

# ---- vLLM's arguments


def model_runner(config: JobConfig, device: str) -> ModelRunner:
    """Return the model runner for a job on a ``device``; raise ``UserError`` for one that lacks a requested feature."""
    own, system = config.rollout.vllm, config.decoding.system
    hosting = HOSTINGS[SYSTEMS[system].drafter_name]
    there = hosting.runners
    # On a CPU the kernels of v2 run in Triton's interpreter, some hundred times slower than those of v1 are.
    runner = own.model_runner or ("v1" if device == "cpu" and not config.trainer.routing_replay else there[0])
    if runner not in there:
        raise UserError(
            f"rollout.vllm.model_runner={runner} is not possible with decoding.system={system!r}: vLLM has that in "
            f"{there[0]} alone; give {there[0]} or null"
        )
    if config.trainer.routing_replay and runner == "v1":
        raise UserError(
            "trainer.routing_replay=True is not possible with vLLM's first model runner, which records no routing: "
            "give rollout.vllm.model_runner=v2, and a decoding system that has it"
        )
    if config.trainer.routing_replay and config.rollout.on_update == "recompute":
        raise UserError(
            "trainer.routing_replay=True is not possible with rollout.on_update=recompute on vLLM: it recomputes no "
            "running completions while it records routing; give rollout.on_update=keep"
        )
    if own.async_scheduling and not hosting.ahead:
        raise UserError(
            f"rollout.vllm.async_scheduling=true is not possible with decoding.system={system!r}: vLLM looks its "
            "drafts up in the tokens of the step before; give false or null"
        )
    if own.async_scheduling and runner == "v1":
        raise UserError(
            "rollout.vllm.async_scheduling=true is not possible here: the model runner is v1, which makes one step "
            "after another; give false, or rollout.vllm.model_runner=v2"
        )
    return runner


def environment(runner: ModelRunner, device: str, every: int) -> dict[str, str]:
    """Return the environment of vLLM's process, set before it is imported; ``every`` is ``monitor_every``."""
    return {**ENVIRONMENT, RUNNER: str(int(runner == "v2")), EVERY: str(every), CPU: str(int(device == "cpu"))}


def engine_arguments(config: JobConfig, folder: Path, device: str, drafter: Path | None = None) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs`` for a job; ``device`` is cpu or cuda, ``drafter`` a folder."""
    rollout, own, drafts = config.rollout, config.rollout.vllm, config.decoding.limit
    runner, hosting = model_runner(config, device), HOSTINGS[SYSTEMS[config.decoding.system].drafter_name]
    length = rollout.max_length + 1 + drafts  # of the last cycle's drafts; they end where the model's positions do
    settings = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    length = min(length, max(rollout.max_length, getattr(settings, "max_position_embeddings", None) or length))
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": config.model.dtype,
        "max_model_len": length,
        "max_num_seqs": rollout.slots,
        "seed": fresh_seed(),
        "enforce_eager": device == "cpu" if own.eager is None else own.eager,
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "async_scheduling": runner == "v2" and hosting.ahead if own.async_scheduling is None else own.async_scheduling,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "skip_tokenizer_init": not rollout.sampling.stop,
        "weight_transfer_config": {"backend": "bebop"},
        "kv_cache_memory_bytes": own.cache_bytes,
    }
    if device == "cpu":
        arguments |= {"block_size": BLOCK}
        if own.cache_bytes is None:
            arguments["kv_cache_memory_bytes"] = _room(config, folder, length)
    if own.memory_fraction is not None:
        arguments["gpu_memory_utilization"] = own.memory_fraction
    if config.trainer.routing_replay:
        arguments["enable_return_routed_experts"] = True
    if (speculation := hosting.arguments(config.decoding)) is not None:
        chosen = drafter if hosting.drafter is None else hosting.drafter(config)
        arguments["speculative_config"] = speculation | ({} if chosen is None else {"model": str(chosen)})
    return arguments | own.extra


def _room(config: JobConfig, folder: Path, length: int) -> int:
    """Return the bytes for keys and values of all slots; the head counts as one more layer."""
    settings, dtype = AutoConfig.from_pretrained(folder, local_files_only=True), getattr(torch, config.model.dtype)
    layers = settings.get_text_config().num_hidden_layers
    token = bytes_per_token(settings, dtype) * (layers + 1) // layers
    if SYSTEMS[config.decoding.system].separate:
        token += bytes_per_token(read_draft(config.model), dtype)
    blocks = -(-length // BLOCK) * config.rollout.slots
    return int(token * BLOCK * (SPARE * blocks + 1))


def refuse_loop(config: JobConfig) -> None:
    """Raise ``UserError`` for settings of the RL loop that do not work with vLLM."""
    if config.monitor.actions:
        raise UserError("monitor.actions=true is not possible with vLLM: it decodes as it was started")


def refuse_system(decoding: DecodingConfig) -> None:
    """Raise ``UserError`` for a decoding configuration that vLLM cannot run."""
    name, temperature = decoding.system, decoding.draft_temperature
    system = SYSTEMS[name]
    if (lack := missing(system)) is not None:
        raise UserError(f"decoding.system={name!r} is not possible with vLLM: {lack}choose one of {', '.join(HOSTED)}")
    hosting = HOSTINGS[system.drafter_name]
    greedy = system.sampled and not hosting.sampled
    if greedy and temperature != 0:
        raise UserError(
            f"decoding.draft_temperature={temperature or 'null'} is not possible with decoding.system={name!r} on "
            "vLLM: it drafts what is likeliest; give 0"
        )
    if hosting.past is not None and not decoding.of(HistoryOptions).siblings:
        raise UserError(
            "decoding.options.siblings=false is not possible with vLLM: what a request has written is drafted from at "
            "once; give true"
        )
    if not greedy and temperature is not None and temperature != system.draft_temperature:
        raise UserError(
            f"decoding.draft_temperature={temperature} is not possible with vLLM: it drafts at the target's "
            "temperature; give null, or decoding.system=target_only for greedy drafts"
        )
    if decoding.draft_tokens == "auto" and system.drafts:
        raise UserError(
            "decoding.draft_tokens=auto is not possible with vLLM: it drafts as it was started; give a number"
        )


def refuse_sampling(params: SamplingParams, speculative: bool) -> None:
    """Raise ``UserError`` for a distribution that vLLM would not sample from."""
    if 0 < params.temperature < COLDEST:
        raise UserError(
            f"temperature={params.temperature} is not possible with vLLM: it would take {COLDEST}; give 0 (greedy), or "
            f"{COLDEST} or more"
        )
    if params.min_p > 0 and speculative:
        raise UserError(f"min_p={params.min_p} is not possible with vLLM's drafts: it does not verify with it; give 0")
    if params.min_p > 0 and params.top_p < 1:
        raise UserError(
            f"min_p={params.min_p} with top_p={params.top_p} is not possible with vLLM: it applies min_p first, "
            "which is another distribution; give one of them"
        )


def refuse_version(version: str) -> None:
    """Raise ``UserError`` for a vLLM version without weight updates of drafts."""
    numbers = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise UserError(
            f"vllm {version} takes no new weights for drafts: install {'.'.join(map(str, OLDEST))} or newer"
        )


def sampling_arguments(params: SamplingParams, fresh: int) -> dict[str, Any]:
    """Return vLLM's sampling parameters for ``fresh`` more tokens.

    They have no seed: vLLM's drafts would not follow it, so that a seed could not reproduce a completion.
    """
    arguments: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "max_tokens": fresh,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # those that end a completion are all named
        "skip_special_tokens": False,
        "detokenize": bool(params.stop),
        "logprobs": 0,  # of the token itself
    }
    if params.stop:
        arguments |= {"stop": list(params.stop), "include_stop_str_in_output": True}
    return arguments

"""Checks that find the faults of a job before anything is started, loaded or written.

They take seconds and read no weights.
"""

import errno
import logging
import os
import resource
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from bebop.adaptation.served import engine_errors
from bebop.command import check_writable
from bebop.config.adapt import SERVED, AdaptConfig
from bebop.config.job import JobConfig, ModelConfig, MonitorConfig, RuntimeConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.attention import needs_stock
from bebop.model.checkpoint import (
    draft_config,
    empty_model,
    find_device,
    load_tokenizer,
    mtp_layout,
    of_draft,
    read_config,
    readable,
    require_known,
    require_mtp,
    resolve,
)
from bebop.model.lora import adapted_layers, check_installed
from bebop.model.parts import part_settings
from bebop.model.routing import check_routing
from bebop.model.skeleton import check_head, check_index, check_same_tokens, check_tokenizer, check_weights
from bebop.rollout.agent_setup import check_environment
from bebop.rollout.capacity import check_memory, check_positions
from bebop.rollout.engines import engine_module
from bebop.systems import SYSTEMS
from bebop.tasks.held_out import HeldOut, find_held_out
from bebop.tasks.rewards import check_reward
from bebop.tasks.source import EnvironmentSource, Items, PromptSource, chat_encoder, instruction, open_items

log = logging.getLogger(__name__)
CHECKED_QUESTIONS = 16  # questions of an environment that are checked to fit into a checkpoint
# Ray puts sockets below its folder, and a socket's path has at most 107 characters. This is its longest such path.
SESSION = "/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
MAX_FOLDER_LENGTH = 107 - len(SESSION)
# Ray's file of shared objects has its full size from the start: this share of the memory, and at most so many bytes.
RAY_STORE_SHARE, MAX_RAY_STORE = 0.3, 200 * 10**9


def check_job(config: JobConfig, items: Items | None = None) -> PromptSource | EnvironmentSource:
    """Check a job and return its prompts; raise ``UserError`` for the first fault that would end it later.

    ``items`` are its questions if they are already loaded and checked against the reward.
    """
    here = config.runtime.address is None  # else the job runs on other machines
    # Servers decode with their own attention, and the trainer can run transformers'.
    settings = check_model(config.model, here, any_backbone=not engine_module(config).EMBEDDED)
    check_positions(settings, config.rollout.max_length)
    if config.trainer.lora.rank:
        check_installed(config.trainer.lora)
        adapted_layers(empty_model(resolve(config.model.path)), config.trainer.lora)
    if config.trainer.routing_replay or config.trainer.router_aux_loss:
        backbone = empty_model(resolve(config.model.path))
        stock = needs_stock(settings) is not None
        check_routing(backbone, config.trainer.routing_replay, config.trainer.router_aux_loss, stock)
    system = SYSTEMS[config.decoding.system]
    if system.head or (config.cotrain.mode != "off" and not system.trained_beside):
        require_mtp(config.model)
    for part in system.needs:
        part_settings(config.model, part)
    if system.separate:
        check_draft(config, here)
    source = check_task(config, items)
    engine_module(config).check(config)
    check_trackers(config.monitor)
    if here:
        check_ports(config.runtime)
        check_temp(config.runtime)
        check_file_size()
    return source


def check_draft(config: JobConfig, here: bool = True) -> None:
    """Check that the draft model's files are complete, its tokens match the model's, and its context is long enough."""
    own = draft_config(config.model)
    with of_draft():
        settings = check_model(own, here)
        check_same_tokens(load_tokenizer(config.model), load_tokenizer(own), f"model.draft={own.path!r}")
    check_positions(settings, config.rollout.max_length, of="the draft model")


def check_trackers(config: MonitorConfig) -> None:
    """Check that the configured trackers are installed."""
    for name in ("wandb", "trackio"):
        if getattr(config, name) and find_spec(name) is None:
            raise UserError(f"monitor.{name}=True is not possible: pip install -e '.[{name}]' first")


def check_model(config: ModelConfig, here: bool = True, any_backbone: bool = False) -> Any:
    """Check that a model's files exist and are complete, by their headers, and return its Hugging Face configuration.

    With ``here`` the device must be one of this machine's. ``any_backbone``: transformers' attention may run it.
    """
    if here:
        find_device(config)
    folder, name = resolve(config.path), f"model.path={config.path!r}"
    settings = read_config(config)
    if type(settings) not in AutoModelForCausalLM._model_mapping:
        raise UserError(f"{name} cannot be loaded: {settings.model_type} is no causal language model")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{name} cannot be loaded: it has no weights (*.safetensors)")
    check_index(folder, name)
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass  # this reads the header and compares it with the size
        except (SafetensorError, OSError) as error:
            raise UserError(f"{name} cannot be loaded: {file.name}: {error}; give a whole file") from error
    check_tokenizer(load_tokenizer(config), settings.get_text_config().vocab_size, name)
    require_known(config, any_backbone)
    if config.path == "tiny":  # the package's own: not worth 4.2 s for importing transformers' modeling code
        return settings
    with readable(config):
        skeleton = check_weights(settings, folder, name)
        if (layout := mtp_layout(folder, settings.get_text_config().num_hidden_layers)) is not None:
            check_head(skeleton, folder, layout)
    return settings


def check_task(config: JobConfig, items: Items | None = None) -> PromptSource | EnvironmentSource:
    """Check that the reward fits the questions or that an environment can begin, and return the prompts."""
    if config.task.turns:
        environment = EnvironmentSource(config.task)
        for index in range(min(config.task.size or CHECKED_QUESTIONS, CHECKED_QUESTIONS)):
            environment.prompt(index)
        check_environment(config.model, config.task, config.rollout.max_length, environment.prompt(0))
        return environment
    room = config.rollout.max_length - config.rollout.sampling.max_new_tokens
    if items is None:
        check_reward(config.task, items := open_items(config.task))
    source = prompts(config.model, config.task, room, items)
    source.prompt(0)
    return source


def check_evaluation(config: JobConfig) -> HeldOut | None:
    """Find, check and return the held-out questions of a job's evaluations; None for a job without evaluations."""
    return find_held_out(config, load_tokenizer(config.model)) if config.evaluation.every else None


def check_adaptation(config: AdaptConfig) -> None:
    """Check an adaptation: the model, the length and number of its completions, and the questions."""
    data, served = config.data, config.data.engine in SERVED
    # Only the head's training can do without the embedded engine, and only if no environment needs it for turns.
    turns = data.source == "sample" and config.task.turns
    settings = check_model(config.model, any_backbone=config.part == "head" and (served or not turns))
    check_positions(settings, data.max_length, "data.max_length")
    dtype, device = getattr(torch, config.model.dtype), find_device(config.model)
    stock = needs_stock(settings)
    if stock is None:
        check_memory(settings, data.slots, data.max_length, dtype, device, "data")
    elif data.engine == "torch":
        raise UserError(f"data.engine='torch' is not possible for a {settings.model_type} model: {stock}; give null")
    if data.sampling.stop and (data.engine == "transformers" or (stock and data.engine is None)):
        raise UserError(
            f"data.sampling.stop={list(data.sampling.stop)!r} is not possible for a {settings.model_type} model, whose "
            "completions transformers generates: leave it out, or give data.engine=sglang or vllm"
        )
    if turns and data.engine == "transformers":
        raise UserError("data.engine='transformers' is not possible with an environment: give null, sglang or vllm")
    if served:
        check_served(config)
    if data.source == "sample" and config.task.turns:
        first = EnvironmentSource(config.task).prompt(0)
        check_environment(config.model, config.task, data.max_length, first, "data.max_length")
    elif data.source == "sample":
        prompts(config.model, config.task, data.max_length - data.sampling.max_new_tokens).prompt(0)


def check_served(config: AdaptConfig) -> None:
    """Check that SGLang or vLLM is installed and can sample the completions of an adaptation."""
    job, world = config.engine_job(), int(os.environ.get("WORLD_SIZE", "1"))
    with engine_errors(config.data):
        engine_module(job).check(job)
    parallel = config.data.engine_options.get("tensor_parallel", 1)
    if world > 1 and parallel > 1:
        raise UserError(
            f"data.engine_options.tensor_parallel={parallel} is not possible in {world} processes, each of which has "
            "an engine on its own GPU: give 1, or start it without torchrun"
        )


def prompts(model: ModelConfig, task: TaskConfig, room: int, items: Items | None = None) -> PromptSource:
    """Return the prompts of a task in at most ``room`` tokens each; warn if the model has no chat template."""
    tokenizer = load_tokenizer(model)
    if not tokenizer.chat_template:
        log.warning(
            "model.path=%r has no chat template: prompts are the bare questions, each with a newline", model.path
        )
    return PromptSource(task, chat_encoder(tokenizer, instruction(task, tokenizer)), room, items)


def check_ports(runtime: RuntimeConfig) -> None:
    """Check that explicitly configured ports are free and distinct."""
    asked = {"port": runtime.port, "metrics_port": runtime.metrics_port}
    if runtime.dashboard:
        asked["dashboard_port"] = runtime.dashboard_port
    numbers = [port for port in asked.values() if port]
    for name, port in asked.items():
        if port and numbers.count(port) > 1:
            raise UserError(f"runtime.{name}={port} is not possible: it is asked for twice; give 0 to pick a free one")
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port just given up is free
            try:
                probe.bind(("", port))
            except OSError as error:
                reason = "it is in use" if error.errno == errno.EADDRINUSE else str(error.strerror)
                raise UserError(f"runtime.{name}={port} is not possible: {reason}; give 0 to pick a free one") from None


def check_temp(runtime: RuntimeConfig) -> None:
    """Check that Ray's folder can be created and that its path is short enough for the sockets in it."""
    if runtime.temp_dir is None:
        check_writable("TMPDIR", Path(tempfile.gettempdir()))  # which Python has found by writing to it
        return
    folder = Path(runtime.temp_dir).absolute()
    check_writable("runtime.temp_dir", folder)
    if len(str(folder)) > MAX_FOLDER_LENGTH:
        raise UserError(
            f"runtime.temp_dir={runtime.temp_dir!r} is not possible: its {len(str(folder))} characters leave no room "
            f"for Ray's sockets; give a path of at most {MAX_FOLDER_LENGTH}"
        )


def check_file_size() -> None:
    """Check that the system allows a file as large as Ray's store; else Ray's processes end without a message."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    store = int(min(RAY_STORE_SHARE * memory, MAX_RAY_STORE))
    if limit != resource.RLIM_INFINITY and limit < store:
        raise UserError(
            f"files of at most {limit >> 10} KiB (ulimit -f) are too small for Ray, which keeps shared objects in one "
            f"of up to {store >> 10} KiB here; raise the limit (ulimit -f unlimited)"
        )

"""SGLang as an ``EngineModule``: an engine from a job's configuration, and the tokens that end its completions."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from bebop.config.engines import SglangConfig
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import (
    empty_model,
    find_device,
    load_tokenizer,
    named_as_served,
    read_config,
    refuse_own_head,
    resolve,
    stop_tokens,
)
from bebop.model.routing import find_routers
from bebop.rollout.detokenize import CompletionText
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.served_weights import (
    constants,
    draft_folder,
    find_drafter,
    find_head,
    refuse_drafter,
    refuse_missing_head,
    update,
)
from bebop.rollout.sglang.arguments import (
    HOSTINGS,
    pause_mode,
    refuse_length,
    refuse_loop,
    refuse_sampling,
    refuse_system,
    server_arguments,
)
from bebop.rollout.sglang.backend import INTERPRETER, Backend, Fleet, HttpBackend, LocalBackend
from bebop.rollout.sglang.dflash import mask_of, with_mask
from bebop.rollout.sglang.engine import SglangServer
from bebop.rollout.sglang.transfer import DiskTransfer, DistributedTransfer, TensorTransfer, WeightTransfer
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams

EMBEDDED = False


def make(config: JobConfig) -> tuple[ServedEngine, tuple[int, ...]]:
    """Start SGLang, or connect to running servers; return the engine and the tokens that end a completion."""
    check(config)
    system = SYSTEMS[config.decoding.system]
    hosting = HOSTINGS[system.drafter_name]
    own, dtype = config.rollout.sglang, getattr(torch, config.model.dtype)
    own = replace(
        own,
        pause=pause_mode(own, config.rollout.on_update),
        monitor_every=own.monitor_every if config.monitor.decode_stats and hosting.measured else 0,
    )
    folder = resolve(config.model.path)
    tokenizer = load_tokenizer(config.model)
    layers, layout, head = find_head(folder)
    drafter = find_drafter(config, hosting.part)
    head = head if drafter is None else dict(drafter.weights)
    mask = mask_of(own) if hosting.refuse else None

    def rename(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = named_as_served(folder, weights)
        return named if mask is None else with_mask(named, mask)

    server = SglangServer(
        make_backend(config, own, folder, None if drafter is None else drafter.folder),
        make_transfer(own, folder, find_device(config.model)),
        head,
        own,
        drafts=config.decoding.limit if system.drafts else 0,
        drafter=system.drafter_name,
        to_update=partial(
            update,
            layout=layout or "mimo",
            layers=layers,
            rename=rename,
            drafts=not system.separate,
            drafter=drafter,
            constants=constants(folder),
        ),
        dtype=dtype,
        rescored=config.algorithm.rescore,
        routers=find_routers(empty_model(folder)) if config.trainer.routing_replay else None,
        tokenizer=tokenizer,
    )
    engine = ServedEngine(
        server,
        CompletionText(tokenizer),
        head,
        system=config.decoding.system,
        dtype=dtype,
        max_length=config.rollout.max_length,
        timeout=own.timeout,
        retries=own.retries,
    )
    return engine, stop_tokens(config.model)


def check(config: JobConfig) -> None:
    """Raise ``UserError`` for settings of this job that SGLang cannot serve, before anything is started."""
    own, folder, sampling = config.rollout.sglang, resolve(config.model.path), config.rollout.sampling
    if find_spec("sglang") is None and not (own.urls and own.transfer == "disk"):
        raise UserError("rollout=sglang needs SGLang: pip install -e '.[sglang]', see recipes/sglang")
    refuse_loop(config)
    refuse_system(config.decoding, own, _device(config))
    hosting = HOSTINGS[SYSTEMS[config.decoding.system].drafter_name]
    if hosting.refuse is not None:
        hosting.refuse(config.decoding, own, folder)
    refuse_drafter(config, hosting.part, "SGLang", whole=SYSTEMS[config.decoding.system].sampled)
    if SYSTEMS[config.decoding.system].separate:
        draft_folder(config, "SGLang")  # refuses one that does not fit
    refuse_length(config, read_config(config.model))
    speculative = SYSTEMS[config.decoding.system].drafts
    params = SamplingParams(
        top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty
    )
    refuse_sampling(params, speculative, config.algorithm.rescore)
    refuse_own_head(config.model, "SGLang")
    refuse_missing_head(config, "SGLang")


def gpus(config: JobConfig) -> float:
    """Return the number of GPUs that the engine needs.

    For servers elsewhere it is a share of one, and only if a process group transfers weights.
    """
    own = config.rollout.sglang
    if own.urls:
        return 0.5 if own.transfer == "distributed" else 0.0
    return float(own.tensor_parallel * own.data_parallel)


def make_backend(config: JobConfig, own: SglangConfig, folder: Path, drafter: Path | None = None) -> Backend:
    """Return a backend for the configured servers, or an engine in this process."""
    if own.urls:
        key = os.environ.get(own.api_key_env)
        bounds = {"timeout": own.timeout, "hang_after": config.runtime.hang_after}
        pause = pause_mode(own, config.rollout.on_update)
        servers = [
            HttpBackend(url, key, config.decoding, pause=pause, retries=own.retries, **bounds) for url in own.urls
        ]
        return servers[0] if len(servers) == 1 else Fleet(servers)
    device = _device(config)
    environment = {"BEBOP_VERIFY_EVERY": str(own.monitor_every)} | (INTERPRETER if device == "cpu" else {})
    arguments = server_arguments(config, own, folder, device, drafter)
    return LocalBackend(arguments, environment, config.runtime.hang_after)


def make_transfer(own: SglangConfig, folder: Path, device: torch.device) -> WeightTransfer:
    """Return the configured way to transfer weights."""
    if own.transfer == "disk":
        assert own.folder is not None
        return DiskTransfer(Path(own.folder), folder)
    if own.transfer == "distributed":
        return DistributedTransfer(own.tensor_parallel, own.address, device)
    return TensorTransfer(own.tensor_parallel, text=bool(own.urls))


def _device(config: JobConfig) -> str:
    return find_device(config.model).type

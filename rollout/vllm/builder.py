"""vLLM as an ``EngineModule``: an engine from a job's configuration, and the tokens that end its completions."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import (
    empty_model,
    find_device,
    load_tokenizer,
    mtp_layout,
    named_as_served,
    read_config,
    refuse_own_head,
    resolve,
    stop_tokens,
)
from bebop.model.layouts import LAYOUTS, TABLES
from bebop.model.routing import find_routers
from bebop.model.skeleton import header
from bebop.rollout.detokenize import CompletionText
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.served_weights import (
    CONSTANT,
    constants,
    find_drafter,
    find_head,
    refuse_drafter,
    refuse_missing_head,
    update,
)
from bebop.rollout.vllm.arguments import (
    HOSTINGS,
    engine_arguments,
    environment,
    model_runner,
    refuse_loop,
    refuse_sampling,
    refuse_system,
)
from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.engine import VllmServer
from bebop.rollout.vllm.transfer import FileTransfer, MemoryTransfer
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams

EMBEDDED = False
# Ends of names that vLLM's loader drops: old checkpoints hold tables of positions, which models compute themselves.
UNREAD = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


def make(config: JobConfig) -> tuple[ServedEngine, tuple[int, ...]]:
    """Start vLLM; return the engine and the tokens that end a completion."""
    check(config)
    system, own, folder = SYSTEMS[config.decoding.system], config.rollout.vllm, resolve(config.model.path)
    device, dtype = find_device(config.model).type, getattr(torch, config.model.dtype)
    layers, layout, head = find_head(folder)
    every = own.monitor_every if config.monitor.decode_stats else 0
    hosting = HOSTINGS[system.drafter_name]
    model, drafts = hosting.model, hosting.model or hosting.drafter is not None
    drafter = find_drafter(config, hosting.part)
    head = head if drafter is None else dict(drafter.weights)
    core = Core(
        engine_arguments(config, folder, device, None if drafter is None else drafter.folder),
        environment(model_runner(config, device), device, every),
        drafts=config.decoding.limit if system.drafts else 0,
        head=drafts,
        passes=1 if hosting.at_once else None,
        past=None if hosting.past is None else hosting.past(config.decoding),
        routers=find_routers(empty_model(folder)) if config.trainer.routing_replay else None,
    )
    names = weight_names(folder, layout, layers)
    if drafter is not None:
        names["draft"] = {*drafter.weights, *drafter.constants}
    transfer = FileTransfer(Path(own.folder or ""), names) if own.transfer == "file" else MemoryTransfer(names)
    server = VllmServer(
        core,
        transfer,
        head if model else {},
        sampled=drafts and system.sampled,
        recompute=config.rollout.on_update == "recompute",
        to_update=partial(
            update,
            layout=layout or "mimo",
            layers=layers,
            rename=partial(named_as_served, folder),
            drafts=not system.separate,
            drafter=drafter,
            constants=constants(folder),
        ),
        dtype=dtype,
        threads=config.rollout.threads,
        hang_after=config.runtime.hang_after,
    )
    tokenizer = load_tokenizer(config.model)
    engine = ServedEngine(
        server,
        CompletionText(tokenizer),
        head,
        system=config.decoding.system,
        dtype=dtype,
        max_length=config.rollout.max_length,
        timeout=own.timeout,
        retries=1,  # a completion is cut where it is aborted alone
    )
    return engine, stop_tokens(config.model)


def check(config: JobConfig) -> None:
    """Raise ``UserError`` for settings of this job that vLLM cannot serve, before anything is started."""
    sampling, system = config.rollout.sampling, SYSTEMS[config.decoding.system]
    if find_spec("vllm") is None:
        raise UserError("rollout=vllm needs vLLM: pip install -e '.[vllm]', see recipes/vllm")
    refuse_loop(config)
    refuse_system(config.decoding)
    model_runner(config, find_device(config.model).type)
    if (package := HOSTINGS[system.drafter_name].package) and find_spec(package) is None:
        name = package.replace("_", "-")
        raise UserError(
            f"decoding.system={config.decoding.system!r} with vLLM needs {name}: pip install --no-deps {name}==0.1.1"
        )
    if (drafter := HOSTINGS[system.drafter_name].drafter) is not None:
        drafter(config)  # refuses one that does not fit
    own = config.evaluation.temperature if config.evaluation.every else None
    for temperature in (sampling.temperature, sampling.temperature if own is None else own):
        params = SamplingParams(temperature=temperature, top_p=sampling.top_p, min_p=sampling.min_p)
        refuse_sampling(params, system.drafts)
    refuse_own_head(config.model, "vLLM")
    refuse_other_names(config)
    refuse_missing_head(config, "vLLM")
    refuse_drafter(config, HOSTINGS[system.drafter_name].part, "vLLM", whole=False)


def refuse_other_names(config: JobConfig) -> None:
    """Raise ``UserError`` for a checkpoint that holds weights which updates lack, or have under other names.

    vLLM takes whole models, so it would refuse version 0, after everything was loaded. Qwen3.5 as published is such a
    checkpoint: a language model inside one that sees images.
    """
    folder, layers = resolve(config.model.path), read_config(config.model).get_text_config().num_hidden_layers
    sent = named_as_served(folder, dict(empty_model(folder).named_parameters()))
    names = weight_names(folder, mtp_layout(folder, layers), layers)["target"]
    if lacking := sorted(name for name in names - set(sent) if not name.endswith(CONSTANT)):
        raise UserError(
            f"model.path={config.model.path!r} is not possible with vLLM: it holds {lacking[0]!r}, which updates lack "
            "or name otherwise, and vLLM takes whole models; if the language model lies inside another, save it alone, "
            "or use rollout=sglang"
        )


def gpus(config: JobConfig) -> float:
    """Return 1: vLLM needs a GPU of its own, since it takes most of its memory when it starts."""
    return 1.0


def weight_names(folder: Path, layout: str | None, layers: int) -> dict[str, set[str]]:
    """Return the names of a checkpoint's weights in updates, by role.

    Copies of the model's tables in an MTP layer are left out: vLLM's draft has the target's. So are second names of
    weights that the model shares (``lm_head.weight`` where it is tied), and tensors that vLLM does not read.
    """
    model = empty_model(folder)
    own = {name for name, _ in model.named_parameters()}
    copies = {name for name, _ in model.named_parameters(remove_duplicate=False)} - own
    names = {name for name, _ in header(folder) if name not in copies and not name.endswith(UNREAD)}
    prefix = None if layout is None else LAYOUTS[layout].prefix.format(L=layers)
    head = set() if prefix is None else {name for name in names if name.startswith(prefix)}
    return {"target": names - head, "draft": head - {f"{prefix}{table}" for table in TABLES}}

"""The embedded engine as an ``EngineModule``: it makes the engine from a job's configuration."""

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import find_device, load_policy, read_draft, resolve
from bebop.rollout.capacity import bytes_of_graphs, check_memory, check_parked, check_pool
from bebop.systems import SYSTEMS

if TYPE_CHECKING:  # the driver, which calls ``check``, needs none of it
    from bebop.rollout.torch_engine import TorchEngine

EMBEDDED = True


def check(config: JobConfig) -> None:
    """Raise ``UserError`` unless keys and values fit this machine, if the job runs on it."""
    if config.runtime.address is None:
        settings = AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True)
        dtype, device, graphs = getattr(torch, config.model.dtype), find_device(config.model), 0
        devices = max(1, torch.cuda.device_count()) if device.type == "cuda" else 1
        workers = -(-config.rollout.workers // devices)  # that share a device
        slots, length = config.rollout.slots * workers, config.rollout.max_length
        asked, tokens = config.rollout.torch.paged_cache, config.rollout.torch.cache_tokens
        check_pool(tokens, length, device.type == "cuda" if asked == "auto" else asked)
        if graphs_on(config, device):
            drafts = config.decoding.limit if SYSTEMS[config.decoding.system].drafts else 0
            graphs = bytes_of_graphs(slots, drafts, settings.get_text_config().vocab_size, device)
        pool = None if tokens is None else tokens * workers
        draft = read_draft(config.model) if SYSTEMS[config.decoding.system].separate else None
        check_memory(settings, slots, length, dtype, device, tokens=pool, more=graphs, draft=draft)
        check_parked(config.rollout.parked_bytes, device)


def graphs_on(config: JobConfig, device: torch.device) -> bool:
    """Return whether cycles on a device are launched as CUDA graphs.

    Raises:
        UserError: They are requested for a device other than a GPU.
    """
    asked = config.rollout.torch.cuda_graphs
    if asked and device.type != "cuda":
        raise UserError(
            f"rollout.torch.cuda_graphs=True is not possible on model.device={device.type}: give false, or a GPU"
        )
    return asked


def overlap_on(config: JobConfig, device: torch.device) -> bool:
    """Return whether a cycle is launched before the one before is read: as configured, by default only on a GPU."""
    asked = config.rollout.torch.overlap
    return device.type == "cuda" if asked is None else asked


def gpus(config: JobConfig) -> float:
    """Return half a GPU: the engine shares it."""
    return 0.5


def make(config: JobConfig) -> tuple["TorchEngine", tuple[int, ...]]:
    """Return the engine, and the tokens that end a completion."""
    from bebop.rollout.decoding.graphs import CudaRecorder, EagerRecorder, Recorder
    from bebop.rollout.torch_engine import TorchEngine

    system, asked = SYSTEMS[config.decoding.system], config.rollout.torch
    policy = load_policy(config.model, need_head=system.head, needs=system.needs, need_draft=system.separate)
    recorder: Recorder | None = CudaRecorder() if graphs_on(config, policy.device) else None
    if recorder is None and config.rollout.torch.batch_invariant:
        recorder = EagerRecorder()  # buckets without graphs
    engine = TorchEngine(
        policy,
        config.decoding,
        slots=config.rollout.slots,
        max_length=config.rollout.max_length,
        on_update=config.rollout.on_update,
        parked_bytes=config.rollout.parked_bytes,
        paged=None if asked.paged_cache == "auto" else asked.paged_cache,
        cache_tokens=asked.cache_tokens,
        prefill_tokens=config.rollout.torch.prefill_tokens,
        measure=config.monitor.decode_stats,
        room=config.decoding.limit + 1 if config.monitor.actions else 0,
        recorder=recorder,
        overlap=overlap_on(config, policy.device),
        batch_invariant=config.rollout.torch.batch_invariant,
        record_routing=config.trainer.routing_replay,
    )
    return engine, policy.eos_token_ids

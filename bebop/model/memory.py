"""The memory of a device, and the needs of a model: weights, keys and values, activations, a whole job.

Numbers are estimates from a Hugging Face configuration and from the headers of weight files; nothing is loaded.
"""

import contextlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from bebop.config.job import MAX_BATCH_TOKENS, JobConfig
from bebop.errors import UserError

MICRO_BATCH_SHARE = GRADIENT_SHARE = 1 / 8  # weights, optimizer, engine and its keys and values need the rest
GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
PROCESS = 10**9  # bytes of Python, torch and transformers
ROWS = 8  # float32 tables over the vocabulary that a cycle holds at once: logits, p, q, sorted, drawn from
# Peak of activations over the estimate of ``activation_bytes``: the backward pass also holds gradients and chunks of
# logits. Measured: 1.7 times as much for the built-in model, 1.55 times for SmolLM2.
BACKWARD = 1.6
UNSHARED = 0.05  # lost share of a GPU that trainer and engines share: contexts of processes, fragmentation
RAY = 10**9  # bytes of the driver and of Ray's servers
ADAM = 16  # bytes a parameter in training: weight, gradient and two moments, all of float32


def parameters(files: Iterable[Path]) -> int:
    """Return the number of parameters in weight files (*.safetensors), by their headers."""
    count = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())
    return count


def bytes_per_token(settings: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    text = settings.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)


def micro_batch(
    settings: Any, dtype: torch.dtype, device: torch.device, ranks: int, most: int, checkpointing: bool = False
) -> int:
    """Return the tokens, up to ``most``, of a micro-batch that fits into ``MICRO_BATCH_SHARE`` of the device's memory.

    ``ranks``: ranks of the trainer, which share the memory on a CPU. The estimate uses the total memory, not the free
    memory, so that the same machine packs the same batch in the same way again.
    """
    there = _of_a_rank(device, ranks) * MICRO_BATCH_SHARE
    return max(1, min(most, int(there / activation_bytes(settings, dtype, checkpointing))))


def checkpoints_layers(settings: Any, dtype: torch.dtype, device: torch.device, ranks: int, tokens: int) -> bool:
    """Return whether a micro-batch of ``tokens`` tokens needs checkpointing; never on a CPU, which would be slower."""
    return device.type == "cuda" and micro_batch(settings, dtype, device, ranks, tokens) < tokens


def sums_once(count: int, device: torch.device, ranks: int) -> bool:
    """Return whether each rank has room for a gradient of all ``count`` parameters in fp32, beside its shards."""
    return 4 * count <= _of_a_rank(device, ranks) * GRADIENT_SHARE


def _of_a_rank(device: torch.device, ranks: int) -> float:
    return memory_of(device) / (1 if device.type == "cuda" else ranks)


def activation_bytes(settings: Any, dtype: torch.dtype, checkpointing: bool = False) -> int:
    """Return roughly how many bytes a token of a micro-batch keeps for the backward pass.

    A layer keeps about twelve vectors of the model's width (norms, queries, keys, values, residuals) and four of the
    MLP's. In bfloat16 half of them are float32 all the same. SmolLM2 in float32: 1.56 MB. With ``checkpointing`` every
    layer keeps its input in float32, and one layer at a time keeps all its vectors.
    """
    text = settings.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    if of_expert := getattr(text, "moe_intermediate_size", None):
        inner = of_expert * (getattr(text, "num_experts_per_tok", None) or 1)
    each = 3 if dtype == torch.bfloat16 else 4
    layers, layer = text.num_hidden_layers, (12 * text.hidden_size + 4 * inner) * each
    return int(layers * 4 * text.hidden_size + layer if checkpointing else layers * layer)


def memory_of(device: torch.device) -> int:
    """Return the total memory of a device in bytes, used or not.

    On a CPU the limit of this process's control group applies.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
        there = min(there, int(GROUP_LIMIT.read_text()))
    return there


def trainer_memory(
    config: JobConfig, settings: Any, count: int, device: torch.device, adapter: int = 0
) -> tuple[float, float, bool]:
    """Return the memory of all ranks of a job's trainer, and whether it checkpoints layers.

    The first number is the bytes that are always in use, the second one is the additional bytes of an update. The
    arguments are those of ``job_memory``.
    """
    trainer, rollout, dtype = config.trainer, config.rollout, getattr(torch, config.model.dtype)
    weights = dtype.itemsize * count
    again, most = trainer.checkpointing, trainer.max_tokens or MAX_BATCH_TOKENS
    if again is None:
        again = checkpoints_layers(settings, dtype, device, trainer.ranks, most)
    tokens = trainer.max_tokens or micro_batch(settings, dtype, device, trainer.ranks, most, again)
    # Besides Adam: a copy to send, older versions that completions are compared with, and the reference model.
    copies = 1 + rollout.staleness + (config.algorithm.kl_coefficient > 0)
    fixed = ADAM * count + trainer.ranks * (copies * weights + PROCESS)
    if adapter:  # the frozen weights are the reference, and older versions of the adapter are kept in float32
        fixed = ADAM * adapter + weights + trainer.ranks * (weights + rollout.staleness * 4 * adapter + PROCESS)
    batches = trainer.ranks * tokens * activation_bytes(settings, dtype, again) * BACKWARD
    return fixed, batches, again


def engine_fraction(config: JobConfig, settings: Any, count: int, device: torch.device, adapter: int = 0) -> float:
    """Return the fraction of a GPU's memory for each engine that shares it with the trainer.

    It is the memory that the trainer leaves free during an update. An engine that gives its memory back for updates
    gets the memory that is free between them. The arguments are those of ``job_memory``.

    Raises:
        UserError: The fraction does not hold the model and the keys and values of one completion.
    """
    rollout, dtype, there = config.rollout, getattr(torch, config.model.dtype), memory_of(device)
    fixed, batches, _ = trainer_memory(config, settings, count, device, adapter)
    turns = getattr(getattr(rollout, rollout.engine), "colocated", False)
    needs = fixed if turns else fixed + batches
    fraction = math.floor(round(100 * ((there - needs) / there - UNSHARED) / rollout.workers, 6)) / 100
    least = dtype.itemsize * count + rollout.max_length * bytes_per_token(settings, dtype)
    if fraction * there < least:
        raise UserError(
            f"rollout.{rollout.engine}.memory_fraction=null is not possible on a shared GPU: of {_gb(there)} GB the "
            f"trainer needs about {_gb(needs)}, and each of {rollout.workers} engines {_gb(least)} or more; take a "
            "smaller trainer.max_tokens or another GPU, or give the fraction"
        )
    return fraction


def job_memory(
    config: JobConfig,
    settings: Any,
    count: int,
    device: torch.device,
    embedded: bool,
    adapter: int = 0,
    draft: tuple[Any, int] | None = None,
) -> str:
    """Return one line about the memory of a job, with a warning if the device has less.

    Measured peaks on a CPU: 4.3 GB of the estimated 4.9 for the built-in model (trainer 2.8 of 2.7, rollout 0.9 of
    1.2); for SmolLM2 8.4 to 9.7 of 9.8 GB in the trainer and 4.8 of 4.0 in the rollout.

    Args:
        count: number of parameters.
        embedded: whether this package's engine decodes; SGLang and vLLM report their own memory.
        adapter: number of parameters of the adapter that is trained in their place; 0 where all are trained.
        draft: the Hugging Face configuration of a draft model and its number of parameters; each worker holds the model
            once and never changes it.
    """
    rollout, dtype = config.rollout, getattr(torch, config.model.dtype)
    weights = dtype.itemsize * count
    fixed, batches, again = trainer_memory(config, settings, count, device, adapter)
    total = fixed + batches
    parts = [f"trainer {_gb(total)} (weights and Adam {_gb(fixed)}, activations {_gb(batches)})"]
    if embedded:
        tokens = rollout.slots * rollout.max_length
        tokens = min(tokens, rollout.torch.cache_tokens or tokens)
        cache = tokens * bytes_per_token(settings, dtype)
        beside = 0 if draft is None else dtype.itemsize * draft[1]
        cache += 0 if draft is None else tokens * bytes_per_token(draft[0], dtype)
        rows = rollout.slots * (config.decoding.limit + 1) * settings.get_text_config().vocab_size * 4 * ROWS
        # The weights count twice: new ones come in while the old ones are in use.
        worker = 2 * weights + beside + PROCESS + cache + rows
        total += rollout.workers * worker
        each = f"{rollout.workers} x " if rollout.workers > 1 else ""
        held = f"KV cache {_gb(cache)}" if draft is None else f"draft model {_gb(beside)}, both KV caches {_gb(cache)}"
        parts.append(f"rollout {each}{_gb(worker)} ({held})")
    if device.type == "cpu":
        total += RAY
        parts.append(f"Ray {_gb(RAY)}")
    there = memory_of(device) * (torch.cuda.device_count() if device.type == "cuda" else 1)
    line = f"about {_gb(total)} of {_gb(there)} GB ({device}): {', '.join(parts)}"
    if total > there:
        line += "; that is not enough: lower rollout.slots, rollout.max_length or trainer.max_tokens"
        line += "" if again else ", or give trainer.checkpointing=true"
    return line


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}"

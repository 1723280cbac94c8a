"""Convert Hugging Face folders to megatron-core's distributed checkpoints and back, bit for bit.

torchrun --nproc-per-node N -m bebop.megatron_job.convert to-megatron model=DIR out=FOLDER [parallel.tensor=T ...]
torchrun --nproc-per-node N -m bebop.megatron_job.convert to-huggingface model=DIR source=FOLDER out=DIR
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bebop.command import run_main
from bebop.config.fields import from_dict
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.megatron_job.adapt import OWN, require_megatron, settings

HELP = """usage: torchrun --nproc-per-node N -m bebop.megatron_job.convert to-megatron|to-huggingface NAME=VALUE ...

  to-megatron      model=DIR (a Hugging Face folder, with its MTP head if it has one) -> out=FOLDER
  to-huggingface   source=FOLDER -> out=DIR, with the tokenizer, the settings and the layout of model=DIR

  parallel.NAME=N (tensor, pipeline, expert)   how the model is split meanwhile; the result does not depend on it
  dtype=float32|bfloat16                       of the weights (as in model=DIR)
"""
NAMES = ("model", "out", "source", "dtype")


def main(arguments: list[str]) -> int:
    """Parse, convert and return the exit code."""
    if not arguments or "--help" in arguments or "-h" in arguments:
        sys.stdout.write(HELP)
        return 0
    direction, rest = arguments[0], arguments[1:]
    if direction not in ("to-megatron", "to-huggingface"):
        raise UserError(f"{direction!r} is not possible: choose to-megatron or to-huggingface")
    given = dict(pair for pair in (a.split("=", 1) for a in rest if not a.startswith(OWN)) if len(pair) == 2)
    wanted = ("model", "out", "source") if direction == "to-huggingface" else ("model", "out")
    if unknown := [a for a in rest if not a.startswith(OWN) and a.split("=", 1)[0] not in NAMES]:
        raise UserError(f"{unknown[0]}: no such setting; there are {', '.join(NAMES)} and parallel.*")
    if missing := [name for name in wanted if name not in given]:
        raise UserError(f"{missing[0]} is missing: give {missing[0]}=PATH")
    require_megatron()
    from bebop.megatron_job.parallel import ParallelConfig, joined

    parallel = from_dict(ParallelConfig, settings([a for a in rest if a.startswith(OWN)]), OWN)
    with joined(parallel, "cpu") as place:
        convert(direction, given, parallel, place)
    return 0


def convert(direction: str, given: dict[str, str], parallel: Any, place: Any) -> None:
    """Convert this process's part; rank 0 writes a Hugging Face folder."""
    from bebop.megatron_job.architecture import build
    from bebop.megatron_job.checkpoint import load_model, save_model
    from bebop.megatron_job.source import Checkpoint
    from bebop.megatron_job.weights import gather_model, load

    name: Any = given.get("dtype", "auto")
    if name not in ("auto", "float32", "bfloat16"):
        raise UserError(f"dtype={name!r} is not possible: choose float32 or bfloat16")
    config = ModelConfig(path=given["model"], dtype=name, device="cpu", init_mtp=True)
    source = Checkpoint(config)
    dtype = getattr(torch, config.dtype)
    model = build(source.config, parallel, place, dtype, torch.device("cpu"))
    groups, heads = source.config.num_key_value_heads, source.config.num_attention_heads
    if direction == "to-megatron":
        load(model, source, place, groups)
        save_model(Path(given["out"]).resolve(), model)
        return
    load_model(Path(given["source"]).resolve(), model)
    whole = gather_model(model, place, groups, heads // groups)
    if dist.get_rank() == 0:
        write(whole, config, Path(given["out"]), dtype)
    dist.barrier()


def write(whole: dict[str, torch.Tensor], config: ModelConfig, out: Path, dtype: torch.dtype) -> None:
    """Write weights named as in ``Policy.weights`` to a Hugging Face folder like that of ``config``."""
    from bebop.model.checkpoint import load_policy, save_policy
    from bebop.model.layouts import join_experts

    policy = load_policy(config)
    assert policy.mtp is not None
    joined, wanted = join_experts(whole), policy.weights(mtp=True)
    for part, module in (("backbone", policy.backbone), ("mtp", policy.mtp)):
        biases = {f"{part}.{name}": buffer for name, buffer in module.named_buffers()}  # of routers, among others
        wanted |= {name: buffer for name, buffer in biases.items() if name in joined}
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(joined[name])
    save_policy(policy, out, dtype)


if __name__ == "__main__":
    run_main(main)

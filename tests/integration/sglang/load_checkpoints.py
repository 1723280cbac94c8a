"""A process of its own: SGLang's own loaders on checkpoint folders, and which parameters they leave unset.

``python load_checkpoints.py FOLDER...`` writes one line ``RESULT {json}`` for each folder's target and draft. Every
parameter begins as NaN, so what a checkpoint does not fill can be seen; ``needed`` are the draft's keys without which
something stays unset.
"""

import json
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer, initialize_dp_attention
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs

SHARED = ("embed_tokens", "lm_head")  # a draft is given the target's


def prepare(folder: str) -> ServerArgs:
    """One rank on the CPU, as a scheduler would set itself up."""
    arguments = ServerArgs(
        model_path=folder, device="cpu", attention_backend="triton", dtype="float32", disable_radix_cache=True
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    return arguments


def meet(arguments: ServerArgs) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = f"tcp://127.0.0.1:{port}"
    init_distributed_environment(backend="gloo", world_size=1, rank=0, local_rank=0, distributed_init_method=place)
    initialize_model_parallel()
    initialize_dp_attention(arguments)


def unset(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], draft: bool) -> list[str]:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_weights(iter(weights.items()))  # type: ignore[operator]
    left = [name for name, parameter in model.named_parameters() if bool(parameter.isnan().any())]
    return [name for name in left if not (draft and any(shared in name for shared in SHARED))]


def report(folder: str, draft: bool) -> dict[str, Any]:
    arguments = prepare(folder)
    config = ModelConfig.from_server_args(arguments, model_path=folder, is_draft_model=draft)
    if not torch.distributed.is_initialized():
        meet(arguments)
    init_dp_gathered_buffer(config)
    with set_default_torch_dtype(torch.float32), torch.device("cpu"):
        model = _initialize_model(config, LoadConfig())
    weights = load_file(Path(folder) / "model.safetensors")
    own = [name for name in weights if "mtp" in name] if draft else []
    needed = [n for n in own if unset(model, {k: t for k, t in weights.items() if k != n}, draft)]
    return {
        "folder": folder, "draft": draft, "class": type(model).__name__, "unset": unset(model, weights, draft),
        "own": own, "needed": needed,
    }  # fmt: skip


if __name__ == "__main__":
    for path in sys.argv[1:]:
        for draft in (False, True):
            sys.stdout.write("RESULT " + json.dumps(report(path, draft)) + "\n")
            sys.stdout.flush()

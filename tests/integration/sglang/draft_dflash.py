"""A process of its own: SGLang's DFLASH classes on an exported drafter, without CUDA.

``python -m tests.integration.sglang.draft_dflash TARGET TEXT DRAFT...`` writes ``RESULT {json}`` for each drafter.
SGLang's own: the configuration's parser, both models with their loaders, which layers are captured, the target's
forward, ``fc`` and keys and values of the text, the merged MASK, the draft's forward, the choice of tokens. Replaced:
attention, which is softmax over all keys here instead of a kernel over a cache, and the state of the CUDA worker.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.dp_attention import init_dp_gathered_buffer
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_loader.loader import _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from torch import Tensor

from tests.integration.sglang.load_checkpoints import meet, unset

WORKER: Any = DFlashWorkerV2


class Attention:
    """Softmax over the keys that a layer was given before and those of now; all of a call see one another unless the
    layer is causal."""

    def __init__(self) -> None:
        self.text: dict[int, tuple[Tensor, Tensor]] = {}  # a layer of the draft -> keys and values [n, heads, d]

    def set_kv_buffer(self, layer: Any, place: Any, key: Tensor, value: Tensor, *scales: Any) -> None:
        """As the worker's cache of keys and values."""
        self.text[layer.layer_id] = key, value

    def __call__(self, layer: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """In the place of ``RadixAttention.forward``."""
        count, causal = len(q), layer.attn_type == AttentionType.DECODER
        q = q.view(count, layer.tp_q_head_num, -1)
        k, v = (x.view(count, layer.tp_k_head_num, -1) for x in (k, v))
        seen = torch.ones(count, count, dtype=torch.bool)
        if causal:
            seen = seen.tril()
        else:
            key, value = self.text[layer.layer_id]
            seen = torch.cat([torch.ones(count, len(key), dtype=torch.bool), seen], 1)
            k, v = torch.cat([key, k]), torch.cat([value, v])
        share = layer.tp_q_head_num // layer.tp_k_head_num
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scaling
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def prepare(target: str) -> ServerArgs:
    arguments = ServerArgs(
        model_path=target, device="cpu", attention_backend="triton", dtype="float32", disable_radix_cache=True
    )
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0))
    return arguments


def load(arguments: ServerArgs, folder: str, draft: bool) -> tuple[Any, Any]:
    config = ModelConfig.from_server_args(arguments, model_path=folder, is_draft_model=draft)
    if not torch.distributed.is_initialized():
        meet(arguments)
    init_dp_gathered_buffer(config)
    with set_default_torch_dtype(torch.float32), torch.device("cpu"):
        model = _initialize_model(config, LoadConfig())
    return model, config


def batch(ids: Tensor, positions: Tensor) -> ForwardBatch:
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=ids, req_pool_indices=torch.zeros(1, dtype=torch.long),
        seq_lens=torch.tensor([len(ids)]), out_cache_loc=torch.arange(len(ids)), seq_lens_sum=len(ids),
        positions=positions,
    )  # fmt: skip


def worker_of(target: Any, target_config: Any, draft: Any, folder: str, cache: Attention) -> Any:
    """What the worker's functions below ask for."""
    worker = SimpleNamespace(
        draft_model=draft,
        draft_model_runner=SimpleNamespace(token_to_kv_pool=cache),
        server_args=SimpleNamespace(speculative_draft_model_path=folder),
        device="cpu",
        _draft_greedy_local_cap=0,
        _target_worker=SimpleNamespace(model_runner=SimpleNamespace(model=target, model_config=target_config)),
    )
    worker.target_worker = worker._target_worker
    return worker


@torch.no_grad()
def report(arguments: ServerArgs, target: Any, target_config: Any, folder: str, text: list[int]) -> Mapping[str, Any]:
    draft, config = load(arguments, folder, draft=True)
    weights = load_file(Path(folder) / "model.safetensors")
    needed = [n for n in weights if unset(draft, {k: t for k, t in weights.items() if k != n}, draft=False)]
    left = unset(draft, weights, draft=False)
    parsed = parse_dflash_draft_config(draft_hf_config=config.hf_config)
    layers = parsed.resolve_target_layer_ids(target_num_layers=target_config.hf_text_config.num_hidden_layers)
    target.set_dflash_layers_to_capture(layers)

    attention = Attention()
    RadixAttention.forward = lambda layer, *a, **k: attention(layer, *a, **k)  # type: ignore[method-assign]
    worker = worker_of(target, target_config, draft, folder, attention)
    *before, anchor = text
    ids, positions = torch.tensor(before), torch.arange(len(before))
    _, captured = target.model(ids, positions, batch(ids, positions))
    features = draft.project_target_hidden(torch.cat(list(captured), -1))
    WORKER._append_target_hidden_sequential(worker, features, positions, positions)
    mask = WORKER._resolve_mask_token_id(worker, mask_token=parsed.mask_token, mask_token_id=parsed.mask_token_id)
    worker._mask_token_id = mask
    WORKER._maybe_merge_trained_mask_embedding(worker)

    block = torch.full((parsed.resolve_block_size(),), mask)
    block[0] = anchor
    places = len(before) + torch.arange(len(block))
    states = draft(block, places, batch(block, places), input_embeds=target.get_input_embeddings()(block)).hidden_states
    tokens = WORKER._greedy_sample_from_vocab_parallel_head(worker, hidden_states=states[1:], lm_head=target.lm_head)
    return {
        "class": type(draft).__name__, "unset": left, "own": list(weights), "needed": needed, "layers": layers,
        "block": len(block), "mask": mask, "tokens": tokens.tolist(), "states": states.tolist(),
        "both_ways": all(layer.self_attn.attn_type == AttentionType.ENCODER_ONLY for layer in draft.layers),
    }  # fmt: skip


def main(target_folder: str, text: str, *drafters: str) -> None:
    arguments = prepare(target_folder)
    target, config = load(arguments, target_folder, draft=False)
    target.load_weights(iter(load_file(Path(target_folder) / "model.safetensors").items()))
    for folder in drafters:
        found = report(arguments, target, config, folder, json.loads(text))
        sys.stdout.write("RESULT " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

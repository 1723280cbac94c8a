"""A process of its own: vLLM's MTP classes on checkpoint folders, without a running engine.

``python -m tests.integration.vllm.run_heads INPUTS FOLDER[:OTHER]...`` writes ``RESULT {json}`` for each
folder: states and logits of its head, and what the weights of another folder do to target and draft. vLLM's own:
the configuration of the draft, its loader, the class with all of its layers and experts, its logits. Replaced:
attention, which is softmax over all keys here instead of a kernel over a cache.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from bebop.rollout.vllm.arguments import ENVIRONMENT
from bebop.rollout.vllm.plugin import CPU, RUNNER, register
from tests.integration.heads import compare, held


def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any) -> Tensor:
    """Attend causally: [n, H * D] and twice [n, Hkv * D] -> [n, H * D], in the place of ``Attention.forward``."""
    count = len(query)
    q, k, v = (
        query.view(count, layer.num_heads, -1),
        key.view(count, layer.num_kv_heads, -1),
        value.view(count, layer.num_kv_heads, -1),
    )
    share = layer.num_heads // layer.num_kv_heads
    return softmax_over_keys(q, k.repeat_interleave(share, 1), v.repeat_interleave(share, 1), layer.impl.scale)


def attend_latent(layer: Any, q: Tensor, latent: Tensor, rotary: Tensor, *args: Any, **more: Any) -> Tensor:
    """Attend as ``MLAAttention.forward`` does: q [n, H, N + R], latent [n, C], rotary part of keys [n, 1, R]."""
    pair = layer.kv_b_proj(latent)[0].view(len(q), layer.num_heads, -1)
    key, value = pair.split([layer.qk_nope_head_dim, layer.v_head_dim], -1)
    key = torch.cat([key, rotary.view(len(q), 1, -1).expand(-1, layer.num_heads, -1)], -1)
    return softmax_over_keys(q, key, value, layer.scale)


def softmax_over_keys(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    seen = torch.ones(len(q), len(q), dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).flatten(1)


def configuration(folder: Path) -> Any:
    """Return what vLLM makes of a checkpoint that drafts with its own head."""
    from vllm import EngineArgs

    # Of latent attention: where a processor has AMX vLLM takes a backend that has no fp32.
    latent = {"attention_backend": "CPU_MLA"} if "kv_lora_rank" in (folder / "config.json").read_text() else {}
    return EngineArgs(
        **latent, model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=4,
        skip_tokenizer_init=True, enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1},
    ).create_engine_config()  # fmt: skip


@torch.no_grad()
def report(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config, count = configuration(folder), len(inputs["tokens"])
    with set_current_vllm_config(config):
        model = make(config, draft=True)
        with set_forward_context(None, config, num_tokens=count):
            out = model(inputs["tokens"], torch.arange(count), inputs["hidden"].clone())
            before = out[0] if isinstance(out, tuple) else out
            logits = model.compute_logits(before)
            # Those of DeepSeek and GLM norm what they return once more, as they compute logits.
            layers = getattr(model.model, "layers", None)
            last = next(iter(layers.values())) if isinstance(layers, torch.nn.ModuleDict) else None
            states = last.shared_head(before) if hasattr(last, "shared_head") else before
    return {"class": type(model).__name__, "states": states.tolist(), "logits": logits.tolist()}


def make(config: Any, draft: bool) -> Any:
    """Return the target or the draft of a configuration, loaded by vLLM."""
    from vllm.model_executor.model_loader import get_model

    meet()
    own = config.speculative_config.draft_model_config if draft else config.model_config
    return get_model(vllm_config=config, model_config=own)


@torch.no_grad()
def updated(folder: Path, other: Path, draft: bool) -> dict[str, Any]:
    """Return what an update does to a model that was loaded from ``folder``, see ``compare``."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    role = "draft" if draft else "target"
    weights = load_file(other.with_name(f"{other.name}_{role}.safetensors"))
    states = []
    for place in (other, folder):
        config = configuration(place)
        with set_current_vllm_config(config):
            model = make(config, draft)
        states.append(held(model, draft))
    initialize_layerwise_reload(model)
    with disable_mtp_completeness_check():
        model.load_weights(iter(weights.items()))
    with set_current_vllm_config(config):
        finalize_layerwise_reload(model, config.model_config)
    wanted, before = states
    return compare(before, held(model, draft), wanted)


def meet() -> None:
    """Be the one rank of a group. Made anew for each model: only those with experts get a group for them."""
    from vllm.distributed import parallel_state

    parallel_state.destroy_model_parallel()
    if not torch.distributed.is_initialized():
        place = Path(tempfile.mkdtemp()) / "store"
        parallel_state.init_distributed_environment(1, 0, f"file://{place}", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)


def main(inputs_path: str, *folders: str) -> None:
    os.environ.update({**ENVIRONMENT, CPU: "1", RUNNER: "0"})  # vLLM's second runner takes a compiler
    register()
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker on a CPU has it: there is no accelerator
    Attention.forward, MLAAttention.forward = attend, attend_latent  # type: ignore[method-assign]
    inputs = load_file(inputs_path)
    for argument in folders:
        folder, _, other = argument.partition(":")
        found = {"folder": Path(folder).name, **report(Path(folder), inputs)}
        if other:
            pair = Path(folder), Path(other)
            found |= {"target": updated(*pair, draft=False), "draft": updated(*pair, draft=True)}
        sys.stdout.write("RESULT " + json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Builds a megatron-core GPTModel with one MTP layer from a Hugging Face configuration; refuses unknown features."""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from bebop.errors import UserError
from bebop.megatron_job.head import ContextAttention
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.weights import FAMILIES


class BackboneModel(GPTModel):
    """GPTModel that returns its final, normed hidden states [s, b, d] and makes no logits."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture of experts of a model: the layers that have one, and the router's settings."""

    count: int
    width: int  # of one expert
    layers: tuple[bool, ...]  # of the backbone, then the MTP head: whether it has experts; the others are dense
    shared: int  # width of the experts of all tokens together; 0: there are none
    router: dict[str, Any]  # settings of megatron-core

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of megatron-core: every token goes to its experts, and no loss balances them."""
        return {
            **self.router,
            "num_moe_experts": self.count,
            "moe_ffn_hidden_size": self.width,
            "moe_layer_freq": [int(x) for x in self.layers[:-1]],
            "moe_shared_expert_intermediate_size": self.shared or None,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": False,  # needs CUDA, and other names of weights
        }


def experts_of(hf: Any) -> Experts | None:
    """Return the experts of a model, None for a dense one; raise ``UserError`` for a router megatron-core lacks."""
    layers = int(hf.num_hidden_layers)
    if hf.model_type == "qwen3_moe":
        # Softmax over all experts; their weights are normed over the chosen ones, which is a softmax of these alone.
        chosen, normed = int(hf.num_experts_per_tok), bool(hf.norm_topk_prob)
        _refuse_router(hf, normed and chosen == 1)
        sparse = [i not in hf.mlp_only_layers and (i + 1) % hf.decoder_sparse_step == 0 for i in range(layers + 1)]
        router: dict[str, Any] = {"moe_router_topk": chosen, "moe_router_pre_softmax": not normed}
        count, shared = int(hf.num_experts), 0
    elif hf.model_type == "glm4_moe":
        # Sigmoids in fp32; a bias corrects the choice, not the weights.
        chosen, count = int(hf.num_experts_per_tok), int(hf.n_routed_experts)
        _refuse_router(hf, bool(hf.norm_topk_prob) != (chosen > 1))
        if hf.n_group > 1:
            raise UserError(f"the model's n_group={hf.n_group} is one that bebop.megatron_job does not have: 1 is")
        sparse = [i >= hf.first_k_dense_replace for i in range(layers + 1)]
        shared = int(hf.moe_intermediate_size) * int(hf.n_shared_experts)
        router = {
            "moe_router_topk": chosen,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": float(hf.routed_scaling_factor),
            "moe_router_dtype": "fp32",
        }
    else:
        return None
    if not any(sparse):
        return None
    width = int(hf.moe_intermediate_size)
    return Experts(count=count, width=width, layers=tuple(sparse), shared=shared, router=router)


def _refuse_router(hf: Any, strange: bool) -> None:
    if strange:
        raise UserError(
            f"the model's norm_topk_prob={hf.norm_topk_prob} with num_experts_per_tok={hf.num_experts_per_tok} is a "
            f"router that megatron-core does not have for {hf.model_type}"
        )


def check_sizes(hf: Any, parallel: ParallelConfig) -> None:
    """Raise ``UserError`` for an unknown model, or one that does not divide over the ranks."""
    if hf.model_type not in FAMILIES:
        raise UserError(f"model_type={hf.model_type!r} is not known to bebop.megatron_job: {', '.join(FAMILIES)} are")
    rope, glm = getattr(hf, "rope_parameters", None) or {}, hf.model_type == "glm4_moe"
    unknown = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "sliding_window": bool(getattr(hf, "use_sliding_window", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "attention_bias": not glm and bool(getattr(hf, "attention_bias", False)),
        "hidden_act": hf.hidden_act != "silu",
        "partial_rotary_factor": not glm and rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if missing := [name for name, strange in unknown.items() if strange]:
        raise UserError(f"the model's {missing[0]} is one that bebop.megatron_job does not have")
    experts = experts_of(hf)
    _check_experts(hf, experts, parallel.expert)
    tensor, pipeline = parallel.tensor, parallel.pipeline
    dense = experts is None or not all(experts.layers)
    sizes = {name: getattr(hf, name) for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")}
    sizes |= {"intermediate_size": hf.intermediate_size} if dense else {}
    sizes |= {"shared experts' width": experts.shared} if experts is not None else {}
    for name, size in sizes.items():
        if size % tensor:
            raise UserError(f"parallel.tensor={tensor} does not divide the model's {name}={size}")
    if hf.num_hidden_layers % pipeline:
        raise UserError(f"parallel.pipeline={pipeline} does not divide the model's {hf.num_hidden_layers} layers")


def _check_experts(hf: Any, experts: Experts | None, ranks: int) -> None:
    """Raise ``UserError`` if the experts cannot be split over ``ranks`` ranks."""
    if experts is None and ranks > 1:
        raise UserError(f"parallel.expert={ranks}: a {hf.model_type} model like this one has no experts; give 1")
    if experts is not None and experts.count % ranks:
        raise UserError(f"parallel.expert={ranks} does not divide the model's {experts.count} experts")


def transformer_config(
    hf: Any, parallel: ParallelConfig, dtype: torch.dtype, cpu: bool, sequence_parallel: bool
) -> TransformerConfig:
    """Return the settings of megatron-core's layers: no random numbers, no fused operators."""
    newer = {"mtp_detach_heads": True} if hasattr(TransformerConfig, "mtp_detach_heads") else {}
    experts = experts_of(hf)
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2" or bool(getattr(hf, "attention_bias", False)),
        qk_layernorm=hf.model_type in ("qwen3", "qwen3_moe") or bool(getattr(hf, "use_qk_norm", False)),
        mtp_num_layers=1,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=cpu,
        perform_initialization=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        **newer,
        **({} if experts is None else experts.settings),
    )


def build(
    hf: Any,
    parallel: ParallelConfig,
    place: Place,
    dtype: torch.dtype,
    device: torch.device,
    kind: type = GPTModel,
    *,
    sequence_parallel: bool = False,
) -> GPTModel:
    """Build this process's part of the model, without weights; ``kind`` is GPTModel or a subclass."""
    check_sizes(hf, parallel)
    config = transformer_config(hf, parallel, dtype, device.type == "cpu", sequence_parallel)
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    experts = experts_of(hf)
    of_head = None if experts is None or not experts.layers[-1] else experts.count
    layer = get_gpt_layer_local_spec(of_head, qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    for one in (layer, *block.layer_specs):
        one.submodules.self_attention.submodules.core_attention = ModuleSpec(module=ContextAttention)
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if place.last else None
    rope = getattr(hf, "rope_parameters", None) or {}
    model = kind(
        config,
        block,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=place.first,
        post_process=place.last,
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_percent=rope.get("partial_rotary_factor", 1.0),
        rotary_base=rope.get("rope_theta", 10000.0),
        mtp_block_spec=mtp,
    )
    return model.to(device)

"""A Hugging Face configuration as a megatron-core GPTModel with one MTP layer; unknown features are refused."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from bebop.errors import UserError
from bebop.megatron_job.head import ContextAttention
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.weights import FAMILIES


class BackboneModel(GPTModel):
    """A GPTModel that ends with its final, normed hidden states [s, b, d]; no logits are made."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


def check_sizes(hf: Any, parallel: ParallelConfig) -> None:
    """Raise ``UserError`` for an unknown model, or one that does not divide over the ranks."""
    if hf.model_type not in FAMILIES:
        raise UserError(f"model_type={hf.model_type!r} is not known to bebop.megatron_job: {', '.join(FAMILIES)} are")
    rope = getattr(hf, "rope_parameters", None) or {}
    unknown = {
        "rope_type": rope.get("rope_type", "default") != "default",
        "sliding_window": bool(getattr(hf, "use_sliding_window", False)),
        "mlp_bias": bool(getattr(hf, "mlp_bias", False)),
        "attention_bias": bool(getattr(hf, "attention_bias", False)),
        "hidden_act": hf.hidden_act != "silu",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    if missing := [name for name, strange in unknown.items() if strange]:
        raise UserError(f"the model's {missing[0]} is one that bebop.megatron_job does not have")
    tensor, pipeline = parallel.tensor, parallel.pipeline
    for name in ("num_attention_heads", "num_key_value_heads", "vocab_size", "intermediate_size"):
        if getattr(hf, name) % tensor:
            raise UserError(f"parallel.tensor={tensor} does not divide the model's {name}={getattr(hf, name)}")
    if hf.num_hidden_layers % pipeline:
        raise UserError(f"parallel.pipeline={pipeline} does not divide the model's {hf.num_hidden_layers} layers")


def transformer_config(
    hf: Any, parallel: ParallelConfig, dtype: torch.dtype, cpu: bool, sequence_parallel: bool
) -> TransformerConfig:
    """Return the settings of megatron-core's layers: no random numbers, no fused operators."""
    newer = {"mtp_detach_heads": True} if hasattr(TransformerConfig, "mtp_detach_heads") else {}
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
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type == "qwen3",
        mtp_num_layers=1,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
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
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(module=ContextAttention)
    mtp = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=False) if place.last else None
    rope = getattr(hf, "rope_parameters", None) or {}
    model = kind(
        config,
        layer,
        vocab_size=hf.vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=place.first,
        post_process=place.last,
        share_embeddings_and_output_weights=bool(hf.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=rope.get("rope_theta", 10000.0),
        mtp_block_spec=mtp,
    )
    return model.to(device)

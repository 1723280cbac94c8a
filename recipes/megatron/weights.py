"""Weights between Hugging Face's names and megatron-core's parameters, split over tensor and pipeline ranks.

Nothing is computed: tensors are cut, joined and put in order, so a round trip is exact to the bit. megatron-core
joins q, k and v of each group of heads (group after group), and gate and up of the feed-forward layer (a rank's part of
the one, then of the other).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.megatron_job.parallel import Place

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Rule:
    """One parameter of megatron-core: the tensors it is joined from, how, and the dimension that ranks split."""

    parts: tuple[str, ...]
    join: Literal["one", "heads", "gated"] = "one"
    split: int | None = None


def _attention(kind: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{x}_proj.{kind}" for x in "qkv")


LAYER = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(_attention("weight"), "heads", 0),
    "self_attention.linear_qkv.bias": Rule(_attention("bias"), "heads", 0),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), split=1),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Rule(("input_layernorm.weight",)),  # as Transformer Engine has it
    "mlp.linear_fc1.layer_norm_weight": Rule(("post_attention_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), "gated", 0),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), split=1),
}
OTHERS = {
    "embedding.word_embeddings.weight": Rule(("backbone.model.embed_tokens.weight",), split=0),
    "decoder.final_layernorm.weight": Rule(("backbone.model.norm.weight",)),
    "output_layer.weight": Rule(("backbone.lm_head.weight",), split=0),
    "mtp.layers.0.enorm.weight": Rule(("mtp.token_norm.weight",)),
    "mtp.layers.0.hnorm.weight": Rule(("mtp.hidden_norm.weight",)),
    "mtp.layers.0.eh_proj.weight": Rule(("mtp.project.weight",), split=0),
    "mtp.layers.0.final_layernorm.weight": Rule(("mtp.final_norm.weight",)),
}
OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
OF_HEAD = re.compile(r"mtp\.layers\.0\.(?:transformer_layer|mtp_model_layer)\.(.+)")  # the second name from 0.17 on


def rule_of(name: str, offset: int) -> Rule:
    """Return the rule of a parameter of one stage, whose first layer is layer ``offset`` of the model."""
    if name in OTHERS:
        return OTHERS[name]
    if found := OF_LAYER.fullmatch(name):
        prefix, rest = f"backbone.model.layers.{int(found[1]) + offset}.", found[2]
    elif found := OF_HEAD.fullmatch(name):
        prefix, rest = "mtp.layer.", found[1]
    else:
        raise UserError(f"bebop.megatron_job does not know the parameter {name}")
    if rest not in LAYER:
        raise UserError(f"bebop.megatron_job does not know the parameter {name}: dense layers of {', '.join(FAMILIES)}")
    rule = LAYER[rest]
    return Rule(tuple(prefix + part for part in rule.parts), rule.join, rule.split)


def join(parts: list[Tensor], how: str, groups: int) -> Tensor:
    """Join Hugging Face's tensors to one of megatron-core, with this number of ``groups`` of heads."""
    if how == "heads":
        return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], 1).flatten(0, 1)
    return torch.cat(parts) if how == "gated" else parts[0]


def part(whole: Tensor, how: str, groups: int, per_group: int) -> list[Tensor]:
    """Undo ``join``; ``per_group`` query heads share a key head."""
    if how == "heads":
        grouped = whole.unflatten(0, (groups, per_group + 2, -1))
        return [x.flatten(0, 2) for x in grouped.split([per_group, 1, 1], 1)]
    return list(whole.chunk(2)) if how == "gated" else [whole]


def parameters(model: nn.Module) -> Iterator[tuple[Rule, nn.Parameter]]:
    """Yield the parameters of this stage with their rules."""
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    offset = layers[0].layer_number - 1 if layers else 0
    for name, parameter in model.named_parameters():
        yield rule_of(name, offset), parameter


@torch.no_grad()
def load(model: nn.Module, source: Mapping[str, Tensor], place: Place, groups: int) -> None:
    """Fill this process's part of a model; ``groups``: the key heads of the whole model."""
    for rule, parameter in parameters(model):
        parts = [source[name] for name in rule.parts]
        if rule.split is not None:
            parts = [x.chunk(place.tensors, rule.split)[place.tensor] for x in parts]
        parameter.copy_(join(parts, rule.join, groups // place.tensors))


def gather(named: Mapping[str, tuple[Rule, Tensor]], place: Place, groups: int, per_group: int) -> dict[str, Tensor]:
    """Gather whole tensors by Hugging Face's names on every tensor rank, on the CPU."""
    whole: dict[str, Tensor] = {}
    for rule, tensor in named.values():
        mine = tensor.detach().contiguous()
        every = [torch.empty_like(mine) for _ in range(place.tensors)] if rule.split is not None else [mine]
        if rule.split is not None:
            dist.all_gather(every, mine, group=place.tensor_group)
        cut = [part(x, rule.join, groups // place.tensors, per_group) for x in every]
        for at, name in enumerate(rule.parts):
            pieces = [x[at] for x in cut]
            whole[name] = (pieces[0] if rule.split is None else torch.cat(pieces, rule.split)).to("cpu", copy=True)
    return whole


def gather_model(model: nn.Module, place: Place, groups: int, per_group: int) -> dict[str, Tensor]:
    """Gather every weight of a model by Hugging Face's names on rank 0; on others, those of their stage."""
    mine = gather({str(i): pair for i, pair in enumerate(parameters(model))}, place, groups, per_group)
    if place.pipelines == 1 or place.tensor or place.data:
        return mine
    stages: list[dict[str, Tensor]] | None = [{}] * place.pipelines if place.first else None
    first = dist.get_global_rank(place.pipeline_group, 0)
    dist.gather_object(mine, stages, dst=first, group=place.pipeline_group)
    return mine if stages is None else {name: x for stage in stages for name, x in stage.items()}

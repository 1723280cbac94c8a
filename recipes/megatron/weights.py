"""Conversion of weights between Hugging Face and megatron-core, over tensor, pipeline and expert parallel ranks.

Nothing is computed: tensors are cut, joined and reordered, so a round trip is exact to the bit. megatron-core joins q,
k and v of each group of heads (group after group), and gate and up of the feed-forward layer (a rank's part of gate,
then of up). Experts are separate on both sides: rank r of n holds those from r times E / n on, whole.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bebop.errors import UserError

if TYPE_CHECKING:  # imports megatron-core
    from bebop.megatron_job.parallel import Place

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule of one megatron-core parameter: the tensors it is joined from, how, and the dimension that ranks split."""

    parts: tuple[str, ...]
    join: Literal["one", "heads", "gated"] = "one"
    split: int | None = None
    expert: int | None = None  # its number on this rank; ``parts`` then have {expert} where that of the model belongs

    def names(self, first: int) -> tuple[str, ...]:
        """Return the names of the parts on an expert parallel rank whose first expert is ``first``."""
        return self.parts if self.expert is None else tuple(x.format(expert=first + self.expert) for x in self.parts)


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
    "mlp.router.weight": Rule(("mlp.gate.weight",)),
    "mlp.router.expert_bias": Rule(("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": Rule(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"), "gated", 0
    ),
    "mlp.shared_experts.linear_fc2.weight": Rule(("mlp.shared_experts.down_proj.weight",), split=1),
}
EXPERT = {
    "linear_fc1": Rule(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"), "gated", expert=0
    ),
    "linear_fc2": Rule(("mlp.experts.{expert}.down_proj.weight",), expert=0),
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
OF_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
OF_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
OF_HEAD = re.compile(r"mtp\.layers\.0\.(?:transformer_layer|mtp_model_layer)\.(.+)")  # the second name from 0.17 on


def rule_of(name: str, offset: int) -> Rule:
    """Return the rule of a parameter of one stage; ``offset`` is the number of the stage's first layer in the model."""
    if name in OTHERS:
        return OTHERS[name]
    if found := OF_LAYER.fullmatch(name):
        prefix, rest = f"backbone.model.layers.{int(found[1]) + offset}.", found[2]
    elif found := OF_HEAD.fullmatch(name):
        prefix, rest = "mtp.layer.", found[1]
    else:
        raise UserError(f"bebop.megatron_job does not know the parameter {name}")
    expert = OF_EXPERT.fullmatch(rest)
    if expert is None and rest not in LAYER:
        raise UserError(f"bebop.megatron_job does not know the parameter {name}: layers of {', '.join(FAMILIES)}")
    rule = LAYER[rest] if expert is None else EXPERT[expert[2]]
    number = None if expert is None else int(expert[1])
    return Rule(tuple(prefix + part for part in rule.parts), rule.join, rule.split, number)


def join(parts: list[Tensor], how: str, groups: int) -> Tensor:
    """Join Hugging Face's tensors to one of megatron-core; ``groups`` is the number of head groups."""
    if how == "heads":
        return torch.cat([x.unflatten(0, (groups, -1)) for x in parts], 1).flatten(0, 1)
    return torch.cat(parts) if how == "gated" else parts[0]


def part(whole: Tensor, how: str, groups: int, per_group: int) -> list[Tensor]:
    """Undo ``join``; ``per_group`` query heads share a key head."""
    if how == "heads":
        grouped = whole.unflatten(0, (groups, per_group + 2, -1))
        return [x.flatten(0, 2) for x in grouped.split([per_group, 1, 1], 1)]
    return list(whole.chunk(2)) if how == "gated" else [whole]


def tensors(model: nn.Module) -> Iterator[tuple[Rule, Tensor]]:
    """Yield the parameters of this stage with their rules, and the biases of its routers."""
    layers = getattr(getattr(model, "decoder", None), "layers", None)
    offset = layers[0].layer_number - 1 if layers else 0
    for name, tensor in (*model.named_parameters(), *router_biases(model)):
        yield rule_of(name, offset), tensor


def router_biases(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the correction biases of routers, which are buffers: no gradient reaches them."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name.endswith(".expert_bias")]


def local_experts(rules: Iterable[Rule]) -> int:
    """Return the number of experts of a layer that this rank holds; 0 where no layer has any."""
    return max((rule.expert + 1 for rule in rules if rule.expert is not None), default=0)


@torch.no_grad()
def load(model: nn.Module, source: Mapping[str, Tensor], place: "Place", groups: int) -> None:
    """Fill this process's part of a model; ``groups`` is the number of key heads of the whole model."""
    found = list(tensors(model))
    first = place.expert * local_experts(rule for rule, _ in found)
    for rule, tensor in found:
        parts = [source[name] for name in rule.names(first)]
        if rule.split is not None:
            parts = [x.chunk(place.tensors, rule.split)[place.tensor] for x in parts]
        tensor.copy_(join(parts, rule.join, groups // place.tensors))


def gather(named: Sequence[tuple[Rule, Tensor]], place: "Place", groups: int, per_group: int) -> dict[str, Tensor]:
    """Gather whole tensors under Hugging Face's names on every tensor and expert parallel rank, on the CPU."""
    whole: dict[str, Tensor] = {}
    local = local_experts(rule for rule, _ in named)
    for rule, tensor in named:
        if rule.expert is not None:
            for rank, mine in enumerate(_everywhere(tensor, place.expert_group)):
                parts = part(mine, rule.join, groups, per_group)
                whole |= {name: x.to("cpu", copy=True) for name, x in zip(rule.names(rank * local), parts, strict=True)}
            continue
        every = [tensor.detach()] if rule.split is None else _everywhere(tensor, place.tensor_group)
        cut = [part(x, rule.join, groups // place.tensors, per_group) for x in every]
        for at, name in enumerate(rule.parts):
            pieces = [x[at] for x in cut]
            whole[name] = (pieces[0] if rule.split is None else torch.cat(pieces, rule.split)).to("cpu", copy=True)
    return whole


def _everywhere(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensor of every rank of a group, in rank order."""
    mine = tensor.detach().contiguous()
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine, group=group)
    return every


def gather_model(model: nn.Module, place: "Place", groups: int, per_group: int) -> dict[str, Tensor]:
    """Gather every weight of a model under Hugging Face's names on rank 0; other ranks get those of their stage."""
    mine = gather(list(tensors(model)), place, groups, per_group)
    if place.pipelines == 1 or place.tensor or place.data:
        return mine
    stages: list[dict[str, Tensor]] | None = [{}] * place.pipelines if place.first else None
    first = dist.get_global_rank(place.pipeline_group, 0)
    dist.gather_object(mine, stages, dst=first, group=place.pipeline_group)
    return mine if stages is None else {name: x for stage in stages for name, x in stage.items()}

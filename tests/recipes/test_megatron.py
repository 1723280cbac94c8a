"""Adaptation on Megatron, as far as it needs no megatron-core: which rank gets which expert, and which chains."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from bebop.errors import UserError
from bebop.megatron_job import adapt, context, weights
from bebop.trainer.chains import TokenRow, chain_rows

LAYER = "mtp.layers.0.transformer_layer.mlp."
EXPERTS = 4


def part_of_a_model() -> nn.Module:
    """Return two local experts of width 3 and a router with a bias, by megatron-core's names."""
    root = nn.Module()
    local = [f"{LAYER}experts.local_experts.{i}." for i in (0, 1)]
    shapes = {f"{x}linear_fc1.weight": (6, 2) for x in local} | {f"{x}linear_fc2.weight": (2, 3) for x in local}
    for name, shape in (shapes | {f"{LAYER}router.weight": (EXPERTS, 2)}).items():
        _add(root, name).register_parameter("weight", nn.Parameter(torch.zeros(shape)))
    _add(root, f"{LAYER}router.expert_bias").register_buffer("expert_bias", torch.zeros(EXPERTS))
    return root


def _add(root: nn.Module, name: str) -> nn.Module:
    for step in name.split(".")[:-1]:
        if not hasattr(root, step):
            root.add_module(step, nn.Module())
        root = getattr(root, step)
    return root


def whole_layer() -> dict[str, Tensor]:
    """Return the weights of four experts as a checkpoint names them, each of its own number."""
    kinds = {"gate_proj": (3, 2), "up_proj": (3, 2), "down_proj": (2, 3)}
    experts = {
        f"mtp.layer.mlp.experts.{e}.{kind}.weight": torch.full(shape, 10.0 * e + i)
        for e in range(EXPERTS)
        for i, (kind, shape) in enumerate(kinds.items())
    }
    router = {"weight": torch.arange(8.0).view(4, 2), "e_score_correction_bias": torch.arange(4.0) + 1}
    return experts | {f"mtp.layer.mlp.gate.{name}": x for name, x in router.items()}


@pytest.mark.parametrize("rank", [0, 1])
def test_an_expert_parallel_rank_loads_its_own_experts_and_the_whole_router(rank: int) -> None:
    model, whole = part_of_a_model(), whole_layer()
    place: Any = SimpleNamespace(expert=rank, experts=2, tensor=0, tensors=1)
    weights.load(model, whole, place, groups=1)
    found = model.state_dict()
    for local in (0, 1):
        number = 2 * rank + local
        fc1, fc2 = (found[f"{LAYER}experts.local_experts.{local}.linear_fc{i}.weight"] for i in (1, 2))
        assert fc1[:, 0].tolist() == [10 * number] * 3 + [10 * number + 1] * 3
        assert (fc2 == 10 * number + 2).all()
    assert_close(found[f"{LAYER}router.weight"], whole["mtp.layer.mlp.gate.weight"])
    assert_close(found[f"{LAYER}router.expert_bias"], whole["mtp.layer.mlp.gate.e_score_correction_bias"])


def test_experts_of_all_ranks_are_gathered_in_the_order_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, models = whole_layer(), [part_of_a_model(), part_of_a_model()]
    for rank, model in enumerate(models):
        place: Any = SimpleNamespace(expert=rank, experts=2, tensor=0, tensors=1, expert_group=None)
        weights.load(model, whole, place, groups=1)
    own, other = (list(weights.tensors(model)) for model in models)
    theirs = {id(tensor): [tensor, twin] for (_, tensor), (_, twin) in zip(own, other, strict=True)}
    monkeypatch.setattr(weights, "_everywhere", lambda tensor, group: theirs[id(tensor)])
    found = weights.gather(own, place, 1, 1)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert_close(found[name], tensor)


def test_a_parameter_of_grouped_experts_is_not_known() -> None:
    with pytest.raises(UserError, match=r"does not know the parameter mtp\.layers\.0\.transformer_layer\.mlp\.experts"):
        weights.rule_of(f"{LAYER}experts.weight1", 0)


def test_parts_other_than_the_head_are_refused() -> None:
    with pytest.raises(UserError, match=r"part=eagle3 is not possible on megatron-core, .* use python -m bebop\.adapt"):
        adapt.main(["part=eagle3"])


def test_context_parallel_ranks_share_every_chain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = chain_rows([TokenRow(prompt=(1, 2), answer=(3, 4, 5, 6, 7, 8)), TokenRow(prompt=(1,), answer=(2, 3))], 3)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: 4)
    shares = []
    for rank in range(4):
        monkeypatch.setattr("torch.distributed.get_rank", lambda group, rank=rank: rank)
        shares.append(context.share_of(rows, None))  # type: ignore[arg-type]
    assert len({share.anchors.shape for share in shares}) == 1
    assert sum(share.count("step") for share in shares) == rows.count("step")
    for i in range(2):
        live = [int(a) for x in shares for a, s in zip(x.anchors[i], x.steps[i], strict=True) if s]
        assert sorted(live) == [int(a) for a, s in zip(rows.anchors[i], rows.steps[i], strict=True) if s]

"""An adapter in place of all weights: what is trained, published, compared with, kept and written."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from bebop.config.job import LoraConfig, ModelConfig
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.lora import Adapter, adapted_layers, adapter_size, merge_into, merged
from bebop.model.parity import stock_attention
from bebop.trainer.checkpoint import load, store
from bebop.trainer.packing import PackedRows
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.rank import TrainerRank
from bebop.trainer.scorer import Scorer
from tests.cases import slow_but
from tests.model.families import EXPERTS, made, slow
from tests.trainer.builders import TEMPERATURE, batch, job, policy, weights_of

pytestmark = pytest.mark.slow  # quick tests of their seams are elsewhere, and the quick suite has a budget

LORA = {"rank": 4, "alpha": 12.0}
# Log-probs [A] by the adapter and by the merged weights: in float32 rounding, in bfloat16 that of the merged weights,
# as large as what bfloat16 costs the model itself.
APART = {"float32": 2e-5, "bfloat16": 0.12}


def trainer(source: Policy | None = None, dtype: str = "float32", **settings: Any) -> PolicyTrainer:
    config = job(model={"path": "tiny", "device": "cpu", "dtype": dtype}, **{"trainer": {"lora": LORA}, **settings})
    return PolicyTrainer(source or policy(dtype=getattr(torch, dtype)), config)


def learned(one: PolicyTrainer, *seeds: int) -> PolicyTrainer:
    for seed in seeds:
        one.update(batch(seed=seed))
    return one


@torch.no_grad()
def logprobs(scorer: Scorer, packed: list[PackedRows]) -> Tensor:
    return torch.cat([scorer(rows)[0] for rows in packed])


def apart(weights: dict[str, Tensor], one: PolicyTrainer, dtype: str) -> float:
    """How far the log-probs of a model with these weights are from those of the trainer, at most."""
    model, packed = policy(dtype=getattr(torch, dtype)), one._packed(batch(seed=5).groups)
    model.load(weights)
    scored = logprobs(Scorer(model, TEMPERATURE, one.mixed), packed)
    return float((scored - logprobs(one.scorer, packed)).abs().max())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_the_policy_with_its_adapter_merged(dtype: str) -> None:
    start = {name: t for name, t in weights_of(policy(dtype=getattr(torch, dtype))).items() if "mtp." not in name}
    one = trainer(dtype=dtype)
    first = one.weights()
    assert list(first) == list(start), "engines know the names of the model"
    assert all(torch.equal(first[name], start[name]) and first[name].dtype == start[name].dtype for name in start)
    sent = learned(one, 1, 2, 3).weights()
    moved = {name for name in start if not torch.equal(sent[name], start[name])}
    assert moved == {name for name in start if name.split(".")[-2].endswith("_proj") and name.endswith("weight")}
    assert apart(sent, one, dtype) < APART[dtype]
    assert apart(start, one, dtype) > 2 * APART[dtype], "the adapter counts for more than the tolerance"


def test_merging_rounds_once() -> None:
    """Where W is in bfloat16, W + s B A is computed in fp32: of 1 + 4 * 2^-10 each single part would be lost."""
    a, b, weight = torch.full((4, 1), 2**-5), torch.full((1, 4), 2**-5), torch.ones(1, 1, dtype=torch.bfloat16)
    found = merged(weight, a, b, 1.0)
    assert found.dtype == torch.float32 and float(found) == 1 + 2**-8
    assert float(merged(weight, a, b, 2.0).to(torch.bfloat16)) == 1 + 2**-7


def test_what_the_engine_says_is_not_rounded_for_a_frozen_backbone_in_bfloat16() -> None:
    made = batch(seed=1)
    packed = trainer(dtype="bfloat16")._packed(made.groups)
    told = sorted(float(p) for t in made.trajectories for p in t.completion.logprobs)
    assert sorted(float(p) for rows in packed for p in rows.rollout_logprobs) == pytest.approx(told, rel=1e-6)


def test_the_optimizer_sees_the_adapter_while_it_is_switched_off() -> None:
    """FSDP2 decides in its first pass which parameters get gradients, and that may be one of the reference."""
    one = trainer()
    assert one.adapter is not None
    with one.adapter.disabled():
        assert list(one.adapter.named) == list(one.optimizer.named)


def test_the_gradient_of_an_adapter_is_that_of_the_weights_it_is_added_to() -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW'."""
    one = learned(trainer(), 1, 2)
    full = policy()
    full.load(one.weights())
    whole = PolicyTrainer(full, job())
    for each in (one, whole):
        each.optimizer.zero_grad()
        for rows in each._packed(batch(seed=3).groups):
            each.scorer(rows)[0].sum().backward()
    own = one.policy.weights()
    for name, parameter in whole.policy.weights().items():
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.default.weight" not in own:
            continue
        a, b = (own[f"{layer}.lora_{side}.default.weight"] for side in "AB")
        assert a.grad is not None and b.grad is not None and parameter.grad is not None
        torch.testing.assert_close(b.grad, 3.0 * parameter.grad @ a.detach().T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(a.grad, 3.0 * b.detach().T @ parameter.grad, rtol=1e-3, atol=1e-4)


def test_the_optimizer_holds_the_adapter_alone_and_older_versions_do_too() -> None:
    one = learned(trainer(), 1, 2)
    named, size = one.optimizer.named, adapter_size(policy().backbone, LoraConfig(rank=4))
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in named)
    assert sum(p.numel() for p in named.values()) == size > 0
    state = one.state_dict()
    assert sum(t.numel() for t in state["weights"].values()) == size
    assert sum(t.numel() for name, t in state["optimizer"].items() if "exp_avg" in name) == 2 * size
    assert one.old_policies.versions == [1]
    assert sum(t.numel() for t in one.old_policies._kept[1]) == size


def test_tokens_of_older_versions_are_compared_under_their_own_adapter() -> None:
    one = trainer()
    metrics = [values(one.update(batch(seed=seed))) for seed in (1, 2)]  # both of version 0
    assert metrics[1]["train/ratio_tokens"] > 0 and metrics[1]["train/ratio_error_max"] < 1e-4
    assert metrics[1]["rollout/logprob_diff"] > 0.01, "under the adapter of now they are others"


@pytest.mark.parametrize("dtype", slow_but(["float32"], ["float32", "bfloat16"]))
def test_the_reference_is_the_model_without_its_adapter_and_no_copy(dtype: str) -> None:
    one = learned(trainer(dtype=dtype, algorithm={"kl_coefficient": 0.1}), 1, 2)
    assert one.reference is None, "a second copy"
    held = {p.untyped_storage().data_ptr() for p in one.policy.backbone.parameters()}
    packed, base = one._packed(batch(seed=5).groups), policy(dtype=getattr(torch, dtype))
    own = Scorer(base, TEMPERATURE, one.mixed)
    one.scorer.kept = []
    for rows in packed:
        found = one._reference_logprobs(rows)
        assert found is not None and torch.equal(found, own(rows)[0].detach())
        assert not torch.equal(found, one.scorer(rows)[0])
    assert len(one.scorer.kept) == len(packed), "the head does not learn from the reference's states"
    one.scorer.kept = None
    assert held == {p.untyped_storage().data_ptr() for p in one.policy.backbone.parameters()}
    before = one.weights()
    assert values(one.update(batch(seed=3)))["train/kl"] > 0
    assert any(not torch.equal(t, before[name]) for name, t in one.weights().items()), "the adapter still learns"


def test_a_reference_pass_before_any_other_leaves_the_adapter_to_learn() -> None:
    kl = [values(trainer(algorithm={"kl_coefficient": c}).update(batch(seed=1)))["train/grad_norm"] for c in (0, 0.1)]
    assert kl[1] == pytest.approx(kl[0], rel=1e-4), "at first the KL term is 0, and so is its gradient"


def test_an_adapter_in_bfloat16_learns_on_transformers_attention() -> None:
    source = dataclasses.replace(policy(dtype=torch.bfloat16), stock=True)
    source.backbone.set_attn_implementation("sdpa")
    assert values(trainer(source, "bfloat16").update(batch(seed=1)))["train/grad_norm"] > 0


def test_the_head_is_trained_beside_the_adapter_and_changes_nothing_of_it() -> None:
    head = {"mode": "always", "head": {"objective": "e2e_tv", "depth": 2, "lr": 1e-3, "max_tokens": 64}}
    for dtype in ("float32", "bfloat16"):
        alone, beside = trainer(dtype=dtype), trainer(dtype=dtype, cotrain=head)
        start = beside.weights(mtp=True)
        alone.update(batch(seed=1))
        assert values(beside.update(batch(seed=1), cotrain=True))["head/grad_norm"] > 0
        ours, wanted = beside.weights(mtp=True), alone.weights()
        assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
        assert any(not torch.equal(t, start[n]) for n, t in ours.items() if n.startswith("mtp."))


# ---- checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_policy(policy(), folder)
    return str(folder)


def test_a_checkpoint_holds_the_adapter_as_peft_loads_it(tmp_path: Path, model: str) -> None:
    one = TrainerRank(job(model, trainer={"lora": LORA}))
    learned(one.trainer, 1, 2)
    folder = store(tmp_path).path(2)
    one.save(folder, {})
    kept = {path.name for path in (folder / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= kept
    assert not {"model.safetensors", "config.json"} & kept
    ids = torch.arange(9)[None]
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), folder / "policy").eval()
    with torch.no_grad(), stock_attention(one.trainer.policy.backbone):
        wanted = one.trainer.policy.backbone(input_ids=ids).logits
        torch.testing.assert_close(theirs(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)
        with theirs.disable_adapter():
            assert float((theirs(input_ids=ids).logits - wanted).abs().max()) > 0.1, "the adapter counts for more"
    sent, whole = one.weights().weights, theirs.merge_and_unload()
    assert list(sent) == [f"backbone.{name}" for name, _ in whole.named_parameters()]
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(sent[f"backbone.{name}"], parameter.detach(), rtol=0, atol=1e-6)
    with pytest.raises(UserError, match=r"holds a LoRA adapter without its model: .*bebop.export --run RUN --out DIR"):
        load_policy(ModelConfig(path=str(folder / "policy"), device="cpu"))


def test_a_stored_adapter_merges_into_the_model_that_was_published(tmp_path: Path, model: str) -> None:
    one = TrainerRank(job(model, trainer={"lora": LORA}))
    learned(one.trainer, 1)
    one.save(tmp_path / "step", {})
    again = load_policy(ModelConfig(path=model, device="cpu"))
    merge_into(again, load(tmp_path / "step").trainer["weights"], LoraConfig(rank=4, alpha=12.0))
    sent = one.weights().weights
    assert all(torch.equal(tensor, sent[name]) for name, tensor in again.weights().items())
    other = {name: t[:, :5] for name, t in load(tmp_path / "step").trainer["weights"].items()}
    with pytest.raises(UserError, match=r"the adapter belongs to another model: it does not fit model\.layers\.0"):
        merge_into(again, other, LoraConfig(rank=4, alpha=12.0))


# ---- which layers


def test_layers_are_chosen_by_the_ends_of_their_names() -> None:
    backbone = policy().backbone
    assert len(adapted_layers(backbone, LoraConfig(rank=1))) == 14
    two = LoraConfig(rank=1, target_modules=("q_proj", "1.mlp.down_proj"))
    names = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.down_proj"]
    assert list(adapted_layers(backbone, two)) == names
    assert [name for name in dict(policy().backbone.named_modules()) if name in names] == names
    one = Adapter(backbone, dataclasses.replace(two, rank=3), seed=0)
    assert {name.split(".lora_")[0] for name in one.named} == {f"backbone.{name}" for name in names}
    single = LoraConfig(rank=1, target_modules="down_proj")
    assert len(adapted_layers(policy().backbone, single)) == 2


def test_layers_that_are_not_there_are_named_with_those_that_are() -> None:
    for given, shown in ((("q_proj", "lm_head"), r"\['q_proj', 'lm_head'\]"), ("lm_head", "'lm_head'")):
        words = rf"trainer.lora.target_modules={shown} is not possible: no linear layer .* called 'lm_head': give all-l"
        with pytest.raises(UserError, match=words + r".*down_proj, gate_proj, k_proj") as caught:
            adapted_layers(policy().backbone, LoraConfig(rank=1, target_modules=given))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "settings", "count"),
    [
        slow("phi3", {}, 8),  # qkv and gate_up are one matrix each
        slow("mixtral", EXPERTS, 8),  # of attention alone: experts are stacked in one tensor
        slow("qwen3_moe", EXPERTS, 8),
        # The first layer is dense, and others have an expert of all tokens: their names are those of stacked ones.
        slow("glm4_moe", EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1}, 14),
    ],
)
def test_families_keep_the_names_of_their_weights(kind: str, settings: dict[str, Any], count: int) -> None:
    made_one = made(kind, **settings)
    names = list(made_one.weights())
    one = Adapter(made_one.backbone, LoraConfig(rank=2), seed=0)
    assert len(one.layers) == count == len(one.named) / 2
    assert [name for name, _ in one.merged(made_one.weights(), lambda tensor: tensor)] == names


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"trainer.lora.rank=2 is not possible: the model's decoder has no linear layers"
    ):
        adapted_layers(made("gpt2").backbone, LoraConfig(rank=2))


def test_ranks_begin_with_the_same_adapter_and_seeds_with_others() -> None:
    def first(seed: int, burnt: int) -> Tensor:
        torch.manual_seed(burnt)
        made = Adapter(policy().backbone, LoraConfig(rank=2), seed=seed).named
        return next(p.detach() for name, p in made.items() if ".lora_A." in name)

    assert torch.equal(first(3, 0), first(3, 1)) and not torch.equal(first(3, 0), first(4, 0))

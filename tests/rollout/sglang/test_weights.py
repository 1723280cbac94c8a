"""Names of weights for SGLang, what is said with them, and the check of checksums."""

import asyncio
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, named_as_served, resolve, save_policy
from bebop.model.fingerprint import fingerprint
from bebop.rollout.engine import EngineDied
from bebop.rollout.served_weights import WeightUpdate, WeightWatch, constants, stored_head, update
from bebop.rollout.sglang.outputs import by_role
from bebop.rollout.sglang.transfer import DiskTransfer, parts
from tests.builders import tiny_policy
from tests.tiny_families import write_family

EXPERTS = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 0,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def test_names_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    policy = tiny_policy()
    save_policy(policy, tmp_path)
    load = update(policy.weights(mtp=True), 3, "mimo", 2)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        stored = {name: opened.get_tensor(name) for name in opened.keys()}
    sent = {**load.target, **load.draft}
    assert sent.keys() == stored.keys() and load.selector == "all"
    assert all(torch.equal(sent[name], stored[name]) for name in sent)
    assert update(policy.weights(), 3, "mimo", 2).selector == "target"
    assert update({"mtp.final_norm.weight": torch.ones(2)}, 3, "mimo", 2).selector == "draft"


@pytest.mark.parametrize("kind", ["mixtral", "phimoe", "minimax_m2", "ernie4_5_moe", "granitemoe", "qwen3_moe"])
def test_experts_have_the_names_of_their_family(tmp_path: Path, kind: str) -> None:
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **EXPERTS))
    backbone.save_pretrained(tmp_path)
    weights = {f"backbone.{name}": tensor for name, tensor in backbone.named_parameters()}
    buffers = constants(tmp_path)
    sent = update(weights, 3, "mimo", 1, partial(named_as_served, tmp_path), constants=buffers).target
    stored = load_file(tmp_path / "model.safetensors")
    assert sent.keys() == stored.keys() and bool(buffers) == (kind in ("minimax_m2", "ernie4_5_moe"))
    assert all(torch.equal(tensor, stored[name]) for name, tensor in sent.items())


def test_constants_go_with_their_model() -> None:
    """What no trainer sends goes with the model that it belongs to, and with no update that leaves that model out."""
    bias = {f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.full((2,), float(i)) for i in (1, 2)}
    target, draft = {"backbone.model.norm.weight": torch.ones(2)}, {"mtp.final_norm.weight": torch.ones(2)}
    both = update(target | draft, 3, "deepseek", 2, constants=bias)
    assert [*both.target][1:] == [*bias][:1] and [*both.draft][1:] == [*bias][1:]
    assert not update(target, 3, "deepseek", 2, constants=bias).draft
    assert not update(draft, 3, "deepseek", 2, constants=bias).target


def test_unknown_names_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        update({"critic.weight": torch.ones(2)}, 1, "mimo", 2)


@pytest.mark.parametrize("layout", ["mimo", "qwen3_next", "deepseek"])
def test_the_stored_head_is_the_policys(tmp_path: Path, layout: str) -> None:
    policy = tiny_policy()
    policy.layout = layout
    save_policy(policy, tmp_path)
    assert policy.mtp is not None
    own = dict(policy.mtp.named_parameters())
    found = stored_head(tmp_path, layout, 2)
    assert found.keys() == own.keys() and fingerprint(found) == fingerprint(own)


def test_the_built_in_head() -> None:
    assert "final_norm.weight" in stored_head(resolve("tiny"), "mimo", 12)


@pytest.mark.slow  # a family's import
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_the_stored_head_of_a_family_is_what_updates_send(name: str, tmp_path: Path) -> None:
    """Not its copies of tables, nor the biases of its router: an unchanged head must have one mark."""
    config = ModelConfig(path=str(write_family(tmp_path, name)), device="cpu")
    policy = load_policy(config, need_head=True, any_backbone=True)
    assert policy.mtp is not None
    sent, found = dict(policy.mtp.named_parameters()), stored_head(tmp_path, policy.layout, 2)
    assert sent.keys() == found.keys() and all(torch.equal(sent[key], found[key]) for key in sent)


def test_the_last_part_brings_version_and_flush() -> None:
    weights = tiny_policy().weights(mtp=True)
    words = [words for _, words in parts(update(weights, 5, "mimo", 2), flush=True)]
    assert [(w["selector"], w["weight_version"], w["flush_cache"]) for w in words] == [
        ("target", None, False),
        ("draft", "5", True),
    ]
    frozen = {name: t for name, t in weights.items() if name.startswith("backbone.")}
    ((_, only),) = parts(update(frozen, 6, "mimo", 2), flush=False)
    assert (only["selector"], only["weight_version"], only["flush_cache"]) == ("target", "6", False)


def reply(target: str = "a", draft: str = "b", shared: str = "c") -> dict:
    sums = {"model.norm": target, "draft.model.final": draft, "draft.lm_head.weight": shared}
    return {"ranks": [{"checksums": sums}, {"checksums": sums}]}


def test_checksums_by_role() -> None:
    assert by_role(reply()) == {
        "target": {"0.model.norm": "a", "1.model.norm": "a"},
        "draft": {"0.draft.model.final": "b", "1.draft.model.final": "b"},
    }


def load(target: float | None = None, draft: float | None = None):
    weights = {} if target is None else {"backbone.model.norm.weight": torch.tensor([target, 1.0])}
    weights |= {} if draft is None else {"mtp.final_norm.weight": torch.tensor([draft, 1.0])}
    return update(weights, 1, "mimo", 2)


def sums(*checksums: str, **by_name: str) -> dict:
    return by_role(reply(*checksums, **by_name))


def watch(dtype: torch.dtype = torch.float32) -> WeightWatch:
    found = WeightWatch(dtype)
    found.begin(sums(), load(draft=1.0).draft)
    return found


def test_updates_that_went_well() -> None:
    found = watch()
    found.verify(sums("a2", shared="c2"), load(2.0))  # the draft's copy of the target's head follows it
    found.verify(sums("a3", "b3"), load(3.0, 3.0))
    found.verify(sums("a3", "b3"), load(3.0, 3.0))
    found.verify(sums("a3", "b4"), load(draft=4.0))


@pytest.mark.parametrize(
    ("now", "sent", "word"),
    [
        (sums("a2", "zero"), load(2.0), "not for the draft"),
        (sums("a2", "b2"), load(draft=2.0), "not for the target"),
        (sums("a2", "b"), load(2.0, 2.0), "draft was sent and did not arrive"),
        (sums("a", "b"), load(draft=2.0), "draft was sent and did not arrive"),
    ],
)
def test_updates_that_went_wrong(now: dict, sent, word: str) -> None:
    with pytest.raises(EngineDied, match=word):
        watch().verify(now, sent)


def test_a_target_that_stays_is_noticed_from_the_second_update_on() -> None:
    found = watch()
    found.verify(sums("a2"), load(2.0))
    with pytest.raises(EngineDied, match="target was sent"):
        found.verify(sums("a2"), load(3.0))


def test_a_target_that_follows_an_update_of_the_head_alone_may_be_that_of_the_checkpoint() -> None:
    watched = watch()
    watched.verify(sums(draft="b2"), load(draft=2.0))
    watched.verify(sums(draft="b2"), load(1.0, 2.0))


def test_changes_too_small_for_the_engine_are_none() -> None:
    found = watch(torch.bfloat16)
    found.verify(sums(), load(draft=1.0 + 1e-5))
    with pytest.raises(EngineDied):
        watch(torch.float32).verify(sums(), load(draft=1.0 + 1e-5))


def test_weights_lost_with_their_memory_are_noticed() -> None:
    found = watch()
    found.check_kept(sums())
    for lost in (sums("other"), sums(draft="zero")):
        with pytest.raises(EngineDied, match="memory"):
            found.check_kept(lost)


def test_a_folder_of_weights_is_a_whole_checkpoint(tmp_path: Path) -> None:
    """SGLang loads target and draft from it, whichever was sent."""
    policy, other = tiny_policy(seed=1), tiny_policy(seed=2)
    save_policy(policy, tmp_path / "model")
    asked: list[dict] = []

    class Backend:
        async def control(self, name: str, payload: dict) -> dict:
            asked.append(payload)
            return {"success": True}

    async def sent(load: WeightUpdate) -> None:
        await (await transfer.prepare(Backend(), load, flush=True))()  # type: ignore[arg-type]

    transfer, heads = DiskTransfer(tmp_path / "weights", tmp_path / "model"), []
    for version, weights in enumerate((other.weights(), other.weights(mtp=True), policy.weights())):
        asyncio.run(sent(update(weights, version, "mimo", 2)))
        loaded = load_policy(ModelConfig(path=asked[-1]["model_path"], device="cpu"), need_head=True)
        assert fingerprint(loaded.weights()) == fingerprint((policy if version == 2 else other).weights())
        heads.append(loaded)
    marks = [fingerprint(dict(head.mtp.named_parameters())) for head in (policy, other, other)]  # type: ignore[union-attr]
    assert [fingerprint(dict(head.mtp.named_parameters())) for head in heads] == marks  # type: ignore[union-attr]
    assert [payload["weight_version"] for payload in asked] == ["0", "1", "2"]
    assert len(list((tmp_path / "weights").iterdir())) == 2  # older ones are removed

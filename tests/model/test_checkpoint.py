import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from bebop.config.compose import job_config
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.attention import ATTENTION, CausalContext, PackedContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_backbone, load_policy, load_tokenizer, refuse_own_head, save_policy, stop_tokens
from bebop.model.layouts import LAYOUTS, join_experts, split_experts
from bebop.model.mtp import MTPHead
from bebop.model.parity import stock_attention
from bebop.model.skeleton import header
from tests.builders import bare_policy, letters
from tests.cases import slow_but
from tests.model.families import EXPERTS, FULL, made, slow

DECODER = [
    *(f"self_attn.{p}_proj.{kind}" for p in "qkv" for kind in ("weight", "bias")),
    "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight",
    "input_layernorm.weight", "post_attention_layernorm.weight",
]  # fmt: skip

# What SGLang 0.5.23 reads: MiMoMTP.map_model_name_to_mtp_param_name (mimo_mtp.py); Qwen3NextForCausalLM.load_weights
# with is_mtp (qwen3_next.py: "mtp.fc.weight", ...; what is left of "mtp" becomes "model"); and NextNEnabledConfig of
# deepseek_weight_loader.py ("model.layers.L": shared_head.norm, eh_proj, enorm, hnorm; the rest is the decoder).
ON_DISK = {
    "mimo": [
        *(f"model.mtp_layers.0.{n}.weight" for n in ("token_layernorm", "hidden_layernorm", "input_proj")),
        "model.mtp_layers.0.final_layernorm.weight", *(f"model.mtp_layers.0.{n}" for n in DECODER),
    ],
    "qwen3_next": [
        "mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight",
        *(f"mtp.layers.0.{n}" for n in DECODER),
    ],
    "deepseek": [
        *(f"model.layers.2.{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        *(f"model.layers.2.{n}" for n in DECODER),
    ],
}  # fmt: skip
PROJECT = {"mimo": "model.mtp_layers.0.input_proj", "qwen3_next": "mtp.fc", "deepseek": "model.layers.2.eh_proj"}


def random_policy(layout: str = "mimo", **settings: object) -> Policy:
    """A tiny policy of which no two weights are alike, norms included."""
    policy = bare_policy(**settings)  # type: ignore[arg-type]
    policy.layout = layout
    with torch.no_grad():
        for module in policy.modules():
            for parameter in module.parameters():
                parameter.add_(torch.rand_like(parameter))
    return policy


def load(folder: Path, **settings: object) -> Policy:
    return load_policy(ModelConfig(path=str(folder), device="cpu", **settings), need_head=True)  # type: ignore[arg-type]


def equal(a: Policy, b: Policy) -> bool:
    """Whether every weight is the same to the last bit."""
    first, second = a.weights(mtp=True), b.weights(mtp=True)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def rewrite(folder: Path, **changes: Tensor | None) -> None:
    """Change tensors of a checkpoint by name; None removes one."""
    state = load_file(folder / "model.safetensors") | changes
    save_file(
        {n: t for n, t in state.items() if t is not None}, folder / "model.safetensors", metadata={"format": "pt"}
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_bit_equal(layout: str, tmp_path: Path) -> None:
    policy = random_policy(layout)
    save_policy(policy, tmp_path)
    again = load(tmp_path)
    assert again.layout == layout and equal(policy, again)
    assert again.eos_token_ids == policy.eos_token_ids and again.tokenizer.encode("abz") == [0, 1, 0]
    name = PROJECT[layout] + ".weight"
    rewrite(tmp_path, **{name: load_file(tmp_path / "model.safetensors")[name].flip(1)})
    assert not equal(policy, load(tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_on_disk_are_those_that_sglang_reads(layout: str, tmp_path: Path) -> None:
    policy = random_policy(layout)
    save_policy(policy, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert names - {name for name, _ in policy.backbone.named_parameters()} == set(ON_DISK[layout])
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1 and config["num_hidden_layers"] == 2
    assert (config["architectures"] == ["MiMoForCausalLM"]) == (layout == "mimo")


def served(state: dict[str, Tensor], layout: str, policy: Policy, ids: Tensor, hidden: Tensor) -> Tensor:
    """What a server feeds its decoder layer, from the tensors on disk: ``forward`` of the three files named above."""
    names = {
        "mimo": ("model.mtp_layers.0.hidden_layernorm", "model.mtp_layers.0.token_layernorm"),
        "qwen3_next": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"),
        "deepseek": ("model.layers.2.enorm", "model.layers.2.hnorm"),
    }[layout]

    def norm(name: str) -> Tensor:
        x = hidden if "hidden" in name or "hnorm" in name else policy.embed(ids)
        scale = (x.pow(2).mean(-1, keepdim=True) + policy.backbone.config.rms_norm_eps).rsqrt()
        return x * scale * state[name + ".weight"]

    return torch.cat([norm(n) for n in names], -1) @ state[PROJECT[layout] + ".weight"].T


class Fed(torch.nn.Module):
    """Stands in for the decoder layer and keeps what it is fed."""

    def forward(self, x: Tensor, **_: object) -> Tensor:
        self.x = x
        return x


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_projection_reads_its_halves_in_the_layouts_order(layout: str, tmp_path: Path) -> None:
    policy = random_policy(layout)
    save_policy(policy, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    ids, positions, hidden = torch.arange(6)[None], torch.arange(1, 7)[None], torch.randn(1, 6, 32)
    head = policy.mtp
    assert head is not None
    head.layer = Fed()
    head(policy.embed(ids), hidden, positions, CausalContext())
    assert torch.allclose(served(state, layout, policy, ids, hidden), head.layer.x, atol=1e-5)
    broken = LAYOUTS[layout].hidden_first  # the halves as they are in memory are wrong on disk, for MiMo alone
    state[PROJECT[layout] + ".weight"] = head.project.weight
    assert torch.allclose(served(state, layout, policy, ids, hidden), head.layer.x, atol=1e-5) != broken


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_stock_transformers_reads_the_same_folder(layout: str, tmp_path: Path) -> None:
    policy = random_policy(layout)
    save_policy(policy, tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids, positions = torch.arange(9)[None], torch.arange(9)[None]
    own = policy.logits(policy.hidden(ids, positions, PackedContext(torch.tensor([9]))))
    assert torch.allclose(stock(input_ids=ids).logits, own, atol=1e-5, rtol=1e-5)


def test_bf16_on_disk(tmp_path: Path) -> None:
    policy = random_policy()
    save_policy(policy, tmp_path, dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again, own = load(tmp_path, dtype="bfloat16").weights(mtp=True), policy.weights(mtp=True)
    assert all(torch.equal(again[name], own[name].bfloat16()) for name in own)
    assert {p.dtype for p in own.values()} == {torch.float32}  # saving leaves the policy alone
    wide = load(tmp_path, dtype="float32").weights(mtp=True)
    assert all(torch.equal(wide[name], own[name].bfloat16().float()) for name in own)


def test_tied_embeddings_round_trip(tmp_path: Path) -> None:
    base = bare_policy()
    config = base.backbone.config
    config.tie_word_embeddings = True
    backbone = type(base.backbone)(config).eval()
    policy = Policy(backbone=backbone, tokenizer=base.tokenizer, mtp=MTPHead(backbone), layout="mimo")
    save_policy(policy, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    again = load(tmp_path)
    assert equal(policy, again)
    assert again.backbone.lm_head.weight is again.backbone.get_input_embeddings().weight
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(stock.lm_head.weight, policy.embed(torch.arange(12)))


def test_engines_that_go_by_the_config_take_no_head_that_it_denies(tmp_path: Path) -> None:
    config = ModelConfig(path=str(tmp_path), device="cpu")
    save_policy(bare_policy(), tmp_path)
    refuse_own_head(config, "SGLang")
    set_to("tie_word_embeddings", True)(tmp_path)
    with pytest.raises(UserError, match=r"tie_word_embeddings=true, .* which SGLang would leave out"):
        refuse_own_head(config, "SGLang")
    rewrite(tmp_path, **{"lm_head.weight": load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"] + 0})
    refuse_own_head(config, "SGLang")


def test_a_generic_tokenizer_is_taken_as_it_is(tmp_path: Path) -> None:
    policy = bare_policy()
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    save_policy(policy, tmp_path)
    again = load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert type(again) is PreTrainedTokenizerFast and len(again) == 12
    assert again.chat_template == policy.tokenizer.chat_template
    assert again.special_tokens_map == policy.tokenizer.special_tokens_map
    for text in ("abcabc", "a b<eos>k", "..."):
        assert again.encode(text) == policy.tokenizer.encode(text)
    # A family's own class is left to AutoTokenizer.
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    assert type(load_tokenizer(ModelConfig(path=str(tmp_path)))).__name__ == "Qwen2Tokenizer"


def no_weight(folder: Path) -> None:
    rewrite(folder, **{"model.mtp_layers.0.mlp.up_proj.weight": None})


def wrong_shape(folder: Path) -> None:
    rewrite(folder, **{"model.mtp_layers.0.final_layernorm.weight": torch.ones(31)})


def no_mtp(folder: Path) -> None:
    rewrite(folder, **dict.fromkeys(ON_DISK["mimo"]))


def no_backbone_weight(folder: Path) -> None:
    rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": None})


def wrong_backbone_shape(folder: Path) -> None:
    rewrite(folder, **{"model.layers.1.mlp.up_proj.weight": torch.ones(3, 32)})


def large_tokenizer(folder: Path) -> None:
    letters(20).save_pretrained(folder)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def corrupt_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:500])


def corrupt_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")


def corrupt_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2",')


def unknown_family(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-family"}')


def gap_in_tokenizer(folder: Path) -> None:
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"]["b"] = 12  # 12 tokens, one of which has no row
    (folder / "tokenizer.json").write_text(json.dumps(made))


def set_to(key: str, value: object, file: str = "config.json") -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        had = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps(had | {key: value}))

    return damage


def fewer_layers(folder: Path) -> None:
    set_to("num_hidden_layers", 1)(folder)
    set_to("layer_types", None)(folder)


WORDS = "give a whole number from 0 to 11"
TOKENS = [
    (set_to(key, value, file), rf"{file} has {key}={re.escape(repr(value))}: {WORDS}")
    for key, value, file in [
        ("eos_token_id", 1.0, "config.json"),
        ("eos_token_id", 1.0, "generation_config.json"),
        ("eos_token_id", "2", "generation_config.json"),
        ("eos_token_id", [1, "2"], "generation_config.json"),
        ("eos_token_id", [[1]], "generation_config.json"),
        ("eos_token_id", -1, "generation_config.json"),
        ("eos_token_id", True, "generation_config.json"),
        ("eos_token_id", 12, "generation_config.json"),
        ("eos_token_id", {"a": 1}, "generation_config.json"),
        ("pad_token_id", 12, "config.json"),
        ("pad_token_id", "0", "generation_config.json"),
        ("bos_token_id", [1], "config.json"),
    ]
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that can be loaded, which tests copy before they damage it."""
    folder: Path = tmp_path_factory.mktemp("sound")
    save_policy(bare_policy(), folder)
    load(folder)
    return folder


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (no_weight, "lacks model.mtp_layers.0.mlp.up_proj.weight"),
        (wrong_shape, r"final_norm.weight has shape \(31,\), the model needs \(32,\)"),
        (no_mtp, "no MTP weights.*model.init_mtp=true"),
        (no_backbone_weight, "1 missing weights.*model.layers.1.mlp.up_proj.weight"),
        (wrong_backbone_shape, "1 mismatched weights.*model.layers.1.mlp.up_proj.weight"),
        (large_tokenizer, "20 tokens, the model 12"),
        (no_weights, "cannot be loaded"),
        (no_config, "cannot be loaded"),
        (no_tokenizer, "has no tokenizer files"),
        (corrupt_weights, "cannot be loaded"),
        (corrupt_header, "cannot be loaded"),
        (corrupt_config, "cannot be loaded"),
        (unknown_family, "cannot be loaded"),
        (gap_in_tokenizer, "has 'b' as token 12, the model tokens 0 to 11"),
        (fewer_layers, r"num_hidden_layers=1, but there are weights of layer 1 \(model\.layers\.1\."),
        *TOKENS,
    ],
)
def test_a_damaged_folder_is_one_line(damage: object, words: str, sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    damage(folder)  # type: ignore[operator]
    with pytest.raises(UserError, match=words) as error:
        load(folder)
    assert "\n" not in str(error.value) and len(str(error.value)) < 450


def test_tokens_that_end_an_answer(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    config = ModelConfig(path=str(folder), device="cpu")
    own = stop_tokens(config)
    cases = [(None, own), (4, {4}), ([9, 4], {4, 9}), ([], ())]
    for value, more in cases:
        set_to("eos_token_id", value, "generation_config.json")(folder)
        assert stop_tokens(config) == tuple(sorted({*own, *more})) == load_policy(config).eos_token_ids
    for key in ("pad_token_id", "bos_token_id"):
        set_to(key, -1, "generation_config.json")(folder)  # as old checkpoints have it
    load_policy(config)


def test_layers_behind_the_backbones_may_be_mtp_layers(tmp_path: Path) -> None:
    policy = random_policy("deepseek")
    save_policy(policy, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    second = {n.replace("layers.2.", "layers.3."): t.clone() for n, t in state.items() if "layers.2." in n}
    rewrite(tmp_path, **second)
    assert equal(policy, load(tmp_path))
    rewrite(tmp_path, **{n: None for n in second if ".mlp." not in n})
    with pytest.raises(UserError, match="weights of layer 3"):
        load(tmp_path)


def test_what_generate_would_refuse_is_written_all_the_same(sound: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sound, tmp_path / "model")
    set_to("do_sample", False, "generation_config.json")(folder)
    set_to("temperature", 0.5, "generation_config.json")(folder)
    save_policy(load(folder), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5


@pytest.mark.parametrize(
    ("stored", "given", "held"),
    slow_but(
        [("bfloat16", "auto", "bfloat16"), ("float32", "bfloat16", "bfloat16")],
        [
            ("float32", "auto", "float32"),
            ("bfloat16", "auto", "bfloat16"),
            ("float16", "auto", "float32"),
            ("float32", "bfloat16", "bfloat16"),
            ("bfloat16", "float32", "float32"),
        ],
        several=True,
    ),
)
def test_a_folder_keeps_its_type_unless_another_is_asked_for(
    stored: str, given: str, held: str, sound: Path, tmp_path: Path
) -> None:
    folder, dtype = shutil.copytree(sound, tmp_path / "model"), getattr(torch, stored)
    set_to("dtype", "float32")(folder)  # what it says of itself does not count
    rewrite(folder, **{n: t.to(dtype) for n, t in load_file(folder / "model.safetensors").items()})
    for choice in ([], ["model=folder"]):  # one rule, whichever way the folder is given
        config = job_config([*choice, f"model.path={folder}", f"model.dtype={given}"])
        assert config.model.dtype == held
    policy = load(folder, dtype=given)
    assert {t.dtype for t in policy.weights(mtp=True).values()} == {getattr(torch, held)}
    policy.backbone.float()  # a trainer's masters
    save_policy(policy, tmp_path / "out", getattr(torch, held))
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {getattr(torch, held)}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == held


MIXTURE = {
    **EXPERTS, "sliding_window": None, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "rotary_dim": 8,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
CAME: list[Any] = [
    ("minimax_m2", MIXTURE),  # experts stacked and renamed, a router's bias that is a buffer and renamed
    slow("apertus", {}),  # dense, with buffers
    slow("glm4_moe", MIXTURE),
    slow("dots1", {**MIXTURE, **FULL}),
    *(slow(kind, MIXTURE) for kind in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "phimoe")),
    *(slow(kind, MIXTURE) for kind in ("ernie4_5_moe", "hunyuan_v1_moe", "granitemoe")),
]


@pytest.mark.parametrize(("kind", "settings"), CAME)
@torch.no_grad()
def test_a_folder_is_written_like_the_one_it_came_from(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Names, pieces, types (norms and biases in float32 among weights in bfloat16), buffers; and the same logits."""
    source = made(kind, torch.bfloat16, **settings)
    source.backbone.save_pretrained(tmp_path)
    source.tokenizer.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, **{n: t.float() + 0.3 * torch.randn(t.shape) for n, t in state.items() if t.dim() < 2})
    policy = load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    policy.backbone.float()  # as a trainer holds it
    for parameter in policy.backbone.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter)).copy_(parameter.bfloat16())
    save_policy(policy, tmp_path / "out", torch.bfloat16)
    assert dict(header(tmp_path / "out")) == dict(header(tmp_path))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(9)[None]
    with stock_attention(policy.backbone):
        assert torch.equal(stock(input_ids=ids).logits, policy.backbone(input_ids=ids).logits)
    load_policy(ModelConfig(path=str(tmp_path / "out"), device="cpu"))


def test_missing_folder_and_device_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-folder"):
        ModelConfig(path=str(tmp_path / "no-such-folder"))
    save_policy(bare_policy(), tmp_path)
    for device in ("tpu", "cuda:99", "cuda:x", ""):
        with pytest.raises(UserError, match=r"model\.device"):
            load_policy(ModelConfig(path=str(tmp_path), device=device))


def test_a_fresh_head_is_made_only_where_there_is_none(tmp_path: Path) -> None:
    policy = random_policy()
    save_policy(policy, tmp_path)
    assert equal(policy, load(tmp_path, init_mtp=True))
    no_mtp(tmp_path)
    fresh = load(tmp_path, init_mtp=True)
    assert fresh.mtp is not None and fresh.layout == "mimo"
    last = fresh.backbone.get_decoder().layers[-1].state_dict()
    assert all(torch.equal(t, last[name]) for name, t in fresh.mtp.layer.state_dict().items())
    assert load_policy(ModelConfig(path=str(tmp_path), device="cpu")).mtp is None
    assert load_backbone(ModelConfig(path=str(tmp_path))).lm_head.weight.shape == (12, 32)


# ---- Experts, stacked in memory and one by one on disk

HYBRID = {
    "vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None,
}  # fmt: skip


def test_experts_are_split_and_joined() -> None:
    state = {
        "l.mlp.experts.gate_up_proj": torch.arange(2 * 6 * 4.0).view(2, 6, 4),
        "l.mlp.experts.down_proj": torch.arange(2 * 4 * 3.0).view(2, 4, 3),
        "l.mlp.gate.weight": torch.ones(2, 4),
    }
    apart = split_experts(state)
    assert len(apart) == 2 * 3 + 1
    assert torch.equal(apart["l.mlp.experts.1.gate_proj.weight"], state["l.mlp.experts.gate_up_proj"][1, :3])
    assert torch.equal(apart["l.mlp.experts.1.up_proj.weight"], state["l.mlp.experts.gate_up_proj"][1, 3:])
    again = join_experts(apart)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    assert join_experts(state) == state and split_experts({"a": state["l.mlp.gate.weight"]}).keys() == {"a"}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_mixture_of_experts_is_read_back(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **HYBRID)
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        for parameter in head.parameters():  # experts begin as what the memory held
            parameter.normal_()
    policy = Policy(backbone=backbone, tokenizer=letters(12), mtp=head, layout="qwen3_next")
    save_policy(policy, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert "mtp.layers.0.mlp.experts.2.down_proj.weight" in opened.keys()
    again = load_policy(ModelConfig(path=str(tmp_path), device="cpu"), need_head=True)
    before, after = policy.weights(mtp=True), again.weights(mtp=True)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    # A folder that has them stacked, as some of these have, keeps them so: the backbone's and the head's.
    (tmp_path / "model.safetensors").rename(tmp_path / "apart")
    stacked = join_experts(load_file(tmp_path / "apart"))
    save_file(stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_policy(load_policy(ModelConfig(path=str(tmp_path), device="cpu"), need_head=True), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stacked.keys()

"""MTP heads of the families' own layers, and backbones that only transformers' attention can run."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from bebop.config.job import ModelConfig
from bebop.model.attention import CausalContext, PackedContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.mtp import chain
from bebop.runtime.preflight import check_model
from bebop.trainer.packing import Row, pack
from bebop.trainer.scorer import Scorer
from tests.builders import letters
from tests.model.families import EXPERTS, SIZES, refused
from tests.tiny_families import FAMILIES, QWEN, read_mtp, write_family
from tests.trainer.builders import completion

STOCK = [name for name in FAMILIES if name.startswith(("qwen3", "deepseek"))]  # what bebop's attention does not have
STEPS, LENGTH = 3, 12
ANCHORS = (0, 1, 5)


def loaded(folder: Path, dtype: str = "float32", **settings: Any) -> Policy:
    return load_policy(ModelConfig(path=str(folder), device="cpu", dtype=dtype, **settings), any_backbone=True)


def stock(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


def text(rows: int, length: int, vocab: int) -> Tensor:
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(1))


def written_out(folder: Path, name: str, ids: Tensor, anchor: int) -> Iterator[Tensor]:
    """Hidden states [d] of the steps at one anchor, by transformers' layer over one explicit causal sequence.

    Its entries are the step-1 inputs of anchors 0..t, then the chain's own inputs of steps 2, 3, ...
    """
    model, family = stock(folder), FAMILIES[name]
    modules = read_mtp(folder, name, model)
    hidden = model.model(ids[None]).last_hidden_state[0]
    embeddings = model.get_input_embeddings()(ids)
    tokens, states = [*embeddings[1 : anchor + 2]], [*hidden[: anchor + 1]]
    if family.parts != QWEN:  # served so: nothing stands before the first token
        tokens[0] = torch.zeros_like(tokens[0])
    for step in range(1, STEPS + 1):
        pair = (modules["token_norm"](torch.stack(tokens)), modules["hidden_norm"](torch.stack(states)))
        x = modules["project"](torch.cat(pair[::-1] if family.hidden_first else pair, -1))[None]
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((x.shape[1],) * 2, -1e30).triu(1)[None, None]
        rotary = model.model.rotary_emb(x, places)
        out = modules["layer"](x, attention_mask=mask, position_ids=places, position_embeddings=rotary)
        yield (last := modules["final_norm"](out)[0, -1])
        tokens.append(embeddings[anchor + step + 1])
        states.append(last)


@pytest.mark.slow  # a family each: its import and its passes
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_chain_is_the_familys_layer_over_its_sequence_written_out(name: str, tmp_path: Path) -> None:
    policy = loaded(write_family(tmp_path, name))
    assert policy.mtp is not None and policy.stock is (name in STOCK)
    ids = text(2, LENGTH, policy.vocab_size)
    hidden = policy.hidden(ids, torch.arange(LENGTH).expand_as(ids), CausalContext())
    every = list(chain(policy.mtp, policy.embed(ids), hidden, STEPS))
    some = list(chain(policy.mtp, policy.embed(ids), hidden, STEPS, torch.tensor([ANCHORS] * 2)))
    for row in range(2):
        for place, anchor in enumerate(ANCHORS):
            for step, wanted in enumerate(written_out(tmp_path, name, ids[row], anchor)):
                torch.testing.assert_close(every[step][row, anchor], wanted, rtol=1e-4, atol=1e-4)
                torch.testing.assert_close(some[step][row, place], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # a family each
@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_written_as_it_was_read(name: str, tmp_path: Path) -> None:
    write_family(tmp_path / "in", name, dtype=torch.bfloat16)
    save_policy(loaded(tmp_path / "in", "bfloat16"), tmp_path / "out")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("in", "out"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key


def put_into_a_model_with_images(folder: Path, out: Path) -> None:
    """Write the language model of a Qwen3.5 folder as such models are published: below one that sees images."""
    text = json.loads((folder / "config.json").read_text())
    vision = {
        "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    kind = text["model_type"].removesuffix("_text")
    whole = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(kind, text_config=text, vision_config=vision), attn_implementation="eager"
    )
    whole.save_pretrained(out)
    tensors, language = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    for name, tensor in language.items():
        tensors[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = tensor
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "preprocessor_config.json").write_text("{}")
    for file in folder.glob("token*"):
        shutil.copy(file, out)


@pytest.mark.slow
def test_the_language_model_of_one_that_sees_images_is_written_back_with_all_around_it(tmp_path: Path) -> None:
    put_into_a_model_with_images(write_family(tmp_path / "text", "qwen3_5_moe"), tmp_path / "in")
    config = ModelConfig(path=str(tmp_path / "in"), device="cpu")
    check_model(config, any_backbone=True)
    policy = loaded(tmp_path / "in")
    assert policy.stock and policy.mtp is not None
    save_policy(policy, tmp_path / "out", source=tmp_path / "in")
    before, after = (load_file(tmp_path / place / "model.safetensors") for place in ("in", "out"))
    assert any("visual" in name for name in before) and before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    settings = [json.loads((tmp_path / place / "config.json").read_text()) for place in ("in", "out")]
    assert settings[1].pop("text_config") == {**settings[0].pop("text_config"), "num_nextn_predict_layers": 1}
    assert settings[0] == settings[1] and (tmp_path / "out" / "preprocessor_config.json").is_file()


@pytest.mark.slow  # a family each
@pytest.mark.parametrize("name", STOCK)
def test_the_trainer_scores_rows_of_unequal_lengths_as_transformers_does(name: str, tmp_path: Path) -> None:
    """Recurrent states and convolutions must not run from one row into the next, nor into padding."""
    policy, model = loaded(write_family(tmp_path, name)), stock(tmp_path)
    prompts, answers = [(5, 6, 7), (8, 9)], [(3, 4, 5, 6, 7, 8), (2, 1)]
    rows = [
        Row(prompt=prompt, completion=completion(answer), advantage=1.0, weight=1.0)
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    (packed,) = pack(rows, 64)
    policy.backbone.requires_grad_(True)
    ours, _ = Scorer(policy, 0.8)(packed)
    wanted = []
    for number in packed.rows.tolist():
        ids = torch.tensor([[*prompts[number], *answers[number]]])
        logits = model(ids).logits[0, len(prompts[number]) - 1 : -1] / 0.8
        wanted.append(logits.log_softmax(-1).gather(1, torch.tensor(answers[number])[:, None])[:, 0])
    torch.testing.assert_close(ours, torch.cat(wanted), rtol=1e-4, atol=1e-4)
    ours.sum().backward()
    torch.cat(wanted).sum().backward()
    theirs = dict(model.named_parameters())
    for key, parameter in policy.backbone.named_parameters():
        assert parameter.grad is not None, key
        torch.testing.assert_close(parameter.grad, theirs[key].grad, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_fresh_head_of_a_hybrid_starts_from_its_last_full_layer_and_has_the_familys_layout(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3_next", layer_types=["full_attention", "linear_attention"])
    kept = {k: v for k, v in load_file(folder / "model.safetensors").items() if not k.startswith("mtp.")}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    policy = loaded(folder, init_mtp=True)
    assert policy.layout == "qwen3_next" and policy.mtp is not None
    first = policy.backbone.get_decoder().layers[0].state_dict()
    assert all(torch.equal(tensor, first[key]) for key, tensor in policy.mtp.layer.state_dict().items())


@pytest.mark.slow  # families more
@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None}, None),
        ("gemma3_text", {}, None),
        ("mistral", {}, None),
        ("gemma2", {"final_logit_softcapping": 5.0}, "its language-model head is not all of its logits"),
        ("gpt_oss", EXPERTS, "its MTP head cannot run: the model's attention asks for s_aux"),
        ("falcon_h1", {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8}, "no layer of full attention"),
    ],
)
def test_windows_and_caps_run_on_transformers_attention_and_the_rest_is_one_line(
    kind: str, settings: dict[str, Any], word: str | None, tmp_path: Path
) -> None:
    windows = {} if kind in ("mistral", "falcon_h1") else {"layer_types": ["full_attention", "sliding_attention"]}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, "sliding_window": 4, **windows, **settings})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    letters(12).save_pretrained(tmp_path)
    if word is not None:
        assert word in refused(lambda: loaded(tmp_path, init_mtp=True))
        return
    policy, model = loaded(tmp_path, init_mtp=True), stock(tmp_path)
    assert policy.stock and policy.mtp is not None
    ids = text(2, LENGTH, 12)
    ours = policy.logits(policy.hidden(ids, ids, CausalContext()))  # positions count from 0, whatever is said
    torch.testing.assert_close(ours, model(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_another_embedding_in_the_mtp_layer_is_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.embed_tokens.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.2.embed_tokens.weight is another table" in refused(lambda: loaded(folder))


@pytest.mark.slow
def test_tables_of_the_mtp_layer_are_those_of_the_weights_that_are_saved(tmp_path: Path) -> None:
    """A policy that is split over processes holds parts of them alone."""
    policy = loaded(write_family(tmp_path, "glm4_moe"))
    save_policy(policy, tmp_path / "out", weights={name: t + 1 for name, t in policy.weights().items()})
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for own, shared in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(tensors[f"model.layers.2.{own}.weight"], tensors[f"{shared}.weight"])


@pytest.mark.slow
def test_packed_rows_of_a_hybrid_come_back_in_their_order(tmp_path: Path) -> None:
    policy = loaded(write_family(tmp_path, "qwen3_5"))
    lengths = [4, 1, 7]
    rows = [text(1, length, policy.vocab_size) + number for number, length in enumerate(lengths)]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    with torch.no_grad():
        packed = policy.hidden(torch.cat(rows, 1), places, PackedContext(torch.tensor(lengths)))
        alone = [policy.hidden(row, torch.arange(row.shape[1])[None], CausalContext()) for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=1e-4, atol=1e-4)

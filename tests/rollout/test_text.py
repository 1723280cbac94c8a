"""What rewards see of a completion: from the real engine, SGLang's outputs, verl's own decoding, by every verifier."""

import json
import string
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from bebop.config.job import DecodingConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.rollout.detokenize import CompletionText, completed_at
from bebop.rollout.engine import Request, nothing
from bebop.rollout.served_engine import appended
from bebop.rollout.sglang.outputs import output_chunk
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.procedural import ProceduralItems
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Completion, Prompt, SamplingParams
from bebop.verl_job.reward import compute_score
from tests.builders import bare_policy

CHARACTERS = sorted({*string.printable} - {"\r", "\x0b", "\x0c"})
SPECIAL = ("<|im_end|>", "<|endoftext|>", "<|eot|>", "<think>", "</think>", "<answer>", "</answer>")


def characters() -> PreTrainedTokenizerFast:
    """One character a token, with the special tokens of a chat model."""
    vocab = {c: i for i, c in enumerate(CHARACTERS)}
    made = Tokenizer(models.WordLevel(vocab, unk_token=" "))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")


TOKENIZER = characters()
STOP, PAD, EOT = (TOKENIZER.convert_tokens_to_ids(name) for name in SPECIAL[:3])
SAMPLING = SamplingParams(stop_token_ids=(STOP,))


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def policy() -> Policy:
    """A model that ends every completion at once, whatever it has written."""
    made = bare_policy(len(TOKENIZER))
    made.tokenizer = TOKENIZER
    head = nn.Linear(32, len(TOKENIZER))
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()[STOP] = 50.0
    made.backbone.lm_head = head
    return made


def embedded(policy: Policy, said: str, reason: str = "stop") -> Completion:
    """The engine's own record of a completion of which ``said`` is written; ``length`` leaves no room for its end."""
    ids = np.array(ids_of(said), dtype=np.int64)
    partial = Completion(token_ids=ids, logprobs=np.zeros(len(ids), np.float32), versions=np.zeros_like(ids))
    stops = (STOP,) if reason == "stop" else ()
    params = SamplingParams(stop_token_ids=stops, max_new_tokens=len(ids) + 1)
    engine = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=1, max_length=128)
    (answer,) = generate(engine, [Request(id=0, token_ids=(1, 2), params=params, partial=partial)])
    assert (answer.finish_reason, answer.token_ids.tolist()) == (reason, [*ids, STOP])
    assert len(answer.logprobs) == len(answer.versions) == len(ids) + 1  # the end is trained on
    return answer


def served(said: str) -> Completion:
    """The same from what SGLang replies, in two pieces."""
    answer = nothing()
    ids = [*ids_of(said), STOP]
    for piece, reason in ((ids[:2], "abort"), (ids[2:], "stop")):
        meta: dict[str, Any] = {"finish_reason": {"type": reason}, "weight_version": "0"}
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in piece]
        decoded = output_chunk({"output_ids": piece, "meta_info": meta}, SAMPLING, 0)
        answer = appended(answer, decoded, SAMPLING, CompletionText(TOKENIZER), recomputed=False)
    assert answer.token_ids.tolist() == ids
    return answer


ANSWERS = [  # text, the gold answer: every form in which math-verify finds an answer without a box
    ("1/2", "1/2"),
    ("So it is 3/4", "3/4"),
    ("It takes 5 km", "5"),
    ("The answer is 12.", "12"),
    ("The answer is $\\frac{1}{2}$", "1/2"),
    ("hence \\boxed{\\frac{3}{7}}", "3/7"),
    ("<answer>1/2</answer>", "1/2"),
    ("it weighs 2.5 kg", "2.5"),
]


@pytest.mark.parametrize(("said", "gold"), ANSWERS)
def test_the_end_of_a_completion_reaches_no_verifier(policy: Policy, said: str, gold: str) -> None:
    prompt = Prompt(index=0, task="t", text="", token_ids=(1,), item={"answer": gold})
    math = make_reward(TaskConfig(reward="math_verify"))
    for answer in (embedded(policy, said), served(said)):
        assert answer.text == said and checked(math, answer.text, prompt) == 1.0


def test_a_user_function_and_a_data_set_see_the_same_text(policy: Policy, tmp_path: Any) -> None:
    (tmp_path / "same.py").write_text("def same(text, item): return float(text == item['answer'])")
    prompt = Prompt(index=0, task="t", text="", token_ids=(1,), item={"answer": "it is 1/2 km."})
    same = make_reward(TaskConfig(reward=f"{tmp_path}/same.py:same"))
    assert checked(same, embedded(policy, "it is 1/2 km.").text, prompt) == 1.0
    item = ProceduralItems("chain_sum", {}, 0).item(0)
    asked = Prompt(index=0, task="t", text="", token_ids=(1,), item=item)
    gym = make_reward(TaskConfig(name="chain_sum"))
    said = f"<think>so</think><answer>{item['answer']}</answer>"
    for answer in (embedded(policy, said), served(said)):
        assert answer.text == said and checked(gym, answer.text, asked) == 1.0


def test_verl_decodes_to_the_same_text_and_scores_it_alike(policy: Policy) -> None:
    """verl hands a reward what its managers decode, without special tokens anywhere."""
    item = ProceduralItems("chain_sum", {}, 0).item(0)
    for said in [said for said, _ in ANSWERS if "<" not in said]:
        answer = embedded(policy, said)
        assert TOKENIZER.decode(answer.token_ids.tolist(), skip_special_tokens=True) == answer.text
    extra = {"item": json.dumps(item), "index": 0}
    assert compute_score("chain_sum", f"<answer>{item['answer']}</answer>", item["answer"], extra) == 1.0


def text_of(ids: Sequence[int], reason: str = "stop", **sampling: Any) -> str:
    return CompletionText(TOKENIZER)(ids, SamplingParams(stop_token_ids=(STOP,), **sampling), reason)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("1/2<|im_end|>", "1/2"),
        ("1/2<|im_end|><|endoftext|>", "1/2"),
        ("1/2<|eot|><|im_end|>", "1/2"),  # special, and right before the end
        ("<think>a</think>1/2<|im_end|>", "<think>a</think>1/2"),
        ("<answer>5</answer><|im_end|>", "<answer>5</answer>"),  # a special token that closes another one
        ("<think>a<|im_end|>", "<think>a"),
        ("1<|im_end|>2<|im_end|>", "1<|im_end|>2"),  # in the middle: a turn that the completion made up
        ("1 \n<|im_end|>", "1 \n"),
        ("<|im_end|>", ""),
    ],
)
def test_what_ended_a_completion_is_cut_and_nothing_else(written: str, text: str) -> None:
    assert text_of(ids_of(written)) == text


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_a_completion_that_did_not_end_keeps_every_token(policy: Policy, reason: str) -> None:
    assert text_of(ids_of("1/2<think>"), reason) == "1/2<think>"
    assert text_of(ids_of("1/2<|im_end|>"), reason) == "1/2<|im_end|>"
    if reason == "length":
        assert embedded(policy, "1/2", "length").text == "1/2<|im_end|>"


@pytest.mark.parametrize("said", ["it is 5 .", "so , no", "do n't", "he 's here !"])
def test_a_tokenizer_that_cleans_up_spaces_changes_nothing(said: str) -> None:
    cleaning = characters()
    cleaning.clean_up_tokenization_spaces = True
    ids = ids_of(said)
    assert cleaning.decode(ids) != said
    assert CompletionText(cleaning)([*ids, STOP], SAMPLING, "stop") == said
    assert completed_at(cleaning, ids_of(f"{said} more"), (said,)) == len(ids)


def test_a_stop_token_that_is_no_special_one_is_cut_too() -> None:
    params = SamplingParams(stop_token_ids=tuple(ids_of(".")))
    assert CompletionText(TOKENIZER)(ids_of("a. b."), params, "stop") == "a. b"


def test_a_stop_string_stays_and_ends_the_text() -> None:
    tokenizer = characters()
    tokenizer.add_tokens(["er> and"])
    ids = list(tokenizer("<answ", add_special_tokens=False)["input_ids"])
    ids = [*ids_of("= 5</answ"), tokenizer.convert_tokens_to_ids("er> and")]
    params = SamplingParams(stop=("nowhere", "</answer>"))
    assert CompletionText(tokenizer)(ids, params, "stop") == "= 5</answer>"
    assert CompletionText(tokenizer)(ids, params, "length") == "= 5</answer> and"
    # Named as a text, it is a stop token all the same.
    assert CompletionText(tokenizer)(ids_of("1/2<|im_end|>"), SamplingParams(stop=("<|im_end|>",)), "stop") == "1/2"

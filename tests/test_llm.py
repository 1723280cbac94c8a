"""Generation from Python: prompts of every kind, seeds, ends, and mistakes in one line each.

That completions follow the target's distribution is tested in ``tests/rollout/test_exactness.py``.
"""

import math
import subprocess
import sys
from typing import Any

import pytest
import torch

import bebop
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.llm import LLM
from bebop.trajectory import SamplingParams
from tests.builders import bare_policy

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}b{% endif %}"


@pytest.fixture(scope="module")
def llm() -> LLM:
    """In float64, so that rounding in batches of other sizes cannot change a token."""
    policy = bare_policy(dtype=torch.float64)
    policy.tokenizer.chat_template = TEMPLATE
    return LLM(policy, draft_tokens=2, slots=3, max_length=32)


def test_a_text_its_tokens_and_messages_are_the_same_prompt(llm: LLM) -> None:
    message = {"role": "user", "content": "acd"}
    params = SamplingParams(max_new_tokens=12)
    results = [llm.generate(prompt, params) for prompt in ("acdb", (0, 2, 3, 1), [0, 2, 3, 1], [message], [[message]])]
    assert all(one == results[0] and len(one) == 1 for one in results)
    [output] = results[0]
    assert (output.prompt, output.prompt_token_ids) == ("acdb", (0, 2, 3, 1))
    assert len(output.token_ids) == len(output.logprobs) <= 12 and all(p < 0 for p in output.logprobs)
    assert output.text == "".join(chr(97 + token) for token in output.token_ids if token != 11)
    assert 1 <= output.accept_length <= 3


def test_prompts_differ_by_their_place_and_calls_by_their_seed(llm: LLM) -> None:
    params = SamplingParams(max_new_tokens=12)
    first = llm.generate(["ab"] * 5, params)
    assert len({one.token_ids for one in first}) == 5
    assert llm.generate(["ab"] * 5, params) == first
    other = llm.generate(["ab"] * 5, SamplingParams(max_new_tokens=12, seed=1))
    assert not {one.token_ids for one in other} & {one.token_ids for one in first}
    assert llm.generate([(0, 1), "ab"], params) == first[:2]


def test_each_prompt_may_have_parameters_of_its_own_and_ends_in_its_way(llm: LLM) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 8}
    [plain] = llm.generate("ka", SamplingParams(**greedy))  # type: ignore[arg-type]
    assert plain.finish_reason == "length" and set(plain.logprobs) == {0.0}
    third = plain.token_ids[2]
    by_token, by_text = llm.generate(
        ["ka", "ka"],
        [SamplingParams(**greedy, stop_token_ids=(third,)), SamplingParams(**greedy, stop=(plain.text[2],))],  # type: ignore[arg-type]
    )
    end = plain.token_ids.index(third) + 1
    for one in (by_token, by_text):
        assert one.token_ids == plain.token_ids[:end] and one.finish_reason == "stop"
    assert llm.generate([]) == []


def test_without_drafts_each_cycle_has_a_token(llm: LLM) -> None:
    plain = LLM(llm.policy, decoding="autoregressive", slots=2, max_length=32)
    assert [one.accept_length for one in plain.generate(["ab", "cd"], SamplingParams(max_new_tokens=4))] == [1.0, 1.0]


@pytest.mark.parametrize(("model", "added"), [("smollm2", True), ("tiny", False)])
def test_smollm2_gets_its_trained_head(llm: LLM, model: str, added: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[ModelConfig] = []
    monkeypatch.setattr(bebop.llm, "load_policy", lambda config, **needs: given.append(config) or llm.policy)
    LLM(model, slots=1, max_length=32)
    assert [one.init_mtp for one in given] == [added]


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ("", None, "an empty prompt cannot be continued"),
        ([], [SamplingParams()], "params has 1 entries for 0 prompts"),
        (["ab", []], None, r"prompt 1 is '\[\]': give a text, token ids, or messages with role and content"),
        (["ab", None], None, "prompt 1 is 'None'"),
        ([[0, 1.5]], None, "prompt 0 is"),
        ([[{"role": "user"}]], None, "prompt 0 is"),
        ([[0], [0, 99]], None, "a prompt holds token 99: the model has tokens 0 to 11"),
        ("ab", SamplingParams(max_new_tokens=99), "exceeds max_length=32"),
        ("ab", SamplingParams(temperature=-1.0), "sampling.temperature=-1.0 is not possible: give 0"),
        ("ab", SamplingParams(temperature="hot"), "sampling.temperature='hot' is not possible"),  # type: ignore[arg-type]
        ("ab", SamplingParams(top_p=math.nan), "sampling.top_p=nan"),
        ("ab", SamplingParams(max_new_tokens=0), "sampling.max_new_tokens=0"),
        ("ab", SamplingParams(seed=-1), "sampling.seed=-1"),
        ("ab", {"temperature": 1}, "give bebop.SamplingParams"),
        (["ab", "c"], [SamplingParams()], "params has 1 entries for 2 prompts: give one, or one for each"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(llm: LLM, prompts: Any, params: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        llm.generate(prompts, params or SamplingParams(max_new_tokens=4))
    assert "\n" not in str(error.value) and not llm.engine.unfinished


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "nowhere"}, "model.path='nowhere' is not possible: give tiny, smollm2 or a folder"),
        ({"decoding": "medusa"}, "decoding='medusa' is not possible: choose one of autoregressive"),
        ({"draft_tokens": 99}, "decoding.draft_tokens=99 is not possible"),
        ({"draft_tokens": "many"}, "decoding.draft_tokens='many'"),
        ({"options": {"x": 1}}, "has no options"),
        ({"dtype": "int4"}, "model.dtype='int4'"),
        ({"device": "tpu"}, "model.device='tpu'"),
        ({"slots": 0}, "slots=0 is not possible: give 1 or more"),
        ({"max_length": 1.5}, "max_length=1.5"),
    ],
)
def test_a_setting_that_is_not_possible_is_one_line(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        LLM(**settings)
    assert "\n" not in str(error.value)


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import bebop, sys; print(sorted({'torch', 'ray', 'hydra', 'numpy'} & {*sys.modules}), bebop.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"[] {bebop.__all__}\n"
    assert {*bebop.__all__} <= {*dir(bebop)} and bebop.LLM is LLM and bebop.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="module 'bebop' has no attribute 'LMM'"):
        bebop.LMM  # type: ignore[attr-defined]  # noqa: B018

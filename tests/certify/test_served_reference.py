"""A server's prefill as the reference: rows as they are, rows of the likeliest tokens, and what these do not decide."""

from typing import Any

import pytest
import torch

from bebop.certify.answers import Answer
from bebop.certify.calls import Server
from bebop.certify.declared import candidates, find_mode
from bebop.certify.model_reference import processed
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.served_reference import ServerReference, make
from bebop.certify.served_reference import processed as of_the_likeliest
from bebop.certify.sglang_server import SglangEngine
from bebop.config.compose import certify_config
from bebop.errors import UserError
from bebop.trajectory import SamplingParams
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.certify.asking import BOTH, Engine, V, asked, engine, silent
from tests.certify.local_server import LocalServer, running


def rows(local: LocalServer, answer: Answer) -> torch.Tensor:
    """Log-probs [T + 1, V] of the row before the answer and each of its own."""
    ids = [*answer.prompt, *answer.token_ids.tolist()]
    return local.rows(ids)[len(answer.prompt) - 2 : -1]


TRUNCATED = {"temperature": 0.5, "top_k": 3, "top_p": 0.8}


@BOTH
@pytest.mark.parametrize("params", slow_but([TRUNCATED], [{}, {"temperature": 2.0}, TRUNCATED]))
def test_the_whole_rows_of_a_small_vocabulary(
    kind: type[Engine], params: dict[str, Any], local: LocalServer, opened: list[Server]
) -> None:
    found = engine(kind, local, opened)
    answers = found.sample(asked(4, **params), silent)
    claim = SamplingParams(**params)
    block = ServerReference(found, V).block(answers, claim)
    assert block.ids is None and len(block) == sum(len(answer.token_ids) for answer in answers)
    start = 0
    for answer in answers:
        wanted = processed(rows(local, answer), claim)
        own = slice(start, start + len(answer.token_ids))
        torch.testing.assert_close(block.probs[own], wanted[1:])
        torch.testing.assert_close(block.before[own], wanted[:-1])  # type: ignore[index]
        start = own.stop
    assert block.logprobs.isfinite().all() and (block.logprobs - block.reported).abs().max() < 1e-5  # type: ignore[operator]
    temperature = params.get("temperature", 1.0)
    assert "processed" in find_mode(block.reported, candidates(block, temperature)).same
    assert block.twin is not None and (block.twin >= 0).any()


DECIDED = [{}, {"temperature": 0.5, "top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 0.2}]


@pytest.mark.slow
@pytest.mark.parametrize("params", slow_but(DECIDED[:3], DECIDED))
def test_the_likeliest_tokens_of_a_larger_one(params: dict[str, Any], opened: list[Server]) -> None:
    """Five or eight of twelve and one column for all others say the same as all twelve, wherever they decide it."""
    top = 8 if params else 5
    with running(LocalServer(tiny_policy(V, sharp=40.0 if params.get("temperature") == 0.2 else 12.0))) as local:
        found = engine(SglangEngine, local, opened)
        answers, claim = found.sample(asked(4, **params), silent), SamplingParams(**params)
        whole = ServerReference(found, V).block(answers, claim)
        few = ServerReference(found, V)
        few.top = top
        block = few.block(answers, claim)
    assert block.ids is not None and block.probs.shape == (len(whole), top + 1) and (block.ids[:, -1] == -1).all()
    torch.testing.assert_close(block.logprobs, whole.logprobs, rtol=0, atol=2e-4)
    likely = block.ids[:, :-1]
    torch.testing.assert_close(block.probs[:, :-1], whole.probs.gather(1, likely), rtol=0, atol=1e-4)
    torch.testing.assert_close(block.probs.sum(1), torch.ones(len(block), dtype=torch.float64))
    assert block.before is not None and whole.before is not None
    torch.testing.assert_close(block.before.sum(1), torch.ones(len(block), dtype=torch.float64))
    named = block.before[:, :-1] > 0
    torch.testing.assert_close(block.before[:, :-1][named], whole.before.gather(1, likely)[named], rtol=0, atol=1e-4)
    here = block.ids.gather(1, block.cells[:, None])[:, 0]
    assert ((here == block.tokens) | (here == -1)).all() and (here == block.tokens).any()
    if not params:
        assert (here == -1).any()  # a token in the column for all others has a log-prob of its own


@pytest.mark.parametrize(
    "params", [{"temperature": 2.0}, {"top_p": 0.999}, {"min_p": 1e-4}, {"repetition_penalty": 1.1}, {"top_k": 9}]
)
def test_what_the_likeliest_tokens_do_not_decide_is_refused(
    params: dict[str, Any], local: LocalServer, opened: list[Server]
) -> None:
    found = engine(SglangEngine, local, opened)
    answers = found.sample(asked(2), silent)
    few = ServerReference(found, V)
    few.top = 8
    with pytest.raises(UserError, match=f"{next(iter(params))}=.*likeliest tokens: use reference=model"):
        few.block(answers, SamplingParams(**params))


SERVED = ["reference=server", "engine.name=openai", "engine.url=http://127.0.0.1:9"]


@pytest.mark.parametrize("cut", ["top_k=5", "top_p=0.9", "min_p=0.1"])
def test_cuts_beside_rounded_distributions_are_refused(cut: str, local: LocalServer, opened: list[Server]) -> None:
    found, rounded = engine(OpenAIEngine, local, opened), [*SERVED, "model.dtype=bfloat16", "stress=0"]
    with pytest.raises(UserError, match=f"sampling.{cut} is not possible with model.dtype=bfloat16: its rounding"):
        make(certify_config([*rounded, f"sampling.{cut}"]), found)
    assert make(certify_config(rounded), found).name == "server"


@pytest.mark.slow
def test_hints_name_only_what_is_possible(local: LocalServer, opened: list[Server]) -> None:
    found = engine(OpenAIEngine, local, opened)
    found.most = 8
    with pytest.raises(UserError, match=r"stress=0, or sampling.top_k below 8, or reference=model"):
        make(certify_config(SERVED), found)
    with pytest.raises(UserError, match=r"stress=0, or reference=model"):
        make(certify_config([*SERVED, "model.dtype=bfloat16"]), found)
    assert make(certify_config([*SERVED, "sampling.top_k=7"]), found).top == 8
    for more in (["stress=0"], []):
        with pytest.raises(UserError, match=r"top_k=8 cannot be certified by the server's 8 likeliest tokens"):
            make(certify_config([*SERVED, "sampling.top_k=8", *more]), found)


def test_tokens_as_likely_as_the_last_one_of_top_k_are_kept() -> None:
    """vLLM keeps them all; which of them are listed first says nothing."""
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1]], dtype=torch.float64)
    claim = SamplingParams(top_k=2)
    found, normaliser, near = of_the_likeliest(probs.log(), claim, vocabulary=9)
    assert near.tolist() == [True, False]
    wanted = torch.tensor([[0.5, 0.25, 0.25, 0, 0], [4 / 7, 3 / 7, 0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(normaliser.exp(), torch.tensor([0.8, 0.7], dtype=torch.float64))
    with pytest.raises(UserError, match="top_k=2 cannot be certified by the server's 3 likeliest tokens"):
        of_the_likeliest(probs[:, :3].log(), claim, vocabulary=9)  # a fourth might be as likely
    whole = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    torch.testing.assert_close(of_the_likeliest(whole.log(), claim, vocabulary=3)[0][:, :3], whole)


@pytest.mark.parametrize(
    ("probs", "params", "kept"),
    [
        ([0.5, 0.3, 0.3 * (1 - 1e-5)], {"top_k": 2}, 3),
        ([0.5, 0.3, 0.15], {"top_p": 0.8 - 1e-5}, 3),
        ([0.5, 0.2 * (1 + 1e-5), 0.2, 0.05], {"top_p": 0.6}, 3),
        ([0.5, 0.3, 0.15], {"min_p": 0.6 + 1e-5}, 2),
        ([0.5, 0.3, 0.15], {"min_p": 0.6 + 1e-3}, 1),
    ],
)
def test_a_token_at_the_border_is_kept(probs: list[float], params: dict[str, Any], kept: int) -> None:
    given = torch.tensor([probs], dtype=torch.float64).log()
    assert int((of_the_likeliest(given, SamplingParams(**params), vocabulary=9)[0] > 0).sum()) == kept


@pytest.mark.parametrize("top", [3, 4])
def test_columns_do_not_depend_on_the_token_that_was_drawn(top: int, local: LocalServer, opened: list[Server]) -> None:
    """vLLM lists the text's own token first, and then the likeliest ones: of three equal ones those with low ids."""
    logprobs = {0: -1.0, 3: -2.0, 4: -3.0, 5: -3.0, 6: -3.0}

    def edit(name: str, reply: dict[str, Any]) -> dict[str, Any]:
        if name != "v1/completions":
            return reply
        listed = [[own, *[*logprobs][:top]] for own in local.calls[-1][1]["prompt"][1:]]
        rows = [{str(token): {"logprob": logprobs[token]} for token in row} for row in listed]
        return {"choices": [{"prompt_logprobs": [None, *rows]}]}

    found = engine(OpenAIEngine, local, opened)
    local.edit = edit
    one, other = found.prefilled([((0, 3), (4,)), ((0, 3), (5,))], top)
    assert one.ids.tolist() == other.ids.tolist() == [[0, 3, 4, 5][:top]] * 2 and one.own == other.own == -3.0


def test_a_prompt_of_one_token_has_no_row_before(local: LocalServer, opened: list[Server]) -> None:
    found = engine(SglangEngine, local, opened)
    answers = found.sample(requests([(1,), (1,)], max_new_tokens=4), silent)
    block = ServerReference(found, V).block(answers, SamplingParams())
    assert block.before is not None
    torch.testing.assert_close(block.before[0], block.probs[0])
    torch.testing.assert_close(block.before[1], block.probs[0])
    none = ServerReference(found, V).block([], SamplingParams())
    assert len(none) == 0 and none.probs.shape == (0, V)


def test_prefill_takes_nothing_from_a_cache_and_no_more_tokens_than_there_are(
    local: LocalServer, opened: list[Server]
) -> None:
    """SGLang dies of more likeliest tokens than its vocabulary has."""
    found = engine(SglangEngine, local, opened)
    found.prefilled([((1, 2, 3), (4, 5)), ((1, 2, 3), (4, 5))], 64)
    calls = [call for _, call in local.calls if call.get("extra_key")]
    assert len({call["extra_key"] for call in calls}) == len(calls) == 2
    assert all(call["top_logprobs_num"] == V and call["logprob_start_len"] == 1 for call in calls)

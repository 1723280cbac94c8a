import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.verl_job.names import checkpoint_to_engine, head_to_checkpoint
from bebop.verl_job.server import EmbeddedServer
from bebop.verl_job.settings import EngineConfig
from bebop.verl_job.stats import FIELD, decode
from tests.recipes.verl.builders import PROMPT, make_server

SAMPLING = {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    made = make_server()
    yield made
    made.thread.stop()


def ask(server: EmbeddedServer, request_id: str = "a", **params: Any) -> dict[str, Any]:
    return asyncio.run(server.generate(request_id, list(PROMPT), {**SAMPLING, **params}, image_data=None))


def checkpoint(server: EmbeddedServer) -> dict[str, torch.Tensor]:
    """The engine's weights under the names of a checkpoint."""
    policy = server.policy
    assert policy.mtp is not None
    head = {name: p.detach() for name, p in policy.mtp.named_parameters()}
    backbone = {name: p.detach() for name, p in policy.backbone.named_parameters()}
    return backbone | head_to_checkpoint(head, policy.layout, policy.backbone.config.num_hidden_layers)


def test_log_probs_are_those_of_the_model_and_statistics_come_along(server: EmbeddedServer) -> None:
    answer = ask(server, max_tokens=20)
    ids = torch.tensor([[*PROMPT, *answer["token_ids"]]])
    with torch.no_grad():
        hidden = server.policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
        logp = (server.policy.logits(hidden)[0] / 0.8).log_softmax(-1)
    own = logp[len(PROMPT) - 1 : -1].gather(1, ids[0, len(PROMPT) :, None])[:, 0]
    assert (own - torch.tensor(answer["log_probs"])).abs().max() < 1e-4
    stats = decode(answer["extra_fields"][FIELD])
    assert stats.tokens == len(answer["token_ids"]) and stats.cycles == answer["extra_fields"]["spec_num_verify_steps"]
    assert answer["extra_fields"]["global_steps"] == 0


@pytest.mark.slow
def test_the_same_request_gives_the_same_answer_and_another_one_another(server: EmbeddedServer) -> None:
    assert ask(server, "a") == ask(server, "a")
    assert ask(server, "a")["token_ids"] != ask(server, "b")["token_ids"]


@pytest.mark.slow
def test_an_answer_is_as_long_as_verl_allows(server: EmbeddedServer) -> None:
    assert len(ask(server, max_new_tokens=3, ignore_eos=True)["token_ids"]) == 3
    assert len(ask(server, ignore_eos=True)["token_ids"]) == 40
    assert ask(server, max_tokens=0)["stop_reason"] == "length"


def test_what_the_engine_does_not_have_is_refused(server: EmbeddedServer) -> None:
    with pytest.raises(UserError, match="no sampling parameter presence_penalty"):
        ask(server, presence_penalty=0.5)
    with pytest.raises(UserError, match="takes text alone, and was given image_data"):
        asyncio.run(server.generate("a", list(PROMPT), SAMPLING, image_data=["x"]))


def test_aborted_answers_come_back_and_later_ones_wait() -> None:
    server = make_server()

    async def story() -> None:
        running = [asyncio.create_task(server.generate(str(i), list(PROMPT), {"ignore_eos": True})) for i in range(3)]
        await asyncio.sleep(0.02)
        await server.abort_all_requests()
        parts = await asyncio.gather(*running)
        assert all(part["stop_reason"] in ("aborted", "length") for part in parts)
        assert any(part["stop_reason"] == "aborted" for part in parts)
        late = asyncio.create_task(server.generate("late", list(PROMPT), {"max_tokens": 2}))
        await asyncio.sleep(0.05)
        assert not late.done()
        await server.load(checkpoint(server), 5)
        await server.resume_generation()
        assert (await late)["extra_fields"]["global_steps"] == 5
        await server.abort_all_requests(reject_request=True)
        assert (await server.generate("x", list(PROMPT), {}))["stop_reason"] == "aborted"

    asyncio.run(story())
    server.thread.stop()


def test_weights_arrive_under_the_names_of_the_checkpoint(server: EmbeddedServer) -> None:
    before = {name: p.detach().clone() for name, p in server.policy.weights(mtp=True).items()}
    fingerprint = server.thread.engine.head
    assert asyncio.run(server.load(checkpoint(server), 3)) == fingerprint
    for name, weight in server.policy.weights(mtp=True).items():
        assert torch.equal(weight, before[name]), name
    assert ask(server, "c")["extra_fields"]["global_steps"] == 3


def test_a_weight_that_is_missing_or_unknown_is_an_error(server: EmbeddedServer) -> None:
    weights = checkpoint(server)
    first = next(iter(weights))
    with pytest.raises(UserError, match=f"without backbone.{first}"):
        checkpoint_to_engine({name: w for name, w in weights.items() if name != first}, server.policy)
    with pytest.raises(UserError, match="do not fit the model"):
        asyncio.run(server.load({**weights, "model.layers.99.nothing": torch.zeros(1)}, 3))


@pytest.mark.slow
def test_plain_decoding_reports_no_drafts() -> None:
    server = make_server(engine=EngineConfig(system="autoregressive"))
    assert set(ask(server)["extra_fields"]) == {"global_steps", "min_global_steps", "max_global_steps"}
    server.thread.stop()

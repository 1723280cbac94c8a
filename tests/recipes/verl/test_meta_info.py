"""Draft statistics of SGLang's answers, from its ``meta_info`` in every generation of names, as verl gets them."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.verl_job.meta_info import read_meta_info, spec_fields
from bebop.verl_job.metrics import acceptance
from bebop.verl_job.stats import FIELD, decode

# One answer of 30 tokens from 10 verification steps: 20 of 30 drafts were accepted. As versions of SGLang reported it.
ANSWER = {"completion_tokens": 31, "spec_verify_ct": 10}
GENERATIONS: dict[str, dict[str, Any]] = {
    "0.5.3": {"spec_accept_token_num": 20, "spec_draft_token_num": 30, "spec_accept_rate": 20 / 30},
    "0.5.12": {"spec_accepted_drafts": 20, "spec_proposed_drafts": 30},
    "0.5.23": {
        "spec_num_correct_drafts": 20,
        "spec_num_proposed_drafts": 30,
        "spec_correct_drafts_histogram": [2, 1, 2, 5],
        "spec_accept_length": 3.0,
    },
}
# What verl 0.9.1 reads, and puts where nothing is (async_sglang_server.py).
STOCK = {"spec_draft_token_num": 4, "spec_accept_token_num": 0, "spec_verify_ct": 0}


@pytest.mark.parametrize("names", GENERATIONS.values(), ids=GENERATIONS.keys())
def test_every_generation_gives_the_same_counts(names: dict[str, Any]) -> None:
    found = spec_fields({**ANSWER, **names}, 3)
    assert found["spec_num_draft_tokens"] == 30
    assert found["spec_num_accepted_tokens"] == 20
    assert found["spec_num_verify_steps"] == 10
    assert values(acceptance([decode(found[FIELD])]))["rollout/accept_length"] == pytest.approx(3.0)


def test_the_histogram_gives_rates_by_position() -> None:
    found = values(acceptance([decode(spec_fields({**ANSWER, **GENERATIONS["0.5.23"]}, 3)[FIELD])]))
    assert found["rollout/accept_rate/1"] == pytest.approx(8 / 10)
    assert found["rollout/accept_rate/2"] == pytest.approx(7 / 8)
    assert found["rollout/accept_rate/3"] == pytest.approx(5 / 7)


def test_the_stock_reader_misses_the_newest_generation() -> None:
    meta = {**ANSWER, **GENERATIONS["0.5.23"]}
    stock = {name: meta.get(name, default) for name, default in STOCK.items()}
    assert stock["spec_accept_token_num"] == 0  # a rate of 0, whatever was accepted


def test_overlap_and_entropies_of_the_measured_steps() -> None:
    entry = {"accepted": 3, "weight": 5, **{name: [0.5, 0.4, 0.3] for name in ("overlap", "target_only")}}
    entry |= {"draft_entropy": [1.0, 1.0, 1.0], "target_entropy": [2.0, 2.0, 2.0]}
    meta = {**ANSWER, **GENERATIONS["0.5.23"], "bebop_verify": [entry]}
    stats = decode(spec_fields(meta, 3)[FIELD])
    assert stats.overlap.tolist() == [2.5, 2.0, 1.5] and stats.cycles == 10


def test_nothing_verified_and_nothing_readable() -> None:
    assert spec_fields({"completion_tokens": 1}, 3) == {}
    with pytest.raises(UserError, match="no draft statistics that can be read"):
        spec_fields({"completion_tokens": 30, "spec_new_name": 3}, 3)


class Manager:
    """A tokenizer manager that answers every request with the ``meta_info`` that it is asked for."""

    async def generate_request(self, meta: dict[str, Any], raw: Any) -> AsyncIterator[dict[str, Any]]:
        await asyncio.sleep(0)
        yield {"meta_info": meta}


def server_module(enabled: bool) -> Any:
    """The shape of verl's module: a server that reads the old names from its manager's answer."""

    class SGLangHttpServer:
        config = SimpleNamespace(mtp=SimpleNamespace(enable=enabled, enable_rollout=True, speculative_num_steps=3))

        async def launch_server(self) -> None:
            self.tokenizer_manager = Manager()

        async def generate(self, meta: dict[str, Any]) -> Any:
            output = await self.tokenizer_manager.generate_request(meta, None).__anext__()
            return SimpleNamespace(extra_fields={name: output["meta_info"].get(name, 0) for name in STOCK})

    return SimpleNamespace(SGLangHttpServer=SGLangHttpServer)


async def ask(module: Any, *metas: dict[str, Any]) -> list[dict[str, Any]]:
    server = module.SGLangHttpServer()
    await server.launch_server()
    return [output.extra_fields for output in await asyncio.gather(*(server.generate(meta) for meta in metas))]


def test_the_server_reports_what_was_read_for_each_request_by_itself() -> None:
    module = server_module(enabled=True)
    read_meta_info(module)
    metas = [{**ANSWER, **names} for names in GENERATIONS.values()]
    metas.append({"completion_tokens": 13, "spec_verify_ct": 6, "spec_num_correct_drafts": 6})
    found = asyncio.run(ask(module, *metas))
    assert [extra["spec_num_accepted_tokens"] for extra in found] == [20, 20, 20, 6]


def test_without_drafts_the_server_is_left_alone() -> None:
    module = server_module(enabled=False)
    read_meta_info(module)
    assert FIELD not in asyncio.run(ask(module, {**ANSWER, **GENERATIONS["0.5.23"]}))[0]

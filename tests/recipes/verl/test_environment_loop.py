"""Trajectories of environments over a server of verl's, without verl: masks, log-probs, budgets, losses."""

import asyncio
import functools
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.episodes import Episode, Episodes
from bebop.verl_job import environment_loop
from bebop.verl_job.environment_loop import EnvironmentLoop, Limits, Played
from bebop.verl_job.server import EmbeddedServer
from tests.cases import slow_but
from tests.recipes.verl.builders import make_server
from tests.rollout import echo_environments
from tests.rollout.test_agent_loop import begin_anew

TOKENS = 300
ECHO = f"{Path(echo_environments.__file__).resolve()}:Echo"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    made = make_server(prompt_length=60, response_length=300, max_length=360)
    yield made
    made.thread.stop()


ASKED: list[int] = []  # tokens that each call of the last attempt was given


def play(
    server: EmbeddedServer, count: int = 1, seed: int = 0, name: str = ECHO, **changes: Any
) -> list[Played | None]:
    begin_anew()
    args = {key: changes.pop(key) for key in ("turns", "breaks") if key in changes}
    limits = Limits(**{"turn_tokens": 100, "prompt_tokens": 60, "tokens": TOKENS, **changes})
    stops, asked = server.policy.eos_token_ids, ASKED

    async def all_of_them() -> list[Played | None]:
        episodes = Episodes(ECHO, args, reset_seconds=9, step_seconds=9, processes=1)
        loop = EnvironmentLoop(episodes, ChatDelta.checked(server.policy.tokenizer, stops), stops, limits, seed)

        async def generate(ids: list[int], room: int) -> tuple[list[int], list[float] | None]:
            asked.append(len(ids))
            answer = await server.generate(f"{seed}-{len(ids)}", ids, {"max_tokens": room})
            return answer["token_ids"], answer["log_probs"]

        try:
            return [await loop.play(index, args, generate, asked.clear) for index in range(count)]
        finally:
            await episodes.shutdown()

    return asyncio.run(all_of_them())


def spans(played: Played) -> Iterator[tuple[int, Iterator[int]]]:
    """Runs of tokens that were written, or read."""
    for written, places in groupby(range(len(played.mask)), key=lambda place: played.mask[place]):
        yield written, (played.response[place] for place in places)


@functools.cache
def said(server: EmbeddedServer) -> list[list[int]]:
    """All that ``Echo`` can say between two turns, as ids."""
    delta = ChatDelta.checked(server.policy.tokenizer, server.policy.eos_token_ids)
    return [delta.observation([{"role": "tool", "content": f"you wrote {count}"}]) for count in range(500)]


def test_the_mask_says_what_the_policy_wrote(server: EmbeddedServer) -> None:
    """One forward over all ids gives what it wrote the log-probs that the engine gave."""
    found = [p for p in play(server, 3, turns=2) if p is not None]
    assert len(found) == 3 and max(p.turns for p in found) > 1
    for played in found:
        ids = torch.tensor([[*played.prompt, *played.response]])
        with torch.no_grad():
            hidden = server.policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
            logp = server.policy.logits(hidden)[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        own, mask = logp[len(played.prompt) - 1 :], torch.tensor(played.mask, dtype=torch.bool)
        assert played.logprobs is not None and len(played.logprobs) == len(played.mask) == len(played.response)
        given = torch.tensor(played.logprobs)
        assert (own[mask] - given[mask]).abs().max() < 1e-4 and not given[~mask].any()
        assert played.turns == 1 or not mask.all()
        stops = [i for i, token in enumerate(played.response) if token in server.policy.eos_token_ids and mask[i]]
        assert len(stops) == played.turns - (played.ended in ("length", "tokens")) or played.ended == "tokens"
        assert played.reward == len(stops)
        read = [list(ids) for written, ids in spans(played) if not written]
        assert len(read) == played.turns - 1 and all(ids in said(server) for ids in read)


@pytest.mark.parametrize("ended", slow_but(["turns"], ["length", "tokens", "turns", "seconds", "done"]))
def test_budgets(server: EmbeddedServer, ended: str) -> None:
    changes: dict[str, Any] = {
        "length": {"turn_tokens": 8, "turns": 50},
        "tokens": {"turns": 50, "tokens": 110},
        "turns": {"max_turns": 1, "turns": 50},
        "seconds": {"max_seconds": 1e-9, "turns": 50},
        "done": {"turns": 1},
    }[ended]
    found = [p for seed in range(2) for p in play(server, 1, seed, **changes) if p is not None]
    assert ended in {p.ended for p in found}
    for played in found:
        assert len(played.response) <= changes.get("tokens", TOKENS) and played.turns <= changes.get("max_turns", 50)


def test_the_wait_for_an_environment_counts_towards_no_limit(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reset = [0.0], Episode.reset

    async def late(*given: Any) -> Any:
        now[0] += 9.0
        return await reset(*given)

    monkeypatch.setattr(Episode, "reset", late)
    monkeypatch.setattr(environment_loop, "time", SimpleNamespace(monotonic=lambda: now[0]))
    (played,) = play(server, turns=2, max_seconds=8.0)
    assert played is not None and (played.turns, played.ended) == (2, "done")


@pytest.mark.slow
def test_what_is_lost_begins_again_and_is_no_row_in_the_end(server: EmbeddedServer) -> None:
    (undisturbed,) = play(server, turns=2)
    (again,) = play(server, turns=2, breaks=[1, 2])
    assert undisturbed is not None and again is not None and again.restarts == 2
    assert (again.response, again.reward) == (undisturbed.response, undisturbed.reward)
    assert len(ASKED) == again.turns, "what lost attempts have noted belongs to no row"
    assert play(server, turns=2, breaks=[1, 2], max_restarts=1) == [None]


def test_a_question_that_is_too_long(server: EmbeddedServer) -> None:
    with pytest.raises(UserError, match=r"begins with \d+ tokens, above data.max_prompt_length=3"):
        play(server, prompt_tokens=3)

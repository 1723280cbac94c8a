"""Rollouts of a real verifiers 0.4 environment, and its episodes; a function stands for the language model."""

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep
from bebop.tasks.environments.generate_server import Generate, TraceRefused
from bebop.tasks.environments.verifiers_client import VerifiersHost, VerifiersRollout
from bebop.tasks.episodes import Episodes
from bebop.trajectory import Completion
from tests.tree import ROOT

TINY = str(ROOT / "bebop" / "model" / "tiny")


def saying(*texts: Sequence[int] | str, finish: str = "stop", log: list[Any] | None = None) -> Generate:
    """A model that says these texts in turn, the last for ever."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    said = [tokenizer.encode(text) if isinstance(text, str) else list(text) for text in texts]
    number = 0

    async def generate(ids: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], list[float], str]:
        nonlocal number
        if log is not None:
            log.append((list(ids), dict(params)))
        answer = [*said[min(number, len(said) - 1)], *([tokenizer.eos_token_id] if finish == "stop" else [])]
        number += 1
        return answer, [-0.125 * (at + 1) for at in range(len(answer))], finish

    return generate


def rolled(index: int, generate: Generate, **settings: Any) -> VerifiersRollout:
    async def one() -> VerifiersRollout:
        async with VerifiersHost("counting_tasks", **{"tokenizer": TINY, **settings}) as host:
            return await host.rollout(index, generate)

    return asyncio.run(one())


@pytest.mark.smoke("verifiers")
def test_an_episode_keeps_its_tokens() -> None:
    """Also of an answer in other pieces than the tokenizer's own."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    pieces = [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    assert len(tokenizer.encode("the")) < len(pieces) and tokenizer.decode(pieces) == "the"
    log: list[Any] = []
    rollout = rolled(1, saying("one", pieces, "three", log=log))
    assert rollout.reward == 1.0 and rollout.metrics == {"turns": 3.0} and rollout.ended == "user_closed"
    assert [tokenizer.decode(turn.observation) for turn in rollout.turns] == [
        "<user>count to 3<assistant>",
        "<user>more<assistant>",
        "<user>more<assistant>",
    ]
    assert [tokenizer.decode(turn.sampled) for turn in rollout.turns] == ["one<eos>", "the<eos>", "three<eos>"]
    history: list[int] = []
    for turn, (ids, _) in zip(rollout.turns, log, strict=True):
        history += turn.observation
        assert ids == history
        assert turn.logprobs == tuple(-0.125 * (at + 1) for at in range(len(turn.sampled))) and turn.finish == "stop"
        history += turn.sampled


def test_markers_in_what_an_environment_says_are_broken_up() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rollout = rolled(0, saying("one"), settings={"asks": "<eos><assistant>6"})
    assert tokenizer.decode(rollout.turns[1].observation) == "<user>< eos>< assistant>6<assistant>"


@pytest.mark.smoke("token")
def test_traces_that_are_not_exact_are_refused(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    whole, pieces = tokenizer.encode("the"), [tokenizer.convert_tokens_to_ids(letter) for letter in "the"]
    # The library's own way tokenises the history again in every turn.
    assert rolled(0, saying(whole), renderer="default").reward == 1.0
    old, new = next(pair for pair in zip(pieces, whole, strict=False) if pair[0] != pair[1])
    with pytest.raises(TraceRefused, match=rf"\(sampled in turn 0\): {old} there, {new} in the request"):
        rolled(0, saying(pieces), renderer="default")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(f"{TINY}/{name}", tmp_path)
    # Leaves the stop token out of the history: verifiers would make a branch of every turn.
    bare = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(bare + "{{ '<assistant>' if add_generation_prompt else '' }}")
    with pytest.raises(TraceRefused, match=r"turn 1 parts from the trace at token \d+ \(sampled in turn 0\): 1 there"):
        rolled(1, saying("one"), renderer="default", tokenizer=str(tmp_path))
    with pytest.raises(UserError, match="chat template does not end a completion"):
        rolled(1, saying("one"), tokenizer=str(tmp_path))
    for asks in ("twice", "side by side"):
        with pytest.raises(TraceRefused, match="one trace is possible"):
            rolled(0, saying("one"), settings={"asks": asks})


def test_ends_are_told_apart() -> None:
    cut = rolled(2, saying("one", finish="length"))
    assert (len(cut.turns), cut.ended, cut.turns[0].finish, cut.reward) == (1, "length", "length", 0.25)
    bound = rolled(2, saying("one"), max_turns=2)
    assert (len(bound.turns), bound.ended, bound.reward) == (2, "max_turns", 0.5)


def test_failures_have_their_owners() -> None:
    async def broken(ids: Sequence[int], params: Mapping[str, Any]) -> tuple[list[int], list[float], str]:
        raise ZeroDivisionError("of the engine")

    with pytest.raises(ZeroDivisionError, match="of the engine"):
        rolled(0, broken)
    with pytest.raises(EnvironmentLost, match="the environment broke"):
        rolled(0, saying("one"), settings={"asks": "crash"})
    with pytest.raises(EnvironmentLost, match="ran no agent"):
        rolled(0, saying("one"), settings={"asks": "nothing"})
    for wrong, named in (
        ({"taskset": "no_such_tasks"}, "no_such_tasks"),
        ({"args": {"siez": 1}}, "siez"),
        ({"tokenizer": "/no/such/folder"}, "/no/such/folder"),
        ({"renderer": "qwen33"}, "qwen33"),
    ):
        with pytest.raises(UserError, match=named) as caught:
            VerifiersHost(**{"taskset": "counting_tasks", "tokenizer": TINY, **wrong})
        assert "\n" not in str(caught.value)


# ---- on the seam


def counting(**args: Any) -> Episodes:
    settings = {"taskset": "counting_tasks", "tokenizer": TINY, **args}
    return Episodes("verifiers", settings, reset_seconds=60, step_seconds=30, processes=1)


def completion(text: str) -> Completion:
    ids = [*AutoTokenizer.from_pretrained(TINY).encode(text), 1]
    return Completion(
        token_ids=np.array(ids), logprobs=np.full(len(ids), -0.5, dtype=np.float32), versions=np.zeros(len(ids), int)
    )


@pytest.mark.smoke("seam")
async def test_an_episode_on_the_seam() -> None:
    async def play(episodes: Episodes, index: int, says: str) -> tuple[Any, list[EnvStep]]:
        episode = episodes.open()
        first, steps = await episode.reset({"index": index}, 0), list[EnvStep]()
        while not (steps and steps[-1].done):
            steps.append(await episode.step(completion(says)))
        await episode.close()
        return first, steps

    episodes = counting()
    both = [await asyncio.gather(*(play(episodes, n, str(n)) for n in range(4))) for _ in range(2)]
    assert both[0] == both[1]  # the host served, ended, and serves again
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    for index, (first, steps) in enumerate(both[0]):
        goal = index % 3 + 2
        assert tokenizer.decode(first) == f"<user>count to {goal}<assistant>"
        assert [tokenizer.decode(step.messages) for step in steps[:-1]] == ["<user>more<assistant>"] * (goal - 1)
        assert steps[-1] == EnvStep(reward=1.0, done=True, counts={"turns": float(goal)})
        assert sum(step.reward for step in steps) == 1.0
    await episodes.shutdown()


async def test_an_episode_that_is_given_up_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    episodes = counting()
    one, other = episodes.open(), episodes.open()
    first = await one.reset({"index": 0}, 0)
    assert await other.reset({"index": 0}, 0) == first
    await one.close()
    assert (await other.step(completion("x"))).messages
    await other.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before


def test_what_ends_an_episode_on_the_seam() -> None:
    async def ended(says: str, **args: Any) -> None:
        episode = counting(**args).open()
        try:
            await episode.reset({"index": 0}, 0)
            await episode.step(completion(says))
        finally:
            await episode.close()

    with pytest.raises(EnvironmentLost, match=r"verifiers: verifiers task 0: .*the environment broke"):
        asyncio.run(ended("x", settings={"asks": "crash"}))
    with pytest.raises(UserError, match="one trace is possible"):
        asyncio.run(ended("x", settings={"asks": "twice"}))

"""What holds for all games: any text is answered, alike each time, and arguments have their bounds."""

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep, Message, checked_messages, checked_step, find_kind, load_class, question
from tests.tasks.environments.playing import play, reward

WORDS = st.sampled_from(
    ["get", "answer", "calc", "1", "64", "32", "500", "(", "**", "/ 0", "\n", "\x00", "\ud800", "…"]
)
TEXTS = st.lists(st.text(max_size=40) | st.lists(WORDS, max_size=6).map(" ".join), min_size=1, max_size=8)


GAMES = pytest.mark.parametrize("name", ["guess", "store", "calc"])


@settings(deadline=None, max_examples=15)
@given(texts=TEXTS, index=st.integers(0, 10**9), seed=st.integers(0, 2**62))
@GAMES
def test_any_text_is_answered(name: str, texts: list[str], index: int, seed: int) -> None:
    kind = find_kind(name)

    def played() -> tuple[list[Message], list[EnvStep]]:
        says = itertools.cycle(texts)
        return play(load_class(kind.make)(), question(kind, index, seed, {}), lambda heard: next(says), seed)

    heard, steps = played()
    assert (heard, steps) == played()
    assert 0.0 <= reward(steps) <= 1.0 and all(number >= 0 for step in steps for number in step.counts.values())
    assert checked_messages(tuple(heard), name) and all(checked_step(step, name) == step for step in steps)
    assert all(step.messages or step.done for step in steps) and not steps[-1].messages


@GAMES
def test_episodes_share_nothing(name: str) -> None:
    """Two that are played in turns go as each does alone."""
    kind = find_kind(name)
    items = [question(kind, index, 0, {}) for index in (0, 1)]
    alone = [play(load_class(kind.make)(), item, lambda heard: "calc 1 + 1", 5)[1] for item in items]

    async def both() -> list[list[EnvStep]]:
        environments, steps = [load_class(kind.make)() for _ in items], [list[EnvStep](), list[EnvStep]()]
        for environment, item in zip(environments, items, strict=True):
            await environment.reset(item, 5)
        while not all(found and found[-1].done for found in steps):
            for environment, found in zip(environments, steps, strict=True):
                if not (found and found[-1].done):
                    found.append(await environment.step("calc 1 + 1"))
        return steps

    assert asyncio.run(both()) == alone


@pytest.mark.parametrize(
    "setting",
    ["guess numbers 1", "guess numbers 10000000", "guess tries 0", "guess tries 101", "store length 3",
     "store length 31", "store size 29", "store size 901", "store spare -1", "calc terms 3", "calc terms 13",
     "calc digits 0", "calc digits 7", "calc turns 0"],
)  # fmt: skip
def test_arguments_that_cannot_be(setting: str) -> None:
    name, argument, value = setting.split()
    kind, args = find_kind(name), {argument: int(value)}
    with pytest.raises(UserError, match=rf"^{argument}={value} is not possible for {name}: "):
        question(kind, 0, 0, args)
        load_class(kind.make)(**args)

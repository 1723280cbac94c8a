"""Matches and followers of a growing automaton against brute force; the bound on what is kept; and faults that show."""

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bebop.rollout import history
from bebop.rollout.history import BEGIN, ROOT, Automaton, History
from tests.cases import slow_but

pytestmark = pytest.mark.slow

Found = tuple[int, list[tuple[int, int]]]  # tokens matched, followers with their counts
# Which of up to four texts says which token next; few tokens, so that they repeat themselves and one another.
GROWTH = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=40)


def searched(texts: Sequence[Sequence[int]], context: Sequence[int]) -> Found:
    """The longest ending of ``context`` that something followed in one of the texts, and what; by looking."""
    for size in range(len(context), 0, -1):
        ending = list(context[-size:])
        places = ((text, end) for text in texts for end in range(size, len(text)))
        follow = Counter(text[end] for text, end in places if list(text[end - size : end]) == ending)
        if follow:
            return size, sorted(follow.items())
    return 0, []


def found(texts: Automaton, state: int, matched: int) -> Found:
    """The same of an automaton."""
    state, matched = texts.followed(state, matched)
    return (matched, texts.followers(state)) if state != ROOT else (0, [])


def grow(growth: Sequence[tuple[int, int]]) -> str | None:
    """Four texts grow in turns, each matched against all: where automaton and search first disagree."""
    one = Automaton()
    states = [one.append(ROOT, BEGIN) for _ in range(4)]
    texts = [[BEGIN] for _ in range(4)]
    for number, token in growth:
        states[number] = one.append(states[number], token)
        texts[number].append(token)
        for state, text in zip(states, texts, strict=True):
            if found(one, state, one.length[state]) != searched(texts, text):
                return f"{text} in {texts}"
    assert one.tokens == sum(map(len, texts)) and len(one.link) <= 2 * one.tokens + 1
    return None


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(GROWTH)
def test_texts_that_grow_in_turns_are_matched_as_a_search_finds_them(growth: list[tuple[int, int]]) -> None:
    assert grow(growth) is None


@settings(max_examples=150, deadline=None)
@given(GROWTH, st.lists(st.integers(0, 2), max_size=12))
@example([(0, 0)] * 3, [0, 0])  # these two find every automaton of BROKEN; 150 random ones once missed one
@example([(0, 1), *[(0, 0)] * 3], [0])
def test_a_reader_matches_what_a_search_finds(growth: list[tuple[int, int]], read: list[int]) -> None:
    """Token by token, also where a state was split after it was reached."""
    one, texts = Automaton(), [[BEGIN] for _ in range(4)]
    states = [one.append(ROOT, BEGIN) for _ in range(4)]
    early = (ROOT, 0)
    for place, (number, token) in enumerate(growth):
        if place == len(growth) // 2:
            for said in (BEGIN, *read):
                early = one.advance(*early, said)
        states[number] = one.append(states[number], token)
        texts[number].append(token)
    state, context = (ROOT, 0), []  # type: tuple[int, int], list[int]
    for said in (BEGIN, *read):
        state, context = one.advance(*state, said), [*context, said]
        assert found(one, *state) == searched(texts, context)
    if early[1]:  # it knows as much of the context as was there then, and all that followed since
        assert found(one, *early) == searched(texts, context[-early[1] :])


def broken(name: str, old: str, new: str) -> type[Automaton]:
    """An automaton with a line changed."""
    import inspect
    import textwrap

    source = textwrap.dedent(inspect.getsource(Automaton))
    assert source.count(old) == 1, name
    space = dict(vars(history))
    exec(source.replace(old, new), space)
    return space["Automaton"]  # type: ignore[no-any-return]


BROKEN = [
    ("a split starts at no count", "self.link[there], self.count[there])", "self.link[there], 0)"),
    ("a split shares what follows", "dict(self.follow[there])", "self.follow[there]"),
    ("counts stop at the text itself", "at = self.link[at]\n        self.tokens", "at = ROOT\n        self.tokens"),
    ("a split leaves the link behind", "self.link[there] = split", "pass"),
    ("readers stay where a state was split", "matched <= self.length[self.link[state]]", "False"),
]


@pytest.mark.parametrize(("name", "old", "new"), slow_but(BROKEN[:1], BROKEN, several=True))
def test_broken_automata_are_caught(name: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "Automaton", broken(name, old, new))

    def survives(test: Callable[[], None]) -> bool:
        try:
            test()
        except (AssertionError, KeyError, IndexError):
            return False
        return True

    assert not (
        survives(test_texts_that_grow_in_turns_are_matched_as_a_search_finds_them)
        and survives(test_a_reader_matches_what_a_search_finds)
    )


ANSWERS = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=4)
DOINGS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["remember", "decode"]), ANSWERS), max_size=25)


@settings(max_examples=100, deadline=None)
@given(DOINGS, st.integers(1, 30))
def test_what_is_kept_stays_within_the_bound_and_the_oldest_goes(
    doings: list[tuple[int, str, list[list[int]]]], limit: int
) -> None:
    kept, asked = History(limit), list[int]()
    for prompt, what, answers in doings:
        asked = [*(one for one in asked if one != prompt), prompt]
        if what == "remember":
            kept.remember([prompt], answers)
        else:
            texts = kept.of([prompt])
            for answer in answers:
                kept.extend(texts, kept.enter(texts, ()), answer)
        assert kept.tokens <= limit
        assert kept.tokens == sum(len(key) + 1 + held.texts.tokens for key, held in kept._held.items())
        there = [key[0] for key in kept._held]
        assert there == asked[len(asked) - len(there) :], "those that were asked last"


def test_prompts_without_completions_stay_within_the_bound() -> None:
    kept = History(limit=100)
    for prompt in range(1000):
        kept.of([prompt])
    assert len(kept) == 50, "a token and a mark each"
    texts = kept.of(range(200))
    assert len(kept) == kept.tokens == 0 and not texts.held, "its own request alone reads it"


def test_the_prompt_asked_longest_ago_goes_first() -> None:
    kept = History(limit=12)
    kept.remember([1], [[5, 6]])  # with its prompt and the marks, five tokens
    kept.remember([2], [[5, 6]])
    kept.of([1])
    kept.remember([3], [[7, 8]])
    assert [len(kept.of([prompt]).follow) > 1 for prompt in (1, 3, 2)] == [True, True, False]


def test_the_same_completions_told_again_leave_what_was_decoded_meanwhile() -> None:
    kept = History()
    kept.remember([1], [[5, 6]])
    texts = kept.of([1])
    kept.extend(texts, kept.enter(texts, ()), [5, 7])
    kept.remember([1], [[5, 6]])
    assert kept.of([1]) is texts and texts.tokens == 5
    kept.remember([1], [[5, 6], [5, 7]])
    assert kept.of([1]) is not texts and kept.tokens == 8
    kept.extend(texts, kept.enter(texts, (5,)), [9])  # a row that still reads the old one
    assert kept.tokens == 8


def test_a_completion_that_comes_again_is_counted_once() -> None:
    kept = History()
    texts = kept.of([1])
    state = kept.extend(texts, kept.enter(texts, ()), [5, 6, 5, 7])
    assert kept.enter(texts, [5, 6, 5, 7]) == state
    assert found(texts, *texts.advance(ROOT, 0, 5)) == (1, [(6, 1), (7, 1)])

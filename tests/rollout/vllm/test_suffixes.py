"""What is in vLLM's tree of texts after whatever was told and ended, over a tree that only keeps them."""

from collections.abc import Hashable, Sequence
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.errors import UserError
from bebop.rollout.vllm.suffixes import MAX_MATCH, Suffixes, suffix_cache

PROMPT, OTHER = (3, 1, 4), (2, 7)


class Tree:
    """Texts by name, with the rules of arctic-inference's ``SuffixDecodingCache``."""

    def __init__(self) -> None:
        self.texts: dict[Hashable, list[int]] = {}
        self.active: set[Hashable] = set()

    @property
    def cached_requests(self) -> list[Hashable]:
        return list(self.texts)

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int]) -> None:
        assert req_id not in self.active and req_id not in self.texts
        self.active.add(req_id)
        self.texts[req_id] = []

    def add_active_response(self, req_id: Hashable, token_ids: Sequence[int]) -> None:
        assert req_id in self.active
        self.texts[req_id] += token_ids

    def stop_request(self, req_id: Hashable) -> None:
        self.active.remove(req_id)

    def evict_cached_response(self, req_id: Hashable) -> None:
        del self.texts[req_id]

    def decoded(self, name: str, answer: Sequence[int]) -> None:
        """As vLLM puts a request into it."""
        self.start_request(name, PROMPT)
        self.add_active_response(name, answer)


def test_a_past_answer_stands_behind_the_end_of_its_prompt() -> None:
    tree, long = Tree(), tuple(range(3 * MAX_MATCH))
    known = Suffixes(tree, 1000)
    known.remember(PROMPT, [[5, 6], [], [5, 7]])
    known.remember(long, [[9]])
    assert list(tree.texts.values()) == [[3, 1, 4, 5, 6], [3, 1, 4, 5, 7], [*long[-MAX_MATCH:], 9]]
    assert not tree.active and known.tokens == 10 + MAX_MATCH + 1


def test_what_is_told_takes_the_place_of_what_was_known_of_a_prompt() -> None:
    """And of answers that ended meanwhile, which are among it; the same told again changes nothing."""
    tree = Tree()
    known = Suffixes(tree, 1000)
    known.remember(PROMPT, [[5]])
    known.remember(OTHER, [[6]])
    tree.decoded("a", [8, 8])
    tree.decoded("running", [9])
    known.ended("a", PROMPT, 2)
    before = dict(tree.texts)
    known.remember(PROMPT, [[5]])
    assert tree.texts == before
    known.remember(PROMPT, [[5], [8, 8]])
    assert sorted(tree.texts.values()) == [[2, 7, 6], [3, 1, 4, 5], [3, 1, 4, 8, 8], [9]]
    assert known.tokens == 3 + 4 + 5
    known.ended("never drafted for", PROMPT, 1)  # its text is not in the tree
    assert known.tokens == 3 + 4 + 5


def test_prompts_that_were_asked_longest_ago_go_first_and_whole() -> None:
    tree = Tree()
    known = Suffixes(tree, 12)
    known.remember(PROMPT, [[5], [6]])
    known.remember(OTHER, [[7]])
    known.remember(PROMPT, [[5], [6]])  # asked again
    known.remember((8,), [[9]])
    assert sorted(tree.texts.values()) == [[3, 1, 4, 5], [3, 1, 4, 6], [8, 9]] and len(known) == 2
    tree.decoded("a", [1, 1, 1])
    known.ended("a", (8,), 3)
    assert sorted(tree.texts.values()) == [[1, 1, 1], [8, 9]] and known.tokens == 5
    known.clear()
    assert not tree.texts and known.tokens == len(known) == 0


PROMPTS = st.sampled_from([PROMPT, OTHER, (8,)])
ANSWERS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3)
CALLS = st.lists(st.tuples(PROMPTS, st.one_of(ANSWERS, st.integers(1, 6))), max_size=30)


@settings(max_examples=100, deadline=None)
@given(CALLS, st.integers(0, 20))
def test_the_bound_holds_and_the_count_is_that_of_the_tree(calls: list, limit: int) -> None:
    tree = Tree()
    known = Suffixes(tree, limit)
    for number, (prompt, call) in enumerate(calls):
        if isinstance(call, int):
            tree.decoded(str(number), [1] * call)
            known.ended(str(number), prompt, call)
        else:
            known.remember(prompt, call)
        assert known.tokens == sum(map(len, tree.texts.values())) <= limit


def test_another_version_of_vllm_is_refused_in_words() -> None:
    tree = Tree()
    runner = SimpleNamespace(drafter=SimpleNamespace(suffix_cache=tree))
    assert suffix_cache(SimpleNamespace(model_runner=runner)) is tree
    for drafter in (SimpleNamespace(), SimpleNamespace(suffix_cache=SimpleNamespace(cached_requests=()))):
        with pytest.raises(UserError, match=r"suffix decoding has no \w+ in this version") as caught:
            suffix_cache(SimpleNamespace(model_runner=SimpleNamespace(drafter=drafter)))
        assert "\n" not in str(caught.value)

"""A suffix automaton for each prompt, which finds the tokens that followed the same text in its other completions.

It is our own, and not the suffix tree of arctic-inference (0.1.1), whose ``speculate`` gives a path of tokens with
scores. Rejection sampling against a mixture needs the whole distribution of following tokens, again after each sampled
token. And a tree of many completions that grow in turns can be checked against brute force when it is this small.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

TOKENS = 1 << 18  # kept by default, prompts included
ROOT = 0  # the state of the empty text: no match
BEGIN = -1  # a mark before every text, which is no token


class Automaton:
    """The generalised suffix automaton of some texts (Blumer et al. 1985), each of which may grow at any time.

    A state stands for all texts that occur at the same places. The shorter ones among their suffixes are those of its
    link. Every text begins with a mark that occurs nowhere else. So a whole text is the longest of its state, and no
    split moves it: a caller that extends it can keep its state. One more token costs a step for each suffix that occurs
    elsewhere.
    """

    __slots__ = ("count", "digest", "follow", "held", "learned", "length", "link", "names", "tokens")

    def __init__(self) -> None:
        self.follow: list[dict[int, int]] = [{}]  # token -> state
        self.link = [-1]
        self.length = [0]  # of the longest text
        self.count = [0]  # places at which it occurs; not kept of ROOT
        self.tokens = 0  # in all texts, marks included
        self.names = [0]  # 64-bit hash of the longest text, of states that are a text as a whole
        self.digest = 0  # 64-bit hash of all texts, whatever their order: every token that is added changes it
        self.held = False  # by a ``History``
        self.learned: Tensor | None = None  # what its matches were worth, see ``decoding.trust``; None: not known yet

    def append(self, text: int, token: int) -> int:
        """Extend the text of the given state by a token, and return its new state. A new text is BEGIN after ROOT."""
        state = self.follow[text].get(token)
        if state is None:
            state = self._new(text, token)
            self.names[state] = _mix(self.names[text] + token)
        assert self.length[state] == self.length[text] + 1, "no text as a whole"
        at = state
        while at != ROOT:
            self.count[at] += 1
            at = self.link[at]
        self.tokens += 1
        self.digest = (self.digest + self.names[state]) % (1 << 64)
        return state

    def advance(self, state: int, matched: int, token: int) -> tuple[int, int]:
        """Return state and length of the longest known suffix, for a match of ``matched`` tokens followed by ``token``.

        Known suffixes occur in the texts.
        """
        follow = self.follow
        state, matched = self._settled(state, matched)
        while state != ROOT and token not in follow[state]:
            state = self.link[state]
            matched = self.length[state]
        after = follow[state].get(token)
        return (ROOT, 0) if after is None else (after, matched + 1)

    def followed(self, state: int, matched: int) -> tuple[int, int]:
        """Return state and length of the longest suffix of a match that any token followed."""
        state, matched = self._settled(state, matched)
        while state != ROOT and not self.follow[state]:
            state = self.link[state]
            matched = self.length[state]
        return state, matched

    def followers(self, state: int) -> list[tuple[int, int]]:
        """Return which tokens followed and how often, sorted by token: the order of insertion makes no difference."""
        count = self.count
        return sorted((token, count[after]) for token, after in self.follow[state].items())

    def _settled(self, state: int, matched: int) -> tuple[int, int]:
        """Return the current state of a match: if a split has moved the shorter texts to another state, that one."""
        while state != ROOT and matched <= self.length[self.link[state]]:
            state = self.link[state]
        return state, matched

    def _new(self, text: int, token: int) -> int:
        state, at = self._add(self.length[text] + 1, {}, ROOT, 0), text
        while at >= 0 and token not in self.follow[at]:
            self.follow[at][token] = state
            at = self.link[at]
        if at >= 0:
            self.link[state] = self._alone(at, token)
        return state

    def _alone(self, at: int, token: int) -> int:
        """Return the state whose longest text is that of ``at`` plus the token; split it off if it is not one yet."""
        there, length = self.follow[at][token], self.length[at] + 1
        if self.length[there] == length:
            return there
        split = self._add(length, dict(self.follow[there]), self.link[there], self.count[there])
        self.link[there] = split
        while at >= 0 and self.follow[at].get(token) == there:
            self.follow[at][token] = split
            at = self.link[at]
        return split

    def _add(self, length: int, follow: dict[int, int], link: int, count: int) -> int:
        self.follow.append(follow)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        self.names.append(0)
        return len(self.link) - 1


def _mix(x: int) -> int:
    """Hash 64 bits to 64 bits (splitmix64; Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) % (1 << 64)
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    x = (x ^ x >> 27) * 0x94D049BB133111EB % (1 << 64)
    return x ^ x >> 31


@dataclass(frozen=True, slots=True)
class _Held:
    texts: Automaton
    completions: tuple[tuple[int, ...], ...]  # that it was made of


class History:
    """Automata by prompt, with at most ``limit`` tokens in all; whole automata are evicted, least recently used first.

    The tokens of the prompts count too, since a prompt is held even if its automaton is empty. An automaton cannot
    forget a text. Rows in progress keep the automaton that they read until they end.
    """

    def __init__(self, limit: int = TOKENS) -> None:
        self.limit = limit
        self.tokens = 0  # held, in prompts and completions, with a mark each
        self._held: OrderedDict[tuple[int, ...], _Held] = OrderedDict()  # the next to go first

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._held)

    def remember(self, prompt: Sequence[int], answers: Iterable[Iterable[int]]) -> None:
        """Store all past completions of a prompt that may be drafted from.

        They replace the stored ones, and completions decoded here meanwhile, which they include. The same completions
        given again change nothing.
        """
        key, given = tuple(prompt), tuple(tuple(map(int, answer)) for answer in answers)
        held = self._held.get(key)
        if held is not None and held.completions == given:
            self._held.move_to_end(key)
            return
        texts = Automaton()
        for answer in given:
            state = ROOT
            for token in (BEGIN, *answer):
                state = texts.append(state, token)
        self._hold(key, _Held(texts, given))

    def forget(self, prompt: Sequence[int]) -> None:
        """Drop the history of a prompt."""
        if tuple(prompt) in self._held:
            self._drop(tuple(prompt))

    def of(self, prompt: Sequence[int]) -> Automaton:
        """Return the history of a prompt, which may be empty; the prompt counts as just used."""
        key = tuple(prompt)
        held = self._held.get(key)
        if held is None:
            held = _Held(Automaton(), ())
            self._hold(key, held)  # not for long, if the prompt alone exceeds the limit
        else:
            self._held.move_to_end(key)
        return held.texts

    def enter(self, texts: Automaton, answer: Iterable[int]) -> int:
        """Return the state of a completion that goes on from here.

        Tokens that are in the history already are not counted again, since the completion may have been here before.
        """
        state = ROOT
        for token in (BEGIN, *answer):
            there = texts.follow[state].get(token)
            state = self.extend(texts, state, (token,)) if there is None else there
        return state

    def extend(self, texts: Automaton, text: int, tokens: Iterable[int]) -> int:
        """Extend a text of an automaton by some tokens, and return its new state."""
        before = texts.tokens
        for token in tokens:
            text = texts.append(text, token)
        if texts.held:
            self.tokens += texts.tokens - before
            self._evict()
        return text

    def _hold(self, key: tuple[int, ...], new: _Held) -> None:
        if key in self._held:
            self._drop(key)
        self._held[key] = new
        new.texts.held = True
        self.tokens += len(key) + 1 + new.texts.tokens
        self._evict()

    def _evict(self) -> None:
        while self.tokens > self.limit:
            self._drop(next(iter(self._held)))

    def _drop(self, key: tuple[int, ...]) -> None:
        gone = self._held.pop(key).texts
        gone.held = False
        self.tokens -= len(key) + 1 + gone.tokens

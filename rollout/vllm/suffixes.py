"""Past completions in the tree that vLLM's suffix decoding drafts from. This module needs no vllm.

vLLM has one tree with the completions of all requests, and a small one for the prompt and completion of each. It drafts
the likeliest path after the match that promises most tokens. Past completions are put into the big tree behind the end
of their prompt. When the prompt is requested again, its own completions are the longest match, from the first token on.
Completions of other prompts count, too.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bebop.errors import UserError

MAX_MATCH = 24  # tokens of a match; as many tokens of the prompt stand before its completions
MAX_DRAFTS_PER_TOKEN = 4.0  # of the match; vLLM's 1 lets a short match, as most are, draft next to nothing


class Cache(Protocol):
    """The used part of arctic-inference's ``SuffixDecodingCache``: texts by name, started, extended and ended."""

    @property
    def cached_requests(self) -> Iterable[Hashable]:
        """Return the names whose texts are in the big tree."""

    def start_request(self, req_id: Hashable, prompt_token_ids: Sequence[int]) -> None:
        """Start a text; the prompt goes into a tree that ends with it."""

    def add_active_response(self, req_id: Hashable, token_ids: Sequence[int]) -> None:
        """Extend a text by tokens."""

    def stop_request(self, req_id: Hashable) -> None:
        """End a text; it stays in the big tree."""

    def evict_cached_response(self, req_id: Hashable) -> None:
        """Remove an ended text from the big tree."""


@dataclass(slots=True)
class _Held:
    told: tuple[tuple[int, ...], ...] = ()  # the past completions
    names: list[Hashable] = field(default_factory=list)  # of their texts, and of completions that ended here since
    tokens: int = 0


class Suffixes:
    """Texts in vLLM's tree by prompt, managed like the embedded engine's ``History``.

    They have at most ``limit`` tokens beside those of completions in progress. Whole prompts are evicted, least
    recently used first.
    """

    def __init__(self, cache: Cache, limit: int) -> None:
        self.cache, self.limit = cache, limit
        self.tokens = 0  # held, ends of prompts included
        self._held: OrderedDict[tuple[int, ...], _Held] = OrderedDict()  # the next to go first
        self._count = 0

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self._held)

    def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Store all past completions of a prompt that may be drafted from.

        They replace the stored ones, and completions that ended here since, which they include. The same completions
        given again change nothing.
        """
        key, told = tuple(prompt), tuple(tuple(map(int, answer)) for answer in answers)
        held = self._held.get(key)
        if held is not None and held.told == told:
            self._held.move_to_end(key)
            return
        if held is not None:
            self._drop(key)
        new = self._held[key] = _Held(told=told)
        for answer in filter(None, told):
            self._count += 1
            name = ("told", self._count)  # requests are called by strings
            text = (*key[-MAX_MATCH:], *answer)
            self.cache.start_request(name, ())
            self.cache.add_active_response(name, text)
            self.cache.stop_request(name)
            self._add(new, name, len(text))
        self._evict()

    def ended(self, name: str, prompt: Sequence[int], tokens: int) -> None:
        """Record that a request ended; its text stays in vLLM's tree until its prompt is replaced or evicted."""
        if name not in self.cache.cached_requests:  # it ended with its first token
            return
        held = self._held.setdefault(tuple(prompt), _Held())
        self._held.move_to_end(tuple(prompt))
        self._add(held, name, tokens)
        self._evict()

    def clear(self) -> None:
        """Remove all stored and ended completions."""
        for key in list(self._held):
            self._drop(key)

    def _add(self, held: _Held, name: Hashable, tokens: int) -> None:
        held.names.append(name)
        held.tokens += tokens
        self.tokens += tokens

    def _evict(self) -> None:
        while self.tokens > self.limit:
            self._drop(next(iter(self._held)))

    def _drop(self, key: tuple[int, ...]) -> None:
        gone = self._held.pop(key)
        self.tokens -= gone.tokens
        for name in gone.names:
            if name in self.cache.cached_requests:
                self.cache.evict_cached_response(name)


CALLS = ("cached_requests", "start_request", "add_active_response", "stop_request", "evict_cached_response")


def suffix_cache(worker: Any) -> Cache:
    """Return the drafter's cache, in vLLM's worker; raise ``UserError`` if it lacks a method in this version."""
    found: Any = getattr(getattr(worker.model_runner, "drafter", None), "suffix_cache", None)
    if lacking := [name for name in CALLS if not hasattr(found, name)]:
        raise UserError(
            f"vLLM's suffix decoding has no {lacking[0]} in this version: past completions cannot be put in; use "
            "rollout=torch"
        )
    cache: Cache = found
    return cache

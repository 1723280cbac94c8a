"""Trajectories of Bebop's environments on one of verl's rollout engines: token ids in, token ids out.

Nothing here needs verl, so tests need none; ``agent_loop`` is verl's side.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bebop.errors import UserError
from bebop.rollout.detokenize import CompletionText
from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.environment import EnvironmentLost, EnvStep, question
from bebop.tasks.environment import seed as environment_seed
from bebop.tasks.episodes import Episode, Episodes
from bebop.trajectory import Ending, SamplingParams

log = logging.getLogger(__name__)
# (prompt ids, token limit of the turn) -> ids of the turn, and their log-probs or None if the engine gives none.
Generate = Callable[[list[int], int], Awaitable[tuple[list[int], list[float] | None]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a trajectory, from the settings of ``agent_loop``."""

    max_turns: int = 16
    max_seconds: float = 3600.0
    max_restarts: int = 2
    turn_tokens: int  # of one completion
    prompt_tokens: int  # of the first messages
    tokens: int  # of all that follows, completions and observations


@dataclass(slots=True, kw_only=True)
class Played:
    """Trajectory in verl's terms: a prompt, and a response whose mask marks the policy's tokens."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1: written by the policy, 0: read
    logprobs: list[float] | None = field(default_factory=list)  # 0 for tokens that were read
    turns: int = 0
    reward: float = 0.0
    ended: Ending = "done"
    restarts: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    def write(self, ids: list[int], logprobs: list[float] | None) -> None:
        """Add a turn of the policy."""
        self.turns += 1
        self.response += ids
        self.mask += [1] * len(ids)
        if self.logprobs is not None:
            self.logprobs = None if logprobs is None else [*self.logprobs, *logprobs]

    def read(self, ids: list[int]) -> None:
        """Add an observation."""
        self.response += ids
        self.mask += [0] * len(ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(ids)

    def hear(self, step: EnvStep) -> None:
        """Add the reward and the counts of an environment step."""
        self.reward += step.reward
        for name, value in step.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + value


class EnvironmentLoop:
    """Plays trajectories, each with an environment of its own."""

    def __init__(self, episodes: Episodes, delta: ChatDelta, stops: tuple[int, ...], limits: Limits, seed: int) -> None:
        """Refuse kinds with ``tokens``. ``stops`` are tokens that end a turn; ``seed`` selects the questions."""
        if episodes.kind.tokens:
            raise UserError(f"environment {episodes.kind.name} makes tokens of its own: verl's loop has no use for it")
        self.episodes, self.delta, self.stops, self.limits, self.seed = episodes, delta, stops, limits, seed
        self._text, self._params = CompletionText(delta.tokenizer), SamplingParams(stop_token_ids=stops)

    async def play(
        self, index: int, args: Mapping[str, Any], generate: Generate, begin: Callable[[], None] = lambda: None
    ) -> Played | None:
        """Play question ``index``; the result is None if its environments were lost too often.

        A lost trajectory gives no row, never a row with reward 0. ``begin`` is called before each attempt: what
        ``generate`` has noted until then belongs to no row.
        """
        item = question(self.episodes.kind, index, self.seed, args)
        for restarts in range(self.limits.max_restarts + 1):
            begin()
            episode = self.episodes.open()
            try:
                played = await self._turns(episode, item, index, generate)
                played.restarts = restarts
                return played
            except EnvironmentLost as lost:
                name = self.episodes.kind.name
                log.warning("environment %s of question %d was lost, attempt %d: %s", name, index, restarts + 1, lost)
            finally:
                await episode.close()
        return None

    async def _turns(self, episode: Episode, item: Mapping[str, Any], index: int, generate: Generate) -> Played:
        first = self.delta.first(await episode.reset(item, environment_seed(self.seed, index)))
        began = time.monotonic()  # now: the wait for an environment's process counts towards no limit
        if len(first) > self.limits.prompt_tokens:
            raise UserError(
                f"environment {self.episodes.kind.name}: question {index} begins with {len(first)} tokens, above "
                f"data.max_prompt_length={self.limits.prompt_tokens}"
            )
        played = Played(prompt=first)
        while True:
            room = min(self.limits.turn_tokens, self.limits.tokens - len(played.response))
            ids, logprobs = await generate([*first, *played.response], room)
            played.write(ids, logprobs)
            if not ids or ids[-1] not in self.stops:  # cut off: nothing follows, and no stop token is made up
                played.ended = "tokens" if len(played.response) >= self.limits.tokens else "length"
                return played
            step = await episode.step(self._text(ids, self._params, "stop"))
            played.hear(step)
            if step.done:
                return played
            heard = self.delta.observation(step.messages)
            if ended := self._spent(played, len(heard), began):
                played.ended = ended
                return played
            played.read(heard)

    def _spent(self, played: Played, heard: int, began: float) -> Ending | None:
        """Return the budget that is used up, so that no further turn is possible; None if none is."""
        if played.turns >= self.limits.max_turns:
            return "turns"
        if len(played.response) + heard >= self.limits.tokens:
            return "tokens"
        return "seconds" if time.monotonic() - began > self.limits.max_seconds else None

"""Trajectories of several turns: the engine decodes and an environment replies, until one of them ends the trajectory.

Invariants:

- History is append-only token ids. Sampled tokens are fed back and trained on: no text of the policy is ever rendered
  or tokenised.
- An asyncio thread waits for environments, so none of them holds up decoding. A trajectory that waits holds no slot of
  the engine.
- A lost environment is never the policy's fault: its trajectory starts again from turn 0.
"""

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bebop.config.job import TaskConfig
from bebop.driver.protocols import Pace
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.engine_thread import EngineThread
from bebop.tasks.chat_delta import ChatDelta, GivenTokens
from bebop.tasks.environment import EnvironmentLost, EnvStep
from bebop.tasks.environment import seed as environment_seed
from bebop.tasks.episodes import Episode, Episodes
from bebop.trajectory import Completion, Ending, Prompt, SamplingParams, Trajectory, Turn

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5  # between two signs that the asyncio thread makes progress
CLOSE_SECONDS = 10.0  # for environments to end when the worker does


class _TooLong(Exception):
    """Error: the question of an environment leaves no room for a completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Result of one member of a group: its prompt and its trajectory, if there is one."""

    prompt: Prompt  # with the tokens that the environment began with
    trajectory: Trajectory | None  # None: its environments were lost too often, or its question is too long


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """State of a trajectory in progress."""

    history: list[int] = field(default_factory=list)  # prompt, completion, observation, completion, ...
    first: tuple[int, ...] = ()  # the prompt
    turns: list[Turn] = field(default_factory=list)
    reward: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)
    ended: Ending = "done"

    def add(self, step: EnvStep, name: str) -> None:
        """Add a step's reward and counts; raise ``UserError`` if the reward is no finite number."""
        if not math.isfinite(step.reward):
            raise UserError(f"environment {name}: a step gave reward {step.reward!r}: a finite number is wanted")
        self.reward += step.reward
        for key, value in step.counts.items():
            self.counts[key] = self.counts.get(key, 0.0) + value


class AgentLoop:
    """Plays trajectories concurrently; ``play`` may be called from any thread."""

    def __init__(
        self,
        thread: EngineThread,
        task: TaskConfig,
        max_length: int,
        delta: ChatDelta | GivenTokens,
        episodes: Episodes,
    ) -> None:
        """Make a loop for trajectories of at most ``max_length`` tokens, with prompt and observations."""
        self.thread, self.task, self.max_length, self.delta, self.episodes = thread, task, max_length, delta, episodes
        self.limits = task.environment
        self._open: set[asyncio.Task[Any]] = set()  # trajectories in progress
        self._lost = 0  # environments so far
        self._beat = time.monotonic()
        self._slowest = 0.0  # seconds between two beats
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="environments", daemon=True)

    def start(self) -> None:
        """Start the thread that runs the environments."""
        self._thread.start()

    def play(self, prompt: Prompt, params: SamplingParams, trace: bool = False) -> Future[Played]:
        """Start one trajectory; its tokens depend on ``params.seed`` and the tokens before, in all turns."""
        return asyncio.run_coroutine_threadsafe(self._play(prompt, params, trace), self._loop)

    def pace(self) -> Pace:
        """Return for how many seconds the thread made no progress; an environment that blocks it stops all others."""
        silent = time.monotonic() - self._beat - BEAT_SECONDS if self._open else 0.0
        limit = max(self.limits.step_seconds, self.limits.reset_seconds)
        return Pace(name="environments", silent=max(0.0, silent), slowest=self._slowest, limit=limit)

    def stop(self) -> None:
        """End all environments and the thread."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        beats = self._loop.create_task(self._keep_time())
        try:
            self._loop.run_forever()
        finally:
            beats.cancel()
            self._loop.run_until_complete(self._close())
            self._loop.close()

    async def _close(self) -> None:
        """End the trajectories in progress and their environments, but do not wait for ever."""
        for task in self._open:
            task.cancel()
        if self._open:
            await asyncio.wait(set(self._open), timeout=CLOSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.episodes.shutdown(), CLOSE_SECONDS)

    async def _keep_time(self) -> None:
        while True:
            now = time.monotonic()
            self._slowest, self._beat = max(self._slowest, now - self._beat - BEAT_SECONDS), now
            await asyncio.sleep(BEAT_SECONDS)

    async def _play(self, prompt: Prompt, params: SamplingParams, trace: bool) -> Played:
        """Play a trajectory, and start again when its environment is lost, at most ``max_restarts`` times."""
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        seconds = 0.0
        try:
            for restarts in range(self.limits.max_restarts + 1):
                episode, attempt = self.episodes.open(), _Attempt()
                try:
                    await self._turns(episode, attempt, prompt, params, trace)
                except _TooLong as error:  # another try would be as long
                    self._warn(prompt, error)
                    break
                except EnvironmentLost as lost:
                    seconds += episode.seconds
                    self._warn(prompt, lost)
                    continue
                finally:
                    await episode.close()
                trajectory = Trajectory(
                    turns=tuple(attempt.turns),
                    reward=attempt.reward,
                    ended=attempt.ended,
                    restarts=restarts,
                    environment_seconds=seconds + episode.seconds,
                    counts=attempt.counts,
                )
                return Played(prompt=replace(prompt, token_ids=attempt.first), trajectory=trajectory)
            return Played(prompt=prompt, trajectory=None)
        finally:
            self._open.discard(task)

    def _warn(self, prompt: Prompt, lost: Exception) -> None:
        """Log why an environment was lost: only the 1st, 2nd, 4th, 8th, ... loss."""
        self._lost += 1
        if self._lost & (self._lost - 1) == 0:
            name, number = self.task.name, self._lost
            log.warning("environment %s of prompt %d was lost, number %d here: %s", name, prompt.index, number, lost)

    async def _turns(
        self, episode: Episode, attempt: _Attempt, prompt: Prompt, params: SamplingParams, trace: bool
    ) -> None:
        """Play turns until the environment, the length of a turn or the budget ends the trajectory."""
        name = self.task.name
        messages = await episode.reset(prompt.item, environment_seed(self.task.seed, prompt.number))
        began = time.monotonic()  # now: the wait for an environment's process counts towards no limit
        attempt.first = tuple(self.delta.first(messages))
        if len(attempt.first) >= self.max_length:
            raise _TooLong(
                f"it begins with {len(attempt.first)} tokens, and max_length={self.max_length} leaves no room for a "
                "completion"
            )
        attempt.history, observation = list(attempt.first), list[int]()
        while True:
            completion = await self._decode(attempt.history, params, trace)
            if attempt.turns and completion.routing is not None:  # the turns before have theirs, but for the last token
                fresh = 1 + len(observation) + len(completion.token_ids)
                completion = replace(completion, routing=completion.routing[-fresh:].copy())
            turn = Turn(observation=np.array(observation, dtype=np.int64), completion=completion)
            attempt.turns.append(turn)
            attempt.history += completion.token_ids.tolist()
            if completion.finish_reason != "stop":  # cut off: nothing follows, and no stop token is made up
                full = len(attempt.history) >= self.max_length
                attempt.ended = "tokens" if full else "length"
                return
            step = await episode.step(completion if self.episodes.kind.tokens else completion.text)
            attempt.add(step, name)
            if step.done:
                return
            observation = self.delta.observation(step.messages)
            if ended := self._spent(attempt, len(observation), began):
                attempt.ended = ended
                return
            attempt.history += observation

    async def _decode(self, history: Sequence[int], params: SamplingParams, trace: bool) -> Completion:
        """Decode the next turn, with as many tokens as there is room for."""
        room = min(params.max_new_tokens, self.max_length - len(history))
        own = replace(params, max_new_tokens=room)
        request = Request(id=0, token_ids=tuple(history), params=own, trace=trace, park=True)
        return await asyncio.wrap_future(self.thread.submit([request])[0])

    def _spent(self, attempt: _Attempt, observed: int, began: float) -> Ending | None:
        """Return which budget leaves no further turn; None if there is room for one."""
        if len(attempt.turns) >= self.limits.max_turns:
            return "turns"
        if len(attempt.history) + observed >= self.max_length:
            return "tokens"
        return "seconds" if time.monotonic() - began > self.limits.max_seconds else None

"""A rollout worker: assignments in, answers with rewards out; decoding and rewards each in a thread of their own."""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.protocols import LINGER_SECONDS, Assignment, Pace, PartialGroup, WorkerReport
from bebop.rollout.agent_loop import AgentLoop, Played
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine import Engine, Request
from bebop.rollout.engine_thread import EngineThread, Stopped
from bebop.rollout.engines import engine_module
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.output import OUTPUT_LOG
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Completion, Prompt, SamplingParams, Trajectory, is_traced, same_beginning
from bebop.weight_manifest import CheckedWeights, verified

log = logging.getLogger(__name__)
Reward = Callable[[str, Prompt], float]


def make_worker(config: JobConfig) -> "RolloutWorker":
    """A rollout worker with the engine that the job asks for, not started."""
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)  # a fresh head must be the same everywhere
    engine, eos = engine_module(config).make(config)
    output = Path(config.runtime.dir, OUTPUT_LOG) if config.runtime.dir else None
    if config.task.turns:
        worker = RolloutWorker(engine, _rewarded_by_environment, config, eos)
        worker.agents = make_agent_loop(
            config.model, config.task, config.rollout.max_length, worker.thread, eos, output
        )
        return worker
    reward = make_reward(config.task, output)
    return RolloutWorker(engine, lambda text, prompt: checked(reward, text, prompt), config, eos)


def _rewarded_by_environment(text: str, prompt: Prompt) -> float:
    raise AssertionError("an environment gives the reward")


@dataclass(slots=True, kw_only=True)
class _Open:
    """An assignment whose answers are not all there yet."""

    prompt: Prompt  # with the tokens that its environment began with
    members: tuple[int, ...]
    # By member, those that are not reported yet; None: it was lost.
    answers: dict[int, Trajectory | None] = field(default_factory=dict)
    missing: int


class RolloutWorker:
    """Answers, rewards, reports; every public method but ``turn`` may be called from any thread."""

    def __init__(self, engine: Engine, reward: Reward, config: JobConfig, eos: tuple[int, ...]) -> None:
        """``eos``: the tokens that end an answer."""
        self.engine, self.reward, self.config, self.eos = engine, reward, config, eos
        self.thread = EngineThread(engine)
        self.agents: AgentLoop | None = None  # of a task whose answers are trajectories of several turns
        self._pulls = config.rollout.dealing == "pull"
        self._rewards = ThreadPoolExecutor(1, thread_name_prefix="reward")  # one: answers are rewarded as they end
        self._rewarding: float | None = None  # since when the reward in progress takes
        self._slowest_reward = 0.0  # seconds
        self._timeouts = 0  # rewards that hung, one after another
        self._news = threading.Condition()
        self._done: dict[int, _Open] = {}  # by id: those of which answers are to be reported
        self._whole = False  # an assignment among them is finished
        self._ended = 0  # answers to be reported
        self._decoding = 0  # answers that are queued or being decoded
        self._told: WorkerReport | None = None  # the report that is not acknowledged yet
        self._reports = 0
        self._error: BaseException | None = None

    def start(self) -> None:
        """Run in threads."""
        self.thread.start()
        if self.agents is not None:
            self.agents.start()

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue assignments; their answers enter the engine together."""
        parts = [_Open(prompt=a.prompt, members=a.members, missing=len(a.members)) for a in assignments]
        places = [(part, member) for part in parts for member in part.members]
        requests = [self._request(part.prompt, member) for part, member in places]
        with self._news:
            self._decoding += len(requests)
        for a in assignments:
            if a.past:
                self.thread.remember(a.prompt.token_ids, a.past).add_done_callback(self._heard)
        if self.agents is not None:
            for (part, member), request in zip(places, requests, strict=True):
                played = self.agents.play(part.prompt, request.params, request.trace)
                played.add_done_callback(partial(self._played, part, member))
            return
        for place, future in zip(places, self.thread.submit(requests), strict=True):
            future.add_done_callback(partial(self._answered, *place))

    def set_weights(self, weights: Mapping[str, Tensor] | CheckedWeights, version: int) -> None:
        """Queue new weights; they take effect in flight, before any prompt that is submitted later.

        ``DamagedWeights`` if they are not what was sent: the engine goes on with what it has.
        """
        weights = verified(weights) if isinstance(weights, CheckedWeights) else weights
        self.thread.load(weights, version).add_done_callback(self._heard)

    def configure(self, decoding: DecodingConfig) -> None:
        """Queue another way of decoding, between two cycles; answers in progress go on with it."""
        self.thread.configure(decoding).add_done_callback(self._heard)

    def collect(self, timeout: float, seen: int) -> WorkerReport:
        """What was finished, at once or within ``timeout`` seconds; raises what stopped the worker.

        An assignment is reported as soon as it is finished. Where prompts are pulled, answers go before the rest of
        theirs once they are as many as a group, or, within ``LINGER_SECONDS``, when a slot is free: room for others.
        ``seen``: the number of the newest report that arrived; a later one that was told already is told again.
        """
        with self._news:
            if self._told is not None and self._told.number > seen:
                return self._told
            self._told = None
            self._news.wait_for(lambda: self._due() or self._idle(), timeout)
            if self._idle():
                self._news.wait_for(self._due, min(timeout, LINGER_SECONDS))
            if self._error is not None:
                raise self._error
            self._reports += 1
            paces = (self.thread.pace(), self.agents.pace() if self.agents is not None else self._reward_pace())
            self._told = WorkerReport(
                number=self._reports, parts=self._parts(), paces=paces, **self.thread.progress()._asdict()
            )
            return self._told

    def _reward_pace(self) -> Pace:
        """Of the thread of rewards; what is queued waits for the reward in progress, and counts with it."""
        silent = 0.0 if self._rewarding is None else time.monotonic() - self._rewarding
        limit = self.config.task.reward_timeout
        return Pace(name="reward", silent=silent, slowest=self._slowest_reward, limit=limit)

    def _due(self) -> bool:
        """Whether there is something that must not wait."""
        many = self._pulls and self._ended >= self.config.trainer.group_size
        return self._whole or many or self._error is not None

    def _idle(self) -> bool:
        """Whether there are answers to report, and a slot that others could have."""
        return self._pulls and self._ended > 0 and self._decoding < self.config.rollout.slots

    def _parts(self) -> tuple[PartialGroup, ...]:
        """All answers that were not reported yet; without pulling, of finished assignments alone."""
        parts = []
        for key, part in list(self._done.items()):
            if part.missing and not self._pulls:
                continue
            del self._done[key]
            answers, part.answers = part.answers, {}
            members = tuple(m for m in part.members if m in answers)
            trajectories = tuple(answers[m] for m in members)
            parts.append(PartialGroup(prompt=part.prompt, members=members, trajectories=trajectories))
            self._ended -= len(members)
        self._whole = False
        return tuple(parts)

    def turn(self) -> None:
        """Take in what was queued, run one engine cycle, and wait for the rewards of what ended; without ``start``."""
        self.thread.turn()
        self._rewards.submit(int).result()  # done after all that were asked for before it

    def stop(self) -> None:
        """End the threads after the cycle, and the reward, in progress; environments at once."""
        if self.agents is not None:
            self.agents.stop()
        self.thread.stop()
        self._rewards.shutdown(wait=False, cancel_futures=True)

    def _request(self, prompt: Prompt, member: int) -> Request:
        """For one answer of a group; its number in the job goes by that of the prompt."""
        return Request(
            id=0,
            token_ids=prompt.token_ids,
            params=self._params(prompt.index * self.config.trainer.group_size + member),
            trace=is_traced(self.config.monitor.trace, prompt.index, self.config.trainer.groups_per_step),
        )

    def _params(self, answer: int) -> SamplingParams:
        """The distribution of one answer; its seed depends on the job's seed and the answer's number alone."""
        sampling = asdict(self.config.rollout.sampling)
        return SamplingParams(**sampling, stop_token_ids=self.eos, seed=(self.config.runtime.seed << 40) + answer)

    def _heard(self, future: Future[Any]) -> bool:
        """Whether all went well; if not, ``collect`` raises it."""
        if future.cancelled():  # the worker ends
            return False
        error = future.exception()
        if error is not None and not isinstance(error, Stopped):
            self._fail(error)
        return error is None

    def _fail(self, error: BaseException) -> None:
        with self._news:
            self._error = self._error or error
            self._news.notify_all()
        self.thread.stop()

    def _answered(self, part: _Open, member: int, future: Future[Completion]) -> None:
        """Have the reward of an answer computed, beside decoding."""
        if self._heard(future):
            with self._news:
                self._decoding -= 1
            self._rewards.submit(self._close, part, member, future.result())

    def _close(self, part: _Open, member: int, completion: Completion) -> None:
        """Put an answer with its reward to the others of its assignment."""
        self._rewarding = began = time.monotonic()
        try:
            trajectory = self._score(completion, part.prompt)
        except BaseException as error:  # not swallowed: whoever collects next gets it
            self._fail(error)
            return
        self._slowest_reward, self._rewarding = max(self._slowest_reward, time.monotonic() - began), None
        self._end(part, member, trajectory)

    def _played(self, part: _Open, member: int, future: Future[Played]) -> None:
        """Take in a trajectory that its environment has rewarded."""
        if not self._heard(future):
            return
        played = future.result()
        with self._news:
            self._decoding -= 1
        if played.prompt.token_ids:
            if part.prompt.token_ids:
                try:
                    same_beginning(part.prompt, played.prompt)
                except UserError as error:
                    self._fail(error)
                    return
            part.prompt = played.prompt
        self._end(part, member, played.trajectory)

    def _end(self, part: _Open, member: int, trajectory: Trajectory | None) -> None:
        """Put what became of a member to the others of its assignment."""
        with self._news:
            part.answers[member] = trajectory
            part.missing -= 1
            self._done[id(part)] = part
            self._ended += 1
            self._whole = self._whole or not part.missing
            self._news.notify_all()

    def _score(self, completion: Completion, prompt: Prompt) -> Trajectory:
        """The answer with its reward: 0, and marked, if the reward function hung.

        That does not end a job, since one answer or one prompt may be at fault; ``UserError`` once two prompts' worth
        of answers hung in a row, or a whole batch.
        """
        try:
            reward = self.reward(completion.text, prompt)
        except RewardTimeout as late:
            self._timeouts += 1
            if self._timeouts == 1:
                log.warning("%s: reward 0, counted in reward/timeouts", late)
            trainer = self.config.trainer
            if self._timeouts >= min(2, trainer.groups_per_step) * trainer.group_size:
                why = f"{late}, like the {self._timeouts - 1} answers before it"
                raise UserError(f"{why}: mend the function, or raise task.reward_timeout") from late
            return Trajectory.single(completion=completion, reward=0.0, timed_out=True)
        self._timeouts = 0
        return Trajectory.single(completion=completion, reward=reward)

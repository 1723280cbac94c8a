"""A rollout worker: it gets assignments and returns completions with rewards.

Decoding, rewards and environments have a thread each. The next ``collect`` raises an error in any of them.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.broadcast import Meeting, WeightReceiver
from bebop.driver.protocols import LINGER_SECONDS, Assignment, Pace, WorkerReport
from bebop.driver.report_queue import OpenAssignment, ReportQueue
from bebop.driver.weights import CheckedWeights, SharedReader, SharedWeights, verify_weights
from bebop.errors import UserError
from bebop.rollout.agent_loop import AgentLoop, Played
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine import Engine, Request
from bebop.rollout.engine_thread import EngineThread, Stopped
from bebop.rollout.engines import engine_module
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.output import OUTPUT_LOG
from bebop.tasks.rewards import Answer, HeldOutReward, RewardFunction, make_reward, scorer
from bebop.trajectory import Completion, Prompt, SamplingParams, Trajectory, is_traced, same_beginning

log = logging.getLogger(__name__)
TRACED_STEPS = 16  # a GPU traces a prompt of one step in so many
HELD_OUT_SEEDS = 1 << 39  # seeds of evaluations within a job's 2^40, above those of its training


def make_worker(config: JobConfig) -> "RolloutWorker":
    """Make a rollout worker with the configured engine; it is not started."""
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
    if config.evaluation.every:
        reward = HeldOutReward(scorer(reward), scorer(make_reward(config.held_out_task, output)))
    return RolloutWorker(engine, reward, config, eos)


def _rewarded_by_environment(text: str, prompt: Prompt) -> float:
    raise AssertionError("an environment gives the reward")


class RolloutWorker:
    """Decodes assignments, rewards completions and reports them; thread-safe, except for ``turn``."""

    def __init__(self, engine: Engine, reward: RewardFunction, config: JobConfig, eos: tuple[int, ...]) -> None:
        """Make a worker; ``eos`` are the tokens that end a completion."""
        self.engine, self.reward, self.config, self.eos = engine, scorer(reward), config, eos
        self.thread = EngineThread(engine)
        # While one row is traced, no cycle of the rows beside it overlaps with the next or is a CUDA graph.
        gpu = engine_module(config).EMBEDDED and torch.cuda.is_available() and config.model.device != "cpu"
        self.traced_groups = config.trainer.groups_per_step * (TRACED_STEPS if gpu else 1)
        self.agents: AgentLoop | None = None  # for a task whose trajectories have several turns
        self._rewards = ThreadPoolExecutor(1, thread_name_prefix="reward")  # one: in the order in which they end
        self._held_out_task = config.held_out_task if config.evaluation.every else config.task
        # Training's (False) and held-out ones (True), each in the order in which they ended.
        self._unrewarded: dict[bool, deque[tuple[OpenAssignment, int, Completion]]] = {False: deque(), True: deque()}
        self._rewarding: float | None = None  # when the reward in progress began
        self._limit = config.task.reward_timeout  # seconds that its calls may take, one after another
        self._slowest_reward = 0.0  # seconds
        self._timeouts = 0  # rewards that hung, one after another
        cuda = config.model.device != "cpu" and torch.cuda.is_available()
        self._shared = SharedReader(pinned=cuda)
        self._receiver = WeightReceiver(torch.device("cuda" if cuda else "cpu"))
        self._changed = threading.Condition()  # guards what follows
        self._queue = ReportQueue(
            pulls=config.rollout.dealing == "pull", group_size=config.trainer.group_size, slots=config.rollout.slots
        )
        self._unacknowledged: WorkerReport | None = None
        self._reports = 0
        self._error: BaseException | None = None

    def start(self) -> None:
        """Start the threads of decoding and environments."""
        self.thread.start()
        if self.agents is not None:
            self.agents.start()

    def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue assignments; their requests enter the engine together."""
        with self._changed:
            parts = [self._queue.open(assignment) for assignment in assignments]
        members = [(part, member) for part in parts for member in part.members]
        requests = [self._request(part.prompt, member) for part, member in members]
        for a in assignments:
            if a.past:
                self.thread.remember(a.prompt.token_ids, a.past).add_done_callback(self._succeeded)
        if self.agents is not None:
            for (part, member), request in zip(members, requests, strict=True):
                played = self.agents.play(part.prompt, request.params, request.trace)
                played.add_done_callback(partial(self._take_played, part, member))
            return
        for (part, member), future in zip(members, self.thread.submit(requests), strict=True):
            future.add_done_callback(partial(self._take_decoded, part, member))

    def set_weights(self, weights: Mapping[str, Tensor] | CheckedWeights | SharedWeights, version: int) -> None:
        """Queue new weights; they take effect in flight, before any prompt that is submitted later.

        They are checked, and copied to the engine's device, while it goes on decoding. Raise ``DamagedWeights`` if they
        differ from the weights sent; the engine then keeps its own.
        """
        checked, release = self.received(weights)
        loaded = self.thread.load(self.engine.stage(checked), version)
        loaded.add_done_callback(self._succeeded)
        loaded.add_done_callback(lambda _: release())

    def received(
        self, weights: Mapping[str, Tensor] | CheckedWeights | SharedWeights
    ) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
        """Return checked weights, and a function to call once they have been read; raise ``DamagedWeights``."""
        if isinstance(weights, SharedWeights):
            return self._shared.open(weights)
        if isinstance(weights, CheckedWeights):
            weights = verify_weights(weights)
        return weights, lambda: None

    def receive_weights(self, meeting: Meeting, rank: int, sent: SharedWeights) -> SharedWeights | str:
        """Receive a broadcast, while the engine goes on decoding; return its place in memory, or why it failed."""
        return self._receiver.receive(meeting, rank, sent)

    def configure(self, decoding: DecodingConfig) -> None:
        """Queue a change of the decoding configuration, between two cycles; completions in progress go on with it."""
        self.thread.configure(decoding).add_done_callback(self._succeeded)

    def collect(self, timeout: float, seen: int) -> WorkerReport:
        """Return finished completions, at once or within ``timeout`` seconds; raise the error that stopped the worker.

        ``seen`` is the number of the newest report that arrived; a later report is returned again.
        """
        with self._changed:
            if self._unacknowledged is not None and self._unacknowledged.number > seen:
                return self._unacknowledged
            self._unacknowledged = None
            self._changed.wait_for(lambda: self._due() or self._queue.starving, timeout)
            if self._queue.starving:
                self._changed.wait_for(self._due, min(timeout, LINGER_SECONDS))
            if self._error is not None:
                raise self._error
            self._reports += 1
            paces = (self.thread.pace(), self.agents.pace() if self.agents is not None else self._reward_pace())
            self._unacknowledged = WorkerReport(
                number=self._reports, parts=self._queue.take(), paces=paces, **self.thread.progress()._asdict()
            )
            return self._unacknowledged

    def _due(self) -> bool:
        return self._queue.due or self._error is not None

    def _reward_pace(self) -> Pace:
        """Return the pace of the reward thread; completions that wait for the reward in progress count with it."""
        silent = 0.0 if self._rewarding is None else time.monotonic() - self._rewarding
        return Pace(name="reward", silent=silent, slowest=self._slowest_reward, limit=self._limit)

    def turn(self) -> None:
        """Serve the queue, run one engine cycle, and wait for the rewards of ended completions.

        It is for use without ``start``.
        """
        self.thread.turn()
        self._rewards.submit(int).result()  # done after all that were asked for before it

    def stop(self) -> None:
        """End the threads after the cycle and the reward in progress, and environments at once."""
        if self.agents is not None:
            self.agents.stop()
        self.thread.stop()
        self._rewards.shutdown(wait=False, cancel_futures=True)

    def _request(self, prompt: Prompt, member: int) -> Request:
        """Make the request for one completion of a group, numbered in the job by its prompt and member.

        A completion of an evaluation has the same seed each time: evaluations differ by their weights alone.
        """
        own = self.config.evaluation
        if prompt.held_out:
            number = HELD_OUT_SEEDS + (-1 - prompt.index) * own.completions + member
            return Request(
                id=0,
                token_ids=prompt.token_ids,
                params=self._params(number, 0.0 if own.is_greedy(member) else own.temperature),
            )
        return Request(
            id=0,
            token_ids=prompt.token_ids,
            params=self._params(prompt.index * self.config.trainer.group_size + member),
            trace=is_traced(self.config.monitor.trace, prompt.index, self.traced_groups),
        )

    def _params(self, completion: int, temperature: float | None = None) -> SamplingParams:
        """Return the sampling parameters of one completion, at the job's temperature or another one.

        Its seed depends on the job's seed and its number only.
        """
        sampling = asdict(self.config.rollout.sampling)
        sampling |= {} if temperature is None else {"temperature": temperature}
        return SamplingParams(**sampling, stop_token_ids=self.eos, seed=(self.config.runtime.seed << 40) + completion)

    def _succeeded(self, future: Future[Any]) -> bool:
        """Return whether a call to the engine succeeded; if not, ``collect`` raises its error."""
        if future.cancelled():  # the worker ends
            return False
        error = future.exception()
        if error is not None and not isinstance(error, Stopped):
            self._fail(error)
        return error is None

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self.thread.stop()

    def _take_decoded(self, part: OpenAssignment, member: int, future: Future[Completion]) -> None:
        """Queue a completion for its reward, while the engine goes on decoding."""
        if self._succeeded(future):
            with self._changed:
                self._queue.decoding -= 1
            self._unrewarded[part.prompt.held_out].append((part, member, future.result()))
            self._rewards.submit(self._close, part.prompt.held_out)

    def _close(self, held_out: bool) -> None:
        """Reward the completion of its kind that ended first, and queue it for the next report.

        If the reward takes batches, further completions that wait are rewarded with it, all of one kind: the reward of
        held-out ones may have other limits. It is called once for each completion, so that none is left when batches
        were smaller than they may be.
        """
        task, waiting = self._held_out_task if held_out else self.config.task, self._unrewarded[held_out]
        most = task.reward_batch if self.reward.batched else 1
        batch = [waiting.popleft() for _ in range(min(most, len(waiting)))]
        if not batch:
            return
        # A batch that hangs is asked again one by one.
        self._limit = task.reward_timeout * (1 if len(batch) == 1 else 1 + len(batch))
        self._rewarding = began = time.monotonic()
        try:
            trajectories = self._score([(part.prompt, completion) for part, _, completion in batch])
        except BaseException as error:  # not swallowed: whoever collects next gets it
            self._fail(error)
            return
        self._slowest_reward, self._rewarding = max(self._slowest_reward, time.monotonic() - began), None
        for (part, member, _), trajectory in zip(batch, trajectories, strict=True):
            self._finish(part, member, trajectory)

    def _take_played(self, part: OpenAssignment, member: int, future: Future[Played]) -> None:
        """Queue a trajectory, with the reward of its environment, for the next report."""
        if not self._succeeded(future):
            return
        played = future.result()
        with self._changed:
            self._queue.decoding -= 1
        if played.prompt.token_ids:
            if part.prompt.token_ids:
                try:
                    same_beginning(part.prompt, played.prompt)
                except UserError as error:
                    self._fail(error)
                    return
            part.prompt = played.prompt
        self._finish(part, member, played.trajectory)

    def _finish(self, part: OpenAssignment, member: int, trajectory: Trajectory | None) -> None:
        with self._changed:
            self._queue.finish(part, member, trajectory)
            self._changed.notify_all()

    def _score(self, answers: Sequence[tuple[Prompt, Completion]]) -> list[Trajectory]:
        """Return completions with their rewards; a reward is 0, and marked, if the reward function hung.

        One hang does not end a job, since one completion or one prompt may be at fault. Raise ``UserError`` once as
        many completions hung in a row as two prompts have, or a whole batch.
        """
        scores = self.reward.scores([Answer(c.text, prompt, tuple(c.token_ids.tolist())) for prompt, c in answers])
        return [
            self._late(completion, score)
            if isinstance(score, RewardTimeout)
            else self._in_time(completion, score.value, score.parts)
            for (_, completion), score in zip(answers, scores, strict=True)
        ]

    def _in_time(self, completion: Completion, reward: float, parts: Mapping[str, float | None]) -> Trajectory:
        self._timeouts = 0
        return Trajectory.single(completion=completion, reward=reward, parts=parts)

    def _late(self, completion: Completion, late: RewardTimeout) -> Trajectory:
        self._timeouts += 1
        if self._timeouts == 1:
            log.warning("%s: reward 0, counted in reward/timeouts", late)
        trainer = self.config.trainer
        if self._timeouts >= min(2, trainer.groups_per_step) * trainer.group_size:
            why = f"{late}, like the {self._timeouts - 1} completions before it"
            raise UserError(f"{why}: mend the function, or raise task.reward_timeout") from late
        return Trajectory.single(completion=completion, reward=0.0, timed_out=True)

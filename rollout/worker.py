"""A rollout worker: prompts in, groups with rewards out; decoding and rewards each in a thread of their own."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.protocols import WorkerReport
from bebop.rollout.engine import Engine, Request
from bebop.rollout.engines import engine_module
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Completion, Group, Prompt, SamplingParams, Trajectory

log = logging.getLogger(__name__)
Reward = Callable[[str, Prompt], float]
Weights = Mapping[str, Tensor]


def make_worker(config: JobConfig) -> "RolloutWorker":
    """A rollout worker with the engine that the job asks for, not started."""
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)  # a fresh head must be the same everywhere
    engine, eos = engine_module(config).make(config)
    reward = make_reward(config.task)
    return RolloutWorker(engine, lambda text, prompt: checked(reward, text, prompt), config, eos)


@dataclass(slots=True, kw_only=True)
class _Open:
    """A group whose answers are not all there yet."""

    prompt: Prompt
    answers: dict[int, Trajectory] = field(default_factory=dict)


class RolloutWorker:
    """Drives an engine; every public method but ``turn`` may be called from any thread."""

    def __init__(self, engine: Engine, reward: Reward, config: JobConfig, eos: tuple[int, ...]) -> None:
        """``eos``: the tokens that end an answer."""
        self.engine, self.reward, self.config, self.eos = engine, reward, config, eos
        self._news = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()
        self._open: dict[int, _Open] = {}
        self._rewards = ThreadPoolExecutor(1, thread_name_prefix="reward")
        self._scoring: deque[tuple[int, Future[Trajectory]]] = deque()  # answers whose reward is being computed
        self._timeouts = 0  # rewards that hung, one after another
        self._done: list[Group] = []
        self._busy = self._swap = 0.0
        self._loaded = (engine.version, engine.head)
        self._error: BaseException | None = None
        self._stop = False

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Queue prompts; each becomes one group."""
        self._post(partial(self._begin, tuple(prompts)))

    def set_weights(self, weights: Weights, version: int) -> None:
        """Queue new weights; they take effect in flight, before any prompt that is submitted later."""
        self._post(partial(self._take_weights, weights, version))

    def configure(self, decoding: DecodingConfig) -> None:
        """Queue another way of decoding, between two cycles; answers in progress go on with it."""
        self._post(lambda: self.engine.configure(decoding))

    def _post(self, call: Callable[[], None]) -> None:
        """Have a call made by the next turn, after those that are queued."""
        with self._news:
            self._inbox.append(call)
            self._news.notify_all()

    def collect(self, timeout: float) -> WorkerReport:
        """Finished groups, as soon as there are some or after ``timeout`` seconds; raises what stopped the worker."""
        with self._news:
            self._news.wait_for(lambda: self._done or self._error is not None, timeout)
            if self._error is not None:
                raise self._error
            groups, self._done = tuple(self._done), []
            version, head = self._loaded
            report = WorkerReport(groups=groups, busy=self._busy, swap=self._swap, version=version, head=head)
            self._busy = self._swap = 0.0
        return report

    def run(self) -> None:
        """Work until ``stop``: the body of the decoding thread."""
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._stop or self._inbox or self.engine.unfinished or self._scored())
                    if self._stop:
                        return
                self.turn(settle=False)
        except BaseException as error:
            # Not swallowed: whoever collects next gets it.
            with self._news:
                self._error = error
                self._news.notify_all()

    def start(self) -> None:
        """Run in a thread."""
        threading.Thread(target=self.run, name="decode", daemon=True).start()

    def stop(self) -> None:
        """End the thread after the cycle in progress."""
        with self._news:
            self._stop = True
            self._news.notify_all()
        self._rewards.shutdown(wait=False, cancel_futures=True)

    def turn(self, settle: bool = True) -> None:
        """Take in what was queued, run one engine cycle, close the groups that are complete.

        ``settle``: wait for the rewards of all answers that ended; without, they come with a later turn.
        """
        while self._inbox:
            self._inbox.popleft()()
        started = time.perf_counter()
        ended = self.engine.step()
        with self._news:
            self._busy += time.perf_counter() - started
        for finished in ended:
            self._finish(finished.id, finished.completion)
        if settle:
            wait([future for _, future in self._scoring])
        while self._scored():
            self._close(*self._scoring.popleft())

    def _take_weights(self, weights: Weights, version: int) -> None:
        started = time.perf_counter()
        self.engine.load_weights(weights, version)
        with self._news:
            self._swap += time.perf_counter() - started
            self._loaded = (self.engine.version, self.engine.head)

    def _begin(self, prompts: Sequence[Prompt]) -> None:
        size = self.config.trainer.group_size
        for prompt in prompts:
            self._open[prompt.index] = _Open(prompt=prompt)
            for answer in range(prompt.index * size, (prompt.index + 1) * size):
                self.engine.add(Request(id=answer, token_ids=prompt.token_ids, params=self._params(answer)))

    def _params(self, answer: int) -> SamplingParams:
        """The distribution of one answer; its seed depends on the job's seed and the answer's number alone."""
        sampling = self.config.rollout.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=self.eos,
            stop=sampling.stop,
            seed=(self.config.runtime.seed << 40) + answer,
        )

    def _finish(self, number: int, completion: Completion) -> None:
        """Have the reward of an answer computed, beside decoding."""
        prompt = self._open[number // self.config.trainer.group_size].prompt
        future = self._rewards.submit(self._score, completion, prompt)
        self._scoring.append((number, future))
        future.add_done_callback(self._notice)

    def _notice(self, _: Future[Trajectory]) -> None:
        with self._news:
            self._news.notify_all()

    def _scored(self) -> bool:
        """Whether the reward of the answer that ended first is there."""
        return bool(self._scoring) and self._scoring[0][1].done()

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
            return Trajectory(completion=completion, reward=0.0, timed_out=True)
        self._timeouts = 0
        return Trajectory(completion=completion, reward=reward)

    def _close(self, number: int, scored: Future[Trajectory]) -> None:
        """Put a rewarded answer into its group, and hand the group over once it is complete."""
        index, member = divmod(number, self.config.trainer.group_size)
        group = self._open[index]
        group.answers[member] = scored.result()
        if len(group.answers) < self.config.trainer.group_size:
            return
        del self._open[index]
        trajectories = tuple(group.answers[m] for m in sorted(group.answers))
        with self._news:
            self._done.append(Group(prompt=group.prompt, trajectories=trajectories))
            self._news.notify_all()

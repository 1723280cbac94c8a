"""A rollout worker: prompts in, groups with rewards out, decoding all the while in a thread of its own."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from bebop.config import DecodingConfig, JobConfig
from bebop.rollout.decoding.systems import make_system
from bebop.rollout.engine import Engine, Request
from bebop.trajectory import Completion, Group, Prompt, SamplingParams, Trajectory

Reward = Callable[[str, Prompt], float]
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker has done since it was last asked."""

    groups: tuple[Group, ...]
    tokens: int  # generated in those groups
    busy: float  # seconds spent decoding
    swap: float  # seconds spent taking in weights
    version: int  # of the weights in use
    head: str  # fingerprint of the MTP head in use


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
        self._inbox: deque[Sequence[Prompt] | tuple[Weights, int] | DecodingConfig] = deque()
        self._open: dict[int, _Open] = {}
        self._done: list[Group] = []
        self._busy = self._swap = 0.0
        self._loaded = (engine.version, engine.head)
        self._error: BaseException | None = None
        self._stop = False

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """Queue prompts; each becomes one group."""
        with self._news:
            self._inbox.append(tuple(prompts))
            self._news.notify_all()

    def set_weights(self, weights: Weights, version: int) -> None:
        """Queue new weights; they take effect in flight, before any prompt that is submitted later."""
        with self._news:
            self._inbox.append((weights, version))
            self._news.notify_all()

    def set_decoding(self, decoding: DecodingConfig) -> None:
        """Queue another way of decoding, between two cycles; answers in progress go on with it."""
        with self._news:
            self._inbox.append(decoding)
            self._news.notify_all()

    def collect(self, timeout: float) -> WorkerReport:
        """Finished groups, as soon as there are some or after ``timeout`` seconds; raises what stopped the worker."""
        with self._news:
            self._news.wait_for(lambda: self._done or self._error is not None, timeout)
            if self._error is not None:
                raise self._error
            groups, self._done = tuple(self._done), []
            tokens = sum(len(t.completion.token_ids) for g in groups for t in g.trajectories)
            version, head = self._loaded
            report = WorkerReport(
                groups=groups, tokens=tokens, busy=self._busy, swap=self._swap, version=version, head=head
            )
            self._busy = self._swap = 0.0
        return report

    def run(self) -> None:
        """Work until ``stop``: the body of the decoding thread."""
        try:
            while True:
                with self._news:
                    self._news.wait_for(lambda: self._stop or self._inbox or self.engine.unfinished)
                    if self._stop:
                        return
                self.turn()
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

    def turn(self) -> None:
        """Take in what was queued, run one engine cycle, close the groups that are complete."""
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, DecodingConfig):
                self.engine.set_system(make_system(message))
            elif isinstance(message, tuple) and len(message) == 2 and isinstance(message[1], int):
                self._take_weights(*message)
            else:
                for prompt in message:
                    self._begin(prompt)
        started = time.perf_counter()
        for finished in self.engine.step():
            self._finish(finished.id, finished.completion)
        with self._news:
            self._busy += time.perf_counter() - started

    def _take_weights(self, weights: Weights, version: int) -> None:
        started = time.perf_counter()
        self.engine.load_weights(weights, version)
        with self._news:
            self._swap += time.perf_counter() - started
            self._loaded = (self.engine.version, self.engine.head)

    def _begin(self, prompt: Prompt) -> None:
        size = self.config.trainer.group_size
        self._open[prompt.index] = _Open(prompt=prompt)
        for member in range(size):
            params = self._params(prompt.index * size + member)
            self.engine.add(Request(id=prompt.index * size + member, token_ids=prompt.token_ids, params=params))

    def _params(self, answer: int) -> SamplingParams:
        """The law of one answer; its seed depends on the job's seed and the answer's number alone."""
        law = self.config.rollout.sampling
        return SamplingParams(
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            min_p=law.min_p,
            repetition_penalty=law.repetition_penalty,
            max_new_tokens=law.max_new_tokens,
            stop_token_ids=self.eos,
            stop=law.stop,
            seed=(self.config.runtime.seed << 40) + answer,
        )

    def _finish(self, number: int, completion: Completion) -> None:
        index, member = divmod(number, self.config.trainer.group_size)
        group = self._open[index]
        reward = self.reward(completion.text, group.prompt)
        group.answers[member] = Trajectory(completion=completion, reward=reward)
        if len(group.answers) < self.config.trainer.group_size:
            return
        del self._open[index]
        trajectories = tuple(group.answers[m] for m in sorted(group.answers))
        with self._news:
            self._done.append(Group(prompt=group.prompt, trajectories=trajectories))
            self._news.notify_all()

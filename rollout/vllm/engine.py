"""vLLM as a ``Server`` of the ``ServedEngine``: a thread that steps it while requests are open, and its self-test."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any, TypeVar

import torch
from torch import Tensor

from bebop.errors import UserError, one_line
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.heartbeat import PATIENCE
from bebop.rollout.served_engine import OutputChunk
from bebop.rollout.served_weights import ToUpdate, WeightWatch
from bebop.rollout.vllm.arguments import refuse_sampling
from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.steps import Verified
from bebop.rollout.vllm.suffixes import Suffixes
from bebop.rollout.vllm.transfer import WeightTransfer
from bebop.runtime.watchdog import Deadline, SuspendAwareClock
from bebop.trajectory import SamplingParams

T = TypeVar("T")


class VllmServer:
    """vLLM as a ``Server``. Completions are not replayable: all requests share one generator, whatever their seeds."""

    name = "vLLM"
    redrawn = 0  # a request that is lost ends the engine

    def __init__(
        self,
        core: Core,
        transfer: WeightTransfer,
        head: Mapping[str, Tensor],
        *,
        sampled: bool,
        recompute: bool,
        to_update: ToUpdate,
        dtype: torch.dtype,
        threads: int,
        hang_after: float,
    ) -> None:
        """Keep the arguments for serving a job; ``start`` makes the engine ready.

        Args:
            core: vLLM's engine.
            transfer: how weights travel.
            head: the checkpoint's MTP head, under the names of ``MTPHead``, if it drafts; else empty.
            sampled: whether drafts are sampled from their distributions.
            recompute: as ``rollout.on_update``.
            to_update: gives weights the names that vLLM reads.
            dtype: of the engine's weights.
            threads: that it computes with.
            hang_after: as in ``runtime``.
        """
        self.core, self.transfer, self.sampled, self.recompute = core, transfer, sampled, recompute
        self._to_update = to_update
        self._stored = {f"mtp.{name}": tensor for name, tensor in head.items()}
        self._watch = WeightWatch(dtype)
        self._thread = ThreadPoolExecutor(1, "vllm", lambda: torch.set_num_threads(threads))
        self._answers: dict[str, asyncio.Future[OutputChunk]] = {}
        self._keys: dict[int, str] = {}  # the current name of each request in vLLM
        self._steps: asyncio.Task[None] | None = None
        self._deadline = Deadline(PATIENCE * hang_after)
        self._call: tuple[str, SuspendAwareClock] | None = None  # in progress, and for how long
        self._why: str | None = None  # why it is dead

    @property
    def recomputes(self) -> bool:
        """Return whether new weights recompute running completions' keys and values; else these stay."""
        return self.recompute

    async def start(self) -> None:
        """Load the model, without a deadline: its time is no measure for later calls either."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self.core.start)

    async def test(self) -> None:
        """Run the self-test, then keep the current checksums."""
        await self._run("test", lambda: self_test(self.core, sampled=self.sampled))
        draft = self._to_update(self._stored, 0).draft if self._stored else {}
        self._watch.begin(await self._run("checksums", self.core.checksums), draft)

    def check(self, request: Request) -> None:
        """Raise ``UserError`` for a request that vLLM cannot serve."""
        refuse_sampling(request.params, self.core.drafts > 0)

    async def generate(self, request: Request, written: Sequence[int]) -> OutputChunk:
        """Continue a request after the tokens ``written``, to its end or until it is cut."""
        fresh = request.params.max_new_tokens - len(written)
        add = partial(self.core.add, [*request.token_ids, *written], request.params, fresh)
        key = await self._run("add", add)
        self._keys[request.id] = key
        self._answers[key] = asyncio.get_running_loop().create_future()
        if self._steps is None or self._steps.done():
            self._steps = asyncio.create_task(self._stepping())
        try:
            return await self._answers[key]
        finally:
            self._keys.pop(request.id, None)
            self._answers.pop(key, None)

    async def _stepping(self) -> None:
        """Run steps while there are requests; an error in a step goes to all of them."""
        try:
            while self._answers:
                for key, part in await self._run("step", self.core.step):
                    self._answers[key].set_result(part)
                await asyncio.sleep(0)  # those that ended are taken out before the next look
        except BaseException as error:
            self._why = self._why or one_line(error)
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else EngineDied("vLLM was ended"))
            if not isinstance(error, Exception):
                raise

    async def abort(self, id: int) -> None:
        """Cut a request, if it has reached vLLM."""
        key = self._keys.get(id)
        part = None if key is None else await self._run("abort", partial(self.core.abort, key))
        if key in self._answers and part is not None and not self._answers[key].done():
            self._answers[key].set_result(part)

    async def load(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights between two steps. A load is one call, so that no step sees half of it."""
        load = self._to_update(weights, version)
        self.transfer.refuse(load)
        marks = self._watch.marks(load)

        def replace() -> None:
            self.transfer.send(self.core, load)
            self._watch.verify(self.core.checksums(), load, marks)
            self.core.loaded(version, self.recompute)

        await self._run("load", replace)

    async def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Add past completions of a prompt to the tree of vLLM's suffix decoding."""
        if (past := self.core.past) is not None:
            await self._run("remember", partial(past.remember, prompt, answers))

    async def rest(self) -> None:
        """Do nothing: vLLM keeps its memory."""

    def dead(self) -> str | None:
        """Return why vLLM counts as dead: a step that failed, or a call that takes too long; None: it does not."""
        call = self._call
        if self._why is None and call is not None:
            name, clock = call
            clock.tick()
            if (seconds := clock.read()) > self._deadline.limit(name):
                self._why = f"a {name} of vLLM takes {seconds:.0f} s"
        return self._why

    async def close(self) -> None:
        """End vLLM. A call that hangs keeps its memory until this process ends."""
        if self._steps is not None:
            self._steps.cancel()
        if self._call is None or self.dead() is None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.core.close)
        self._thread.shutdown(wait=False)

    async def _run(self, name: str, call: Callable[[], T]) -> T:
        """Run a call in vLLM's thread, after all calls before it."""

        def timed() -> T:
            clock = SuspendAwareClock()
            self._call = (name, clock)
            try:
                return call()
            finally:
                self._deadline.record(name, clock.read())
                self._call = None

        return await asyncio.get_running_loop().run_in_executor(self._thread, timed)


# ---- the self-test

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # with something to look up
TOP = 4  # tokens of a place whose log-probs are compared
# Temperatures of completions that are decoded side by side and end one after another. If parameters are not written to
# the memory that is read, the memory of the step before may hold those of the same rows.
TEMPERATURES = (0.5, 2.0, 2.0, 0.5, 0.5, 2.0)
CYCLES = (2, 3, 4, 5, 6, 7)
TOLERANCE = 0.1  # of the slope; half precision moves it by some hundredths
FLAT = 1e-6  # squares of differences that say nothing of a temperature
Row = Mapping[int, Any]  # token -> vLLM's Logprob


def self_test(core: Core, *, sampled: bool) -> None:
    """Raise ``UserError`` if vLLM does not sample and draft as requested; ``sampled``: drafts have to be samples.

    The test uses vLLM's own completions before the first prompt, since vLLM fails silently: sampling parameters may not
    arrive where drafts are verified (vllm#55005), draft distributions may not take part, and a head may draft nothing.
    """
    answers, seen = _answers(core)
    for temperature in sorted(set(TEMPERATURES)):
        found = [slope(rows, _scored(core, ids)) for t, ids, rows in answers if t == temperature]
        products, squares = sum(a for a, _ in found), sum(b for _, b in found)
        inverse = products / max(squares, FLAT)
        if squares > FLAT and not abs(temperature * inverse - 1) <= TOLERANCE:  # NaN is no temperature either
            raise UserError(
                f"vLLM decodes as if temperature={temperature} were {1 / inverse if inverse else inf:.3g}: sampling "
                "parameters do not arrive in this version; see docs/upstream.md"
            )
    if not core.drafts:
        return
    if core.past is not None:
        if not _accepted_drafts_of_past(core, core.past):
            raise UserError("vLLM drafts nothing of a past completion that it was told; use rollout=torch")
    elif not seen:
        raise UserError("vLLM verified no draft: the checkpoint's head does not draft there; use rollout=torch")
    if sampled and not all(one.sampled for one in seen):
        raise UserError("vLLM verifies drafts without the distributions they were drawn from; use rollout=torch")


def _answers(core: Core) -> tuple[list[tuple[float, list[int], list[Row]]], list[Verified]]:
    """Return temperature, tokens and log-probs of some completions, and the steps in which drafts were verified."""
    most, open_, seen = core.arguments["max_model_len"] - len(PROMPT) - 1, {}, list[Verified]()
    for temperature, cycles in zip(TEMPERATURES, CYCLES, strict=True):
        fresh = min(cycles * (core.drafts + 1), most)
        params = SamplingParams(temperature=temperature, max_new_tokens=fresh)
        open_[core.add(PROMPT, params, fresh, logprobs=TOP)] = (temperature, list[int](), list[Row]())
    waiting = set(open_)
    while waiting:
        outputs, record = core.outputs()
        seen += record.verified().values()
        for output in outputs:
            _, ids, rows = open_[output.request_id]
            ids += output.outputs[0].token_ids
            rows += output.outputs[0].logprobs
            if output.finished:
                waiting.discard(output.request_id)
    for key in open_:
        core.abort(key)  # it has ended: forget it
    return list(open_.values()), seen


def _accepted_drafts_of_past(core: Core, past: Suffixes) -> int:
    """Return the accepted drafts in a greedy completion that the tree already holds; clear the tree afterwards."""
    past.clear()
    ids, _ = _greedy(core)
    past.clear()
    past.remember(PROMPT, [ids])
    _, accepted = _greedy(core)
    past.clear()
    return accepted


def _greedy(core: Core) -> tuple[list[int], int]:
    """Return the tokens of a greedy completion, and how many drafts were accepted."""
    fresh = min(core.drafts + 2, core.arguments["max_model_len"] - len(PROMPT) - 1)
    key, ids, accepted = core.add(PROMPT, SamplingParams(temperature=0, max_new_tokens=fresh), fresh), list[int](), 0
    while len(ids) < fresh:
        outputs, record = core.outputs()
        ids += [token for output in outputs for token in output.outputs[0].token_ids]
        accepted += sum(one.accepted for one in record.verified().values())
    core.abort(key)  # it has ended: forget it
    return ids, accepted


def _scored(core: Core, ids: list[int]) -> list[Row]:
    """Return log-probs at the same places without temperature, from a prefill."""
    key = core.add([*PROMPT, *ids], SamplingParams(max_new_tokens=1), 1, prompt_logprobs=TOP)
    rows: list[Row] = []
    while not rows:
        for output in core.outputs()[0]:
            rows = list(output.prompt_logprobs or [])[len(PROMPT) :]
    core.abort(key)
    return rows


def slope(rows: list[Row], plain: list[Row]) -> tuple[float, float]:
    """Return sums of products and of squares, whose ratio is 1 / temperature.

    Differences of log-probs within a place are those of the plain ones, divided by the temperature.
    """
    products = squares = 0.0
    for hot, cold in zip(rows, plain, strict=True):
        first, *rest = sorted(set(hot) & set(cold))
        for token in rest:
            change = cold[token].logprob - cold[first].logprob
            products += change * (hot[token].logprob - hot[first].logprob)
            squares += change * change
    return products, squares

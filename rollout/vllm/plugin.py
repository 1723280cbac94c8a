"""Plugin of vLLM (entry point group ``vllm.general_plugins``): makes visible what happens in verification.

``BEBOP_VERIFY_EVERY``: what each verification step accepts is kept, and of one in so many its overlap and entropies (0:
of none). ``BEBOP_VLLM_CPU=1``: what is broken in the CPU build is mended, see ``cpu.py``. ``BEBOP_VLLM_DRAFTS=K``: a
server of vLLM's own hands the statistics out, for programs that start one (verl). Without them it only makes the engine
of weight transfers known. vLLM loads it into each of its processes, wherever bebop is installed beside it, unless
``VLLM_PLUGINS`` leaves it out: the engine's self-test looks for what it keeps.

vLLM has two model runners, which ``runner_v1.py`` and ``runner_v2.py`` look into. Both leave a ``StepRecord`` for each
step. Its numbers are copied to the host while the device computes on, and are read when somebody needs them.
"""

import functools
import inspect
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from bebop.kernels.stats import pair_stats
from bebop.rollout.host_copy import HostCopy
from bebop.trajectory import MEASURED, DecodeStats

EVERY = "BEBOP_VERIFY_EVERY"
CPU = "BEBOP_VLLM_CPU"
DRAFTS = "BEBOP_VLLM_DRAFTS"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own: 0, 1, or unset where vLLM decides
TRANSFER_ENGINE = "bebop"
FIELD = "bebop"  # of ``kv_transfer_params``, where the outputs of a server have their statistics
SLICE = 1 << 26  # elements of one distribution that are measured at a time: 256 MB in fp32


@dataclass(slots=True, kw_only=True)
class Verified:
    """What a step did with the drafts of one request."""

    drafted: int  # n >= 1
    accepted: int
    sampled: bool  # the drafts are draws, and their distributions took part
    weight: int = 0  # steps that what was measured stands for; 0: nothing was
    measured: dict[str, list[float]] = field(default_factory=dict)  # name of MEASURED -> [n]


@dataclass(slots=True, kw_only=True)
class Rows:
    """Verified rows of a step, one for each of B requests, whose numbers may still be on their way.

    ``copy`` has ``drafted`` [B], ``accepted`` [B] and ``greedy`` [B]. Where the step was measured it has ``table``
    [4, N] too: the values of ``MEASURED`` at each draft, request after request.
    """

    copy: HostCopy
    sampled: bool
    weight: int = 0
    gap: int = 0  # columns of the table behind each request's drafts that belong to no draft

    def verified(self) -> list[Verified]:
        """Wait for the numbers, and return what became of each request's drafts.

        Greedy requests have no distributions, and no measures.
        """
        found = self.copy.get()
        drafted, accepted, greedy = (found[name].tolist() for name in ("drafted", "accepted", "greedy"))
        rows = [Verified(drafted=n, accepted=a, sampled=self.sampled) for n, a in zip(drafted, accepted, strict=True)]
        if not self.weight:
            return rows
        table = dict(zip(MEASURED, found["table"].tolist(), strict=True))
        at = 0
        for one, skip in zip(rows, greedy, strict=True):
            if not skip:
                one.weight = self.weight
                one.measured = {name: values[at : at + one.drafted] for name, values in table.items()}
            at += one.drafted + self.gap
        return rows


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What one step of vLLM did, kept from its launch until its requests have ended."""

    number: int = -1  # of the launch, in this process
    names: Sequence[str] = ()  # vLLM's own of its requests, by row
    parts: Sequence[Rows] = ()  # rows that were verified, in the order of ``names``
    _found: dict[str, Verified] | None = None

    def verified(self) -> dict[str, Verified]:
        """Return what became of the drafts of each request that had some; wait for it the first time."""
        if self._found is None:
            rows = [one for part in self.parts for one in part.verified()]
            # Ranks that share the batch verify a part of it each: whose rows they are cannot be told here.
            rows = rows if len(rows) == len(self.names) else []
            self._found = {name: one for name, one in zip(self.names, rows, strict=False) if one.drafted}
            self.parts = ()
        return self._found


@dataclass(slots=True)
class Steps:
    """The steps of vLLM in this process. A step is launched, and its tokens come out now or one step later."""

    every: int = 0
    count: int = 0  # steps that could be measured
    launches: int = 0
    parts: list[Rows] = field(default_factory=list)  # of the step in progress
    # The step whose tokens came out. A server that hands nothing out never takes it, so that it must not add up.
    done: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=1))
    hooks: set[str] = field(default_factory=set)  # that are in place

    def is_due(self) -> bool:
        """Count the step in progress; return whether it is one of those that are measured."""
        if not self.every:
            return False
        self.count += 1
        return (self.count - 1) % self.every == 0

    def launch(self, names: Sequence[str]) -> StepRecord:
        """Close the step in progress, whose requests have these names."""
        record = StepRecord(number=self.launches, names=tuple(names), parts=tuple(self.parts))
        self.launches += 1
        self.parts = []
        return record

    def take(self) -> StepRecord:
        """Return the step whose tokens came out last, and forget it; one without requests if none did."""
        return self.done.pop() if self.done else StepRecord()


STEPS = Steps()  # of this process


def table(count: int, vocabulary: int, pair: Callable[[slice], tuple[Tensor, Tensor]], *, from_logits: bool) -> Tensor:
    """Return the values of ``MEASURED`` [4, N] of ``count`` drafts.

    ``pair`` gives draft and target rows [n, V] of a slice. Slices bound the memory beside that which vLLM counts.
    """
    size = max(1, SLICE // vocabulary)
    found = []
    for begin in range(0, count, size):
        stats = pair_stats(*pair(slice(begin, begin + size)), from_logits=from_logits)
        found.append(torch.stack([getattr(stats, name) for name in MEASURED]))
    return torch.cat(found, 1) if found else torch.zeros(len(MEASURED), 0)


def one_hot(drafts: Tensor, target: Tensor) -> Tensor:
    """Return the distributions [n, V] of drafts [n] that are no draws; one below 0 is none, and counts as token 0."""
    return torch.zeros_like(target).scatter_(-1, drafts.long().clamp(0, target.shape[-1] - 1)[:, None], 1.0)


class StepCounts:
    """The steps of one request, added up. What a completion's end cuts off counts nowhere."""

    def __init__(self, *, drafts: int, head: bool, prefill: bool = True, passes: int | None = None) -> None:
        """``drafts`` per cycle, 0: plain decoding; ``head``: a model drafts; ``prefill``: the next token is of one.

        ``passes``: of that model in a cycle; None: one for each draft.
        """
        self.drafts, self.prefill = drafts, prefill
        self.passes = (drafts if passes is None else passes) if head else 0
        self.sums = DecodeStats.with_drafts(drafts)

    def restarted(self) -> None:
        """Expect a token of a prefill once more, as keys and values are computed again."""
        self.prefill = True

    def add(self, tokens: int, verified: Verified | None) -> None:
        """Add a step that emitted ``tokens``, with drafts if it ``verified`` some."""
        if not tokens:
            return
        sums = self.sums
        sums.tokens += tokens
        if self.prefill and verified is None and self.drafts:
            sums.prefilled += tokens
            self.prefill = False
            return
        sums.cycles += 1
        sums.target_forwards += 1
        sums.draft_forwards += self.passes
        if verified is None:
            return
        kept = min(verified.accepted, tokens)
        reached = kept if kept == tokens else min(kept + 1, verified.drafted)
        sums.accepted[:kept] += 1
        sums.reached[:reached] += 1
        if verified.weight:
            sums.add_measured(verified.measured, reached, verified.weight)


def register() -> None:
    """Register the transfer engine and the hooks. vLLM calls it in each of its processes."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if TRANSFER_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            TRANSFER_ENGINE, "bebop.rollout.vllm.transfer_engine", "BebopTransferEngine"
        )
    if os.environ.get(CPU) == "1":
        from bebop.rollout.vllm.cpu import mend

        mend()
    if os.environ.get(EVERY):
        STEPS.every = int(os.environ[EVERY])
        drafts = int(os.environ.get(DRAFTS) or 0)
        for name, runner in runners().items():
            if name not in STEPS.hooks:
                runner.watch(STEPS)
                STEPS.hooks.add(name)
        if drafts and "report" not in STEPS.hooks:
            report(drafts)
            STEPS.hooks.add("report")


class Runner(Protocol):
    """A look into one of vLLM's model runners: ``runner_v1.py`` or ``runner_v2.py``."""

    def watch(self, steps: Steps) -> None:
        """Leave a record in ``steps`` for each step from here on."""

    def on_output(self, change: Callable[[Any], Any]) -> None:
        """Pass each step's output through ``change`` before it leaves the worker."""


def runners() -> dict[str, Runner]:
    """Return the runners that vLLM may choose in this process."""
    from vllm.triton_utils import HAS_TRITON

    from bebop.rollout.vllm import runner_v1, runner_v2  # they import this module

    found: dict[str, Runner] = {"v1": runner_v1}
    if HAS_TRITON and os.environ.get(RUNNER) != "0":  # vLLM has no second one without Triton
        found["v2"] = runner_v2
    return found


# ---- statistics on their way through the processes of a vLLM server: worker, scheduler, front end


def report(drafts: int) -> None:
    """Change this process, whichever part of vLLM it is; ``drafts`` of the MTP head per cycle.

    What the plugin saw of a step goes with the step's output to the scheduler, from there with the tokens of each
    request to the front end. Every output of a request, an aborted one's too, has the sum so far in
    ``kv_transfer_params[FIELD]``: a dictionary that passes through all of vLLM, and which servers hand out.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import RequestState

    update, make = Scheduler.update_from_output, RequestState.make_request_output

    @functools.wraps(update)
    def update_from_output(scheduler: Any, scheduled: Any, output: Any) -> Any:
        found = update(scheduler, scheduled, output)
        for outputs in found.values():
            hand_on(output, outputs.outputs)
        return found

    call = inspect.signature(make)

    @functools.wraps(make)
    def make_request_output(*args: Any, **named: Any) -> Any:
        given = dict(call.bind(*args, **named).arguments)
        return summed(make, given.pop("self"), drafts, given)

    for runner in runners().values():
        runner.on_output(with_steps)
    Scheduler.update_from_output = update_from_output
    RequestState.make_request_output = make_request_output


def with_steps(output: Any) -> Any:
    """Return a step's output with what the plugin saw of it; in the worker."""
    if output is not None:
        output.bebop_steps = {name: asdict(one) for name, one in STEPS.take().verified().items()}
    return output


def hand_on(output: Any, requests: list[Any]) -> None:
    """Give each request its own part of a step; in the scheduler."""
    steps = getattr(output, "bebop_steps", None) or {}
    for one in requests:
        if one.request_id in steps:
            one.kv_transfer_params = {**(one.kv_transfer_params or {}), FIELD: steps[one.request_id]}


def summed(make: Any, state: Any, drafts: int, given: dict[str, Any]) -> Any:
    """Return a request's output with its statistics so far, in the front end; ``given`` are arguments of ``make``."""
    rest = dict(given.get("kv_transfer_params") or {})
    step = rest.pop(FIELD, None)
    counts: StepCounts | None = getattr(state, "bebop_counts", None)
    if counts is None:
        counts = state.bebop_counts = StepCounts(drafts=drafts, head=True)
    counts.add(len(given["new_token_ids"]), None if step is None else Verified(**step))
    output = make(state, **given | {"kv_transfer_params": rest or None})
    if output is not None:
        output.kv_transfer_params = {**(output.kv_transfer_params or {}), FIELD: counts.sums}
    return output

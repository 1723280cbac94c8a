"""Plugin of vLLM (entry point group ``vllm.general_plugins``) that records what happens in verification.

``BEBOP_VERIFY_EVERY``: accepted drafts of each verification step are recorded, and overlap and entropies of one in so
many steps (0: of none). ``BEBOP_VLLM_CPU=1``: broken functions of the CPU build are repaired, see ``cpu.py``.
``BEBOP_VLLM_DRAFTS=K``: a vLLM server returns the statistics with its outputs, for programs that start one (verl).
Without these variables the plugin only registers the engine of weight transfers. vLLM loads it into each of its
processes, wherever bebop is installed beside it, unless ``VLLM_PLUGINS`` leaves it out. So the engine's self-test looks
for its records.

vLLM has two model runners, which ``runner_v1.py`` and ``runner_v2.py`` instrument. Both leave a record for each step
(``steps.py``).
"""

import functools
import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

from bebop.rollout.vllm.steps import STEPS, StepCounts, Steps, Verified

EVERY = "BEBOP_VERIFY_EVERY"
CPU = "BEBOP_VLLM_CPU"
DRAFTS = "BEBOP_VLLM_DRAFTS"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's own: 0, 1, or unset where vLLM decides
TRANSFER_ENGINE = "bebop"
FIELD = "bebop"  # of ``kv_transfer_params``, where the outputs of a server have their statistics


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


def loading_in_parts() -> AbstractContextManager[None]:
    """Return a context in which an MTP head accepts a part of a checkpoint, also one without weights of its own.

    Some of vLLM's classes (``deepseek_mtp``) otherwise take such a part for a checkpoint without a head, and raise.
    """
    try:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    except ImportError:  # an older vLLM, in a job without drafts
        return nullcontext()
    context: AbstractContextManager[None] = disable_mtp_completeness_check()
    return context


class Runner(Protocol):
    """Instrumentation of one of vLLM's model runners: ``runner_v1.py`` or ``runner_v2.py``."""

    def watch(self, steps: Steps) -> None:
        """Leave a record in ``steps`` for each step from here on."""

    def on_output(self, change: Callable[[Any], Any]) -> None:
        """Pass each step's output through ``change`` before it leaves the worker."""


def runners() -> dict[str, Runner]:
    """Return the runners that vLLM may choose in this process."""
    from vllm.triton_utils import HAS_TRITON

    from bebop.rollout.vllm import runner_v1, runner_v2  # each is imported where vLLM is

    found: dict[str, Runner] = {"v1": runner_v1}
    if HAS_TRITON and os.environ.get(RUNNER) != "0":  # vLLM has no second one without Triton
        found["v2"] = runner_v2
    return found


# ---- statistics pass through the processes of a vLLM server: worker, scheduler, front end


def report(drafts: int) -> None:
    """Patch this process, whichever part of vLLM it is; ``drafts`` are those of the MTP head per cycle.

    The plugin's record of a step goes with the step's output to the scheduler, and from there with the tokens of each
    request to the front end. Every output of a request, also of an aborted one, has the sum so far in
    ``kv_transfer_params[FIELD]``: a dictionary that passes through all of vLLM, and that servers return.
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
    """Return a step's output with the plugin's record of it; runs in the worker."""
    if output is not None:
        output.bebop_steps = {name: asdict(one) for name, one in STEPS.take().verified().items()}
    return output


def hand_on(output: Any, requests: list[Any]) -> None:
    """Attach to each request its own part of a step's record; runs in the scheduler."""
    steps = getattr(output, "bebop_steps", None) or {}
    for one in requests:
        if one.request_id in steps:
            one.kv_transfer_params = {**(one.kv_transfer_params or {}), FIELD: steps[one.request_id]}


def summed(make: Any, state: Any, drafts: int, given: dict[str, Any]) -> Any:
    """Return a request's output with its statistics so far; runs in the front end.

    ``given`` are the arguments of ``make``.
    """
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

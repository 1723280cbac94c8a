"""Statistics of drafts, passed through the processes of a vLLM server: worker, scheduler, front end.

For programs that start vLLM's own server (verl). ``BEBOP_VLLM_DRAFTS=K`` asks for it. What the plugin saw of a step
goes with the step's output to the scheduler, from there with the tokens of each request to the front end; every output
of a request, an aborted one's too, has the sum so far in ``kv_transfer_params[FIELD]``: a dictionary that passes
through all of vLLM, and which servers hand out.
"""

import functools
import inspect
from dataclasses import asdict
from typing import Any

from bebop.rollout.vllm.plugin import STEPS, StepCounts, Verified

FIELD = "bebop"


def report(drafts: int) -> None:
    """Change this process, whichever part of vLLM it is; ``drafts`` of the MTP head per cycle."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.output_processor import RequestState
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample, update, make = GPUModelRunner.sample_tokens, Scheduler.update_from_output, RequestState.make_request_output

    @functools.wraps(sample)
    def sample_tokens(runner: Any, *args: Any, **kw: Any) -> Any:
        return with_steps(sample(runner, *args, **kw))

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

    GPUModelRunner.sample_tokens = sample_tokens
    Scheduler.update_from_output = update_from_output
    RequestState.make_request_output = make_request_output


def with_steps(output: Any) -> Any:
    """Return a step's output with what the plugin saw of it; in the worker."""
    if output is not None:
        output.bebop_steps = {name: asdict(one) for name, one in STEPS.take().items()}
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

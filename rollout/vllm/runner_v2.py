"""Instrumentation of vLLM's second model runner, which launches a step before the tokens of the one before are read.

Nothing here waits for the device. A ``StepRecord`` travels with the output of its step, and counts as done when vLLM
reads that output: with asynchronous scheduling that is one step later. vLLM's copies of the tokens follow ours on the
device, so that ours are complete by then.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.rollout.host_copy import HostCopy
from bebop.rollout.vllm.steps import Rows, Steps, one_hot, table

READS = ("target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "idx_mapping", "temperature")
MORE = ("expanded_idx_mapping", "expanded_local_pos")


def watch(steps: Steps) -> None:
    """Patch vLLM's rejection sampling and model runner so that a record goes with each step's output.

    Raise ``UserError`` if the function has other parameters in this version.
    """
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    reject, sample = rejection_sampler.rejection_sample, GPUModelRunner.sample_tokens
    call, get = inspect.signature(reject), AsyncOutput.get_output
    if lacking := [name for name in (*READS, *MORE) if name not in call.parameters]:
        raise UserError(
            f"vLLM's second model runner verifies without {lacking[0]!r} in this version: give "
            "rollout.vllm.model_runner=v1"
        )

    @functools.wraps(reject)
    def rejection_sample(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        # A batch of many logits is verified in several calls.
        sampled, count = reject(*args, **named)
        steps.parts.append(rows(count, call.bind(*args, **named).arguments, steps))
        return sampled, count

    @functools.wraps(sample)
    def sample_tokens(runner: Any, *args: Any, **kw: Any) -> Any:
        state, steps.parts = runner.execute_model_state, []
        output = sample(runner, *args, **kw)
        if isinstance(output, AsyncOutput):
            output.bebop_record = steps.launch(state.input_batch.req_ids)
        return output

    @functools.wraps(get)
    def get_output(output: Any) -> Any:
        found = get(output)
        if (record := output.__dict__.pop("bebop_record", None)) is not None:
            steps.done.append(record)
        return found

    rejection_sampler.rejection_sample = rejection_sample
    GPUModelRunner.sample_tokens = sample_tokens
    AsyncOutput.get_output = get_output


def on_output(change: Callable[[Any], Any]) -> None:
    """Pass each step's output through ``change`` before it leaves the worker."""
    from vllm.v1.worker.gpu.async_utils import AsyncOutput

    get = AsyncOutput.get_output

    @functools.wraps(get)
    def get_output(output: Any) -> Any:
        return change(get(output))

    AsyncOutput.get_output = get_output


def rows(count: Tensor, given: Mapping[str, Any], steps: Steps) -> Rows:
    """Return the results of each request's drafts, as copies in flight.

    Args:
        count: [B] emitted tokens of each request, accepted drafts and one more.
        given: arguments of ``rejection_sample``. ``target_logits`` [N, V] are processed; N is the sum of drafts + 1 of
            all requests. ``draft_logits`` [slots, K, V] are those that drafts were drawn from, before temperature; None
            for greedy drafts.
        steps: of this process.
    """
    target, q_logits, slots = given["target_logits"], given["draft_logits"], given["expanded_idx_mapping"].long()
    temperature = given["temperature"]
    found = {
        "drafted": given["cu_num_logits"].diff() - 1,
        "accepted": count - 1,
        "greedy": temperature[given["idx_mapping"].long()] == 0,
    }
    weight = steps.every if steps.is_due() else 0
    size = target.shape[-1] if q_logits is None else min(target.shape[-1], q_logits.shape[-1])

    def pair(part: slice) -> tuple[Tensor, Tensor]:
        if q_logits is None:
            p = target[part].softmax(-1, dtype=torch.float32)
            # A row judges the draft behind it; the last row of a request judges none, and is left out later.
            return one_hot(given["draft_sampled"].roll(-1)[part], p), p
        places = given["expanded_local_pos"][part].long().clamp(max=q_logits.shape[1] - 1)
        heat = temperature[slots[part]].float()
        heat = torch.where(heat == 0, torch.ones_like(heat), heat)
        return q_logits[slots[part], places, :size].float() / heat[:, None], target[part, :size].float()

    if weight:
        found["table"] = table(len(target), size, pair, from_logits=q_logits is not None)
    return Rows(copy=HostCopy(**found), sampled=q_logits is not None, weight=weight, gap=1)

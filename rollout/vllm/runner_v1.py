"""Instrumentation of vLLM's first model runner: its rejection sampling, in steps whose tokens come out at once."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bebop.rollout.host_copy import HostCopy
from bebop.rollout.vllm.steps import Rows, Steps, one_hot, table


def watch(steps: Steps) -> None:
    """Patch vLLM's rejection sampling and model runner so that each step leaves a record in ``steps``."""
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    reject, sample = rejection_sampler.rejection_sample, GPUModelRunner._sample
    call = inspect.signature(reject)

    @functools.wraps(reject)
    def rejection_sample(*args: Any, **named: Any) -> Tensor:
        out: Tensor = reject(*args, **named)
        given = call.bind(*args, **named).arguments
        q, logits = given["draft_probs"], given["target_logits"]
        metadata = given["sampling_metadata"]
        steps.parts = [rows(out, given["num_draft_tokens"], given["draft_token_ids"], q, logits, metadata, steps)]
        return out

    @functools.wraps(sample)
    def _sample(runner: Any, *args: Any, **kw: Any) -> Any:
        steps.parts = []
        out = sample(runner, *args, **kw)
        steps.done.append(steps.launch(runner.input_batch.req_ids))
        return out

    rejection_sampler.rejection_sample = rejection_sample
    GPUModelRunner._sample = _sample


def on_output(change: Callable[[Any], Any]) -> None:
    """Pass each step's output through ``change`` before it leaves the worker."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    sample = GPUModelRunner.sample_tokens

    @functools.wraps(sample)
    def sample_tokens(runner: Any, *args: Any, **kw: Any) -> Any:
        return change(sample(runner, *args, **kw))

    GPUModelRunner.sample_tokens = sample_tokens


def rows(
    out: Tensor, counts: Sequence[int], drafts: Tensor, q: Tensor | None, logits: Tensor, metadata: Any, steps: Steps
) -> Rows:
    """Return the results of each request's drafts, as copies in flight.

    Args:
        out: [B, K + 1] tokens, -1 where there is none.
        counts: [B] drafts of each request, N in all.
        drafts: [N].
        q: [N, V] the distributions that they were drawn from; None: one-hot.
        logits: [N, V] those of the target, processed.
        metadata: vLLM's sampling metadata.
        steps: of this process.
    """
    found = {"drafted": torch.tensor(counts), "accepted": (out >= 0).sum(-1) - 1}
    if metadata.all_random:
        found["greedy"] = torch.zeros(len(counts), dtype=torch.bool)
    else:
        found["greedy"] = torch.ones_like(found["accepted"]) > 0 if metadata.all_greedy else metadata.temperature == 0
    weight = steps.every if not metadata.all_greedy and steps.is_due() else 0

    def pair(part: slice) -> tuple[Tensor, Tensor]:
        p = logits[part].softmax(-1, dtype=torch.float32)
        return (one_hot(drafts[part], p) if q is None else q[part].float()), p

    if weight:
        found["table"] = table(len(logits), logits.shape[-1], pair, from_logits=False)
    return Rows(copy=HostCopy(**found), sampled=q is not None, weight=weight)

"""Plugin of vLLM (entry point group ``vllm.general_plugins``): makes visible what happens in verification.

``BEBOP_VERIFY_EVERY``: what each verification step accepts is kept, and of one in so many its overlap and entropies (0:
of none). ``BEBOP_VLLM_CPU=1``: what is broken in the CPU build is mended, see ``cpu.py``. ``BEBOP_VLLM_DRAFTS=K``: a
server of vLLM's own hands the statistics out, for programs that start one (verl). Without them it only makes the engine
of weight transfers known. vLLM loads it into each of its processes, wherever bebop is installed beside it, unless
``VLLM_PLUGINS`` leaves it out: the engine's self-test looks for what it keeps.
"""

import functools
import inspect
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.stats import pair_stats
from bebop.trajectory import MEASURED, DecodeStats

EVERY = "BEBOP_VERIFY_EVERY"
CPU = "BEBOP_VLLM_CPU"
DRAFTS = "BEBOP_VLLM_DRAFTS"
TRANSFER_ENGINE = "bebop"
FIELD = "bebop"  # of ``kv_transfer_params``, where the outputs of a server have their statistics


@dataclass(slots=True, kw_only=True)
class Verified:
    """What a step did with the drafts of one request."""

    drafted: int  # n >= 1
    accepted: int
    sampled: bool  # the drafts are draws, and their distributions took part
    weight: int = 0  # steps that what was measured stands for; 0: nothing was
    measured: dict[str, list[float]] = field(default_factory=dict)  # name of MEASURED -> [n]


@dataclass(slots=True)
class Steps:
    """What was verified since it was last taken, by vLLM's own names of requests."""

    every: int = 0
    count: int = 0
    on: bool = False  # the plugin is in place
    kept: dict[str, Verified] = field(default_factory=dict)
    step: list[Verified] = field(default_factory=list)  # of the step in progress, by row

    def take(self) -> dict[str, Verified]:
        """Hand out the verified drafts, and forget them."""
        kept, self.kept = self.kept, {}
        return kept


STEPS = Steps()  # of this process


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
        self.prefill = False
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
        if not STEPS.on:
            _watch(STEPS)
            STEPS.on = True
            if os.environ.get(DRAFTS):
                report(int(os.environ[DRAFTS]))


def _watch(steps: Steps) -> None:
    """Look into vLLM's rejection sampling, and learn from the runner whose rows it sees."""
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
        steps.step = verified(out, given["num_draft_tokens"], given["draft_token_ids"], q, logits, metadata, steps)
        return out

    def _sample(runner: Any, *args: Any, **kw: Any) -> Any:
        steps.step = []
        out = sample(runner, *args, **kw)
        rows = zip(runner.input_batch.req_ids, steps.step, strict=False)
        steps.kept |= {name: one for name, one in rows if one.drafted}
        return out

    rejection_sampler.rejection_sample = rejection_sample
    GPUModelRunner._sample = _sample


def verified(
    out: Tensor, counts: Sequence[int], drafts: Tensor, q: Tensor | None, logits: Tensor, metadata: Any, steps: Steps
) -> list[Verified]:
    """Return what became of each request's drafts. Greedy requests have no distributions, and no measures.

    ``out`` [B, K + 1] are the tokens, -1 where there is none; ``counts`` [B] drafts of each, N in all; ``drafts`` [N];
    ``q`` [N, V] what they were drawn from, None for one-hot ones; ``logits`` [N, V] those of the target, processed.
    """
    accepted = ((out >= 0).sum(-1) - 1).tolist()
    found = [Verified(drafted=n, accepted=a, sampled=q is not None) for n, a in zip(counts, accepted, strict=True)]
    if metadata.all_greedy or not steps.every:
        return found
    measured, steps.count = steps.count % steps.every == 0, steps.count + 1
    if not measured:
        return found
    p = logits.softmax(-1, dtype=torch.float32)
    if q is None:
        q = torch.zeros_like(p).scatter_(-1, drafts.long()[:, None], 1.0)
    stats = pair_stats(q.float(), p, from_logits=False)
    table = {name: getattr(stats, name).tolist() for name in MEASURED}
    greedy = [False] * len(found) if metadata.all_random else (metadata.temperature == 0).tolist()
    at = 0
    for one, skip in zip(found, greedy, strict=False):
        if not skip:
            one.weight = steps.every
            one.measured = {name: values[at : at + one.drafted] for name, values in table.items()}
        at += one.drafted
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

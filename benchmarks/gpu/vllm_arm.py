"""Work in the process of one arm of ``vllm_run``: one engine of vLLM, timed or compared with transformers."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM

from bebop.bench.gpu import models
from bebop.bench.gpu.models import CYCLES, PROMPT, TINY, WARM, Shape, policy_of, prompt_of
from bebop.bench.gpu.stage import STEADY, Context, Row
from bebop.config.job import DecodingConfig
from bebop.model.checkpoint import save_policy
from bebop.rollout.vllm import plugin
from bebop.rollout.vllm.arguments import BLOCK, HOSTINGS
from bebop.rollout.vllm.steps import STEPS, StepRecord
from bebop.systems import SYSTEMS

# vLLM's CPU kernels need heads of size 64.
SHAPES = {**models.SHAPES, "tiny": replace(TINY, hidden=128, inner=256, heads=2, kv_heads=1, head_dim=64)}
BATCHES = {"cuda": (1, 32, 256), "cpu": (1, 4)}
TIMED = 30  # cycles, as in the engine stage
CACHE = {"cuda": 12 << 30, "cpu": 64 << 20}  # bytes: 256 rows of 288 tokens take 9 GB in the larger model
# Mean nats that log-probs may be from transformers'. In SmolLM2's shape bfloat16 is 0.005 from float32; half the
# rotary frequency makes 0.02, twice the scale of attention 0.04, a layer without attention 0.2.
FAR = 0.015


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One engine and its task, ``Qwen3-1.7B-v2-bebop3`` for instance."""

    model: str  # in SHAPES
    runner: str = "v2"
    system: str = "autoregressive"  # target_only: greedy drafts; bebop: sampled ones
    drafts: int = 0  # K
    attention: str = "FLASH_ATTN"  # FlashAttention 3 on Hopper
    check: bool = False  # log-probs against transformers' instead of times
    statistics: bool = False  # the plugin of rollout=vllm measures one step in four

    @property
    def name(self) -> str:
        """Return the name that selects this arm."""
        kind = "check" if self.check else f"{self.system}{self.drafts or ''}"
        return "-".join([self.model, self.runner, kind, *self._more])

    @property
    def _more(self) -> list[str]:
        return ["triton"] * (self.attention == "TRITON_ATTN") + ["stats"] * self.statistics


def plan(device: str) -> list[Arm]:
    """Return the arms in their order: first correctness, then the most decisive ones. 240 s hold about ten."""
    qwen, smol = (partial(Arm, model=name) for name in ("Qwen3-1.7B", "SmolLM2-135M"))
    bebop3: dict[str, Any] = {"system": "bebop", "drafts": 3}
    bebop1, greedy3 = {**bebop3, "drafts": 1}, {**bebop3, "system": "target_only"}
    if device == "cpu":
        tiny, second = partial(Arm, model="tiny", runner="v1"), partial(Arm, model="tiny")
        first = [tiny(check=True), tiny(), tiny(**bebop3), tiny(**greedy3), tiny(**bebop3, statistics=True)]
        return [*first, second(), second(**bebop3, statistics=True), second(**greedy3, statistics=True)]
    return [
        smol(check=True), qwen(), qwen(**bebop3), smol(), smol(**bebop3), qwen(runner="v1"),
        qwen(runner="v1", **bebop3), qwen(**bebop1), qwen(**greedy3), smol(**bebop1), smol(runner="v1"),
        smol(runner="v1", **bebop3), qwen(attention="TRITON_ATTN"), qwen(attention="TRITON_ATTN", **bebop3),
        smol(**greedy3), qwen(**bebop3, statistics=True), qwen(**greedy3, statistics=True),
        qwen(runner="v1", **bebop1), smol(runner="v1", **bebop1),
    ]  # fmt: skip


def logged(call: Callable[[Context], None], context: Context) -> None:
    """Run ``call`` with all output, also of libraries, redirected to the log."""
    log = os.open(context.file.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    call(context)


def make_model(shape: Shape, folder: Path, context: Context) -> None:
    """Write a checkpoint with random weights, in its own process, so that vLLM gets an unused GPU."""
    began, made = time.perf_counter(), folder.with_name(f"{folder.name}.made")
    save_policy(policy_of(shape, context.device, mimo=True), made)
    made.rename(folder)  # one that was cut off is made again
    context.keep("model", time.perf_counter() - began, unit="s", model=folder.name)


def run(arm: Arm, model: Path, context: Context) -> None:
    """Run one arm."""
    print(f"---- {arm.name}", flush=True)
    os.environ[plugin.RUNNER] = str(int(arm.runner == "v2"))
    if arm.statistics:
        os.environ[plugin.EVERY] = "4"
        plugin.register()
    (check if arm.check else measure)(arm, model, context)


def measure(arm: Arm, model: Path, context: Context) -> None:
    """Keep a row for each batch: the cycle of the engine stage, and how it compares with plain decoding."""
    device = context.device.type
    about = {"model": arm.model, "system": arm.system, "K": arm.drafts, "runner": arm.runner}
    about |= {"statistics": arm.statistics}
    about["attention"] = arm.attention if device == "cuda" else "CPU_ATTN"
    began, arguments = time.perf_counter(), engine_arguments(arm, device, BATCHES[device])
    engine = start(model, arguments)
    context.keep("start", time.perf_counter() - began, unit="s", **about, prompt=PROMPT, engine=arguments)
    for batch in BATCHES[device]:
        if context.left < 0:
            context.keep("cycle", None, skipped="time is up", batch=batch, **about)
            continue
        decode(engine, arm, batch, cycles=4)  # Triton compiles in the first steps of a batch
        records: list[StepRecord] = []
        steps, _ = decode(engine, arm, batch, cycles=CYCLES, records=records)
        found = {"batch": batch, **about, **cycle(steps, batch), **acceptance_check(records)}
        base = found["value"] if arm.drafts == 0 else plain(context.rows, found)
        own = without_statistics(context.rows, found) if arm.statistics else None
        of_own = own and found["value"] / own
        context.keep("cycle", unit="ms", of_plain=base and found["value"] / base, of_no_stats=of_own, **found)


def plain(rows: Sequence[Row], row: Row) -> float | None:
    """Return the milliseconds of plain decoding of the same model and batch, by the same runner and kernels."""
    same = ("model", "batch", "runner", "attention")
    cycles = [one for one in rows if one["what"] == "cycle" and one["K"] == 0]
    return next((one["value"] for one in cycles if all(one[name] == row[name] for name in same)), None)


def without_statistics(rows: Sequence[Row], row: Row) -> float | None:
    """Return the milliseconds of the same arm and batch without the plugin's statistics."""
    same = ("model", "batch", "runner", "attention", "system", "K")
    cycles = [one for one in rows if one["what"] == "cycle" and not one["statistics"]]
    return next((one["value"] for one in cycles if all(one[name] == row[name] for name in same)), None)


def acceptance_check(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return the acceptance rate of first drafts in the measured steps, and their mean overlap, which predicts it.

    Without measured steps, return nothing. For greedy drafts the overlap is p of the draft.
    """
    found = [one for record in records for one in record.verified().values() if one.weight]
    if not found:
        return {}
    overlaps = [one.measured["overlap"][0] for one in found]
    return {
        "first accepted": sum(one.accepted > 0 for one in found) / len(found),
        "first overlap": sum(overlaps) / len(found),
    }


def engine_arguments(arm: Arm, device: str, batches: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of ``vllm.EngineArgs``, except the model's folder."""
    decoding = DecodingConfig(system=arm.system, draft_tokens=max(1, arm.drafts))
    arguments: dict[str, Any] = {
        "dtype": "bfloat16", "max_num_seqs": max(batches), "max_num_batched_tokens": 8192,
        "max_model_len": PROMPT + CYCLES * (arm.drafts + 1) + arm.drafts + 1, "seed": 0, "skip_tokenizer_init": True,
        "generation_config": "vllm", "enable_prefix_caching": False, "disable_log_stats": True,
        "use_tqdm_on_load": False, "async_scheduling": arm.runner == "v2", "kv_cache_memory_bytes": CACHE[device],
        "speculative_config": HOSTINGS[SYSTEMS[arm.system].drafter_name].arguments(decoding),
    }  # fmt: skip
    if device == "cpu":
        return {**arguments, "enforce_eager": True, "block_size": BLOCK}
    return {
        **arguments,
        "attention_backend": arm.attention,
        "gpu_memory_utilization": 0.5,  # of which keys and values take what they are given
        # The warm-up would compile 96 kernels, most of them for other settings.
        "kernel_config": {"enable_flashinfer_autotune": False, "enable_jit_warmup": False},
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": capture_sizes(batches, arm.drafts),
        },
    }


def capture_sizes(batches: Sequence[int], drafts: int) -> list[int]:
    """Return the token counts of the steps that get a CUDA graph.

    A row has one token for the MTP layer, and ``drafts`` + 1 for the target.
    """
    return sorted({rows * tokens for rows in batches for tokens in (1, drafts + 1)})


class Step(NamedTuple):
    """Step of vLLM that emitted tokens."""

    seconds: float  # on the clock, when it ended
    tokens: int
    rows: int  # that got some
    begun: int  # rows that have some
    ended: int  # rows that have all


def start(model: Path, arguments: dict[str, Any]) -> Any:
    """Start vLLM's engine in this process."""
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(model=str(model), **arguments))


def decode(
    engine: Any,
    arm: Arm,
    batch: int,
    cycles: int,
    records: list[StepRecord] | None = None,
    **sampling: Any,
) -> tuple[list[Step], list[list[Any]]]:
    """Decode a batch at temperature 1, all rows at once; each row has tokens for ``cycles`` cycles.

    ``records`` receives the plugin's record of each step.

    Returns:
        The steps, timed from the start of the requests, and for each row vLLM's ``CompletionOutput``s, one per step.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=1.0, max_tokens=cycles * (arm.drafts + 1), ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA, **sampling,
    )  # fmt: skip
    began, ended = time.perf_counter(), 0
    outputs: dict[str, list[Any]] = {f"{began}-{number}": [] for number in range(batch)}
    for number, name in enumerate(outputs):
        prompt = list(prompt_of(number, SHAPES[arm.model].vocabulary))
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    steps, begun = [], set()
    while engine.has_unfinished_requests():
        tokens = rows = 0
        outputs_of_step = engine.step()
        record = STEPS.take()
        if records is not None:
            records.append(record)
        for given in outputs_of_step:
            new = len(given.outputs[0].token_ids)
            tokens, rows, ended = tokens + new, rows + (new > 0), ended + given.finished
            begun |= {given.request_id} if new else set()
            outputs[given.request_id].append(given.outputs[0])
        if tokens:  # an asynchronous engine's first step brings none
            steps.append(Step(time.perf_counter() - began, tokens, rows, len(begun), ended))
    return steps, list(outputs.values())


def cycle(steps: Sequence[Step], batch: int) -> dict[str, Any]:
    """Return milliseconds of a cycle in which all rows decode, after the first ones, and the tokens of a row in it.

    Raises ``ValueError`` if there are fewer than two.
    """
    full = [step for step in steps if step.begun == batch and not step.ended]
    timed = full[WARM:][: TIMED + 1]
    if len(timed) < 3:
        raise ValueError(f"all {batch} rows decode in {len(full)} of {len(steps)} steps: nothing can be timed")
    spans = [1e3 * (after.seconds - before.seconds) for before, after in pairwise(timed)]
    halves = [median(half) for half in (spans[::2], spans[1::2])]
    tokens, rows = (sum(getattr(step, name) for step in timed[1:]) for name in ("tokens", "rows"))
    return {
        "value": median(spans),
        "slowest ms": max(spans),
        "steady": abs(halves[0] - halves[1]) <= STEADY * min(halves),
        "cycles": len(spans),
        "tokens a row": tokens / rows,
        "tokens/s": tokens / (timed[-1].seconds - timed[0].seconds),
        "first tokens s": full[0].seconds,
        "whole tokens/s": sum(step.tokens for step in steps) / steps[-1].seconds,
    }


def check(arm: Arm, model: Path, context: Context) -> None:
    """Compare vLLM's log-probs of sampled tokens with transformers'; raise if they belong to another model."""
    batch = 4
    engine = start(model, engine_arguments(arm, context.device.type, [batch]))
    _, outputs = decode(engine, arm, batch, cycles=32, logprobs=0)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="eager")
    theirs.to(context.device).eval()
    apart = []
    for number, parts in enumerate(outputs):
        answer = [token for part in parts for token in part.token_ids]
        given = [row[token].logprob for part in parts for token, row in zip(part.token_ids, part.logprobs, strict=True)]
        prompt = prompt_of(number, SHAPES[arm.model].vocabulary)
        ids = torch.tensor([[*prompt, *answer]], device=context.device)
        with torch.no_grad():
            logprobs = theirs(ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu()
        apart.append((own - torch.tensor(given)).abs())
    found = torch.cat(apart)
    mean = float(found.mean())
    context.keep("log-probs apart", mean, unit="nats", largest=float(found.max()), tokens=len(found), arm=arm.name)
    if not mean < FAR:
        raise ValueError(f"vLLM's log-probs are {mean:.3g} nats from the model's on average, {FAR} are allowed")

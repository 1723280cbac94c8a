"""Cost of traces in the embedded engine: of no completion, of those of one prompt in 16, of all.

The arms decode the same requests and take turns, in a new order each round. Costs are processor seconds of this
process, so that other work on the machine matters little; on a GPU wall-clock seconds. The tracer itself is also timed:
turns with and without it give the same with more noise. The second model has the vocabulary of Qwen2.5 and two narrow
layers: the larger the vocabulary relative to the layers, the larger the cost of a trace.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM

from bebop.bench.record import clocked, noted
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig, TraceMode
from bebop.errors import UserError
from bebop.metrics.intervals import resampled
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Completion, DecodeStats, SamplingParams, Trace, is_traced

ARMS: tuple[TraceMode, ...] = ("off", "sample", "all")
GROUP = 4  # answers to a prompt
LARGE = "random"  # the model with the large vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceBench:
    """Settings of the benchmark."""

    model: ModelConfig
    task: TaskConfig
    batches: tuple[int, ...]
    rounds: int
    vocabulary: int = 151_936  # of the second model; 0: leave it out
    prompts: int = 16  # in a step
    tokens: tuple[int, int] = (160, 8)  # of an answer at most, by model
    hidden: int = 448  # of the second model


def run(bench: TraceBench) -> list[dict[str, Any]]:
    """Return one row per model, batch size and arm."""
    policy = load_policy(bench.model, need_head=True)
    if 0 < bench.vocabulary < policy.vocab_size:
        raise UserError(f"--vocabulary {bench.vocabulary} is not possible: give at least {policy.vocab_size}, or 0")
    source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
    prompts = [source.prompt(i).token_ids for i in range(bench.prompts)]
    models = [(bench.model.path, policy, bench.tokens[0])]
    if bench.vocabulary:
        models.append((LARGE, large(policy, bench), bench.tokens[1]))
    rows = []
    with tqdm(total=len(models) * len(bench.batches) * len(ARMS) * (bench.rounds + 1), desc="trace") as progress:
        for name, model, tokens in models:
            asked = wanted(prompts, tokens, policy.eos_token_ids)
            for batch in bench.batches:
                measured = turns(model, asked, batch, bench.rounds, progress)
                of = {"model": name, "vocabulary": model.vocab_size, "batch": batch}
                rows += [{**of, **row} for row in compared(measured)]
    return rows


def large(like: Policy, bench: TraceBench) -> Policy:
    """Return a random policy of two layers with a large vocabulary and a random head; it reads prompts of ``like``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=bench.vocabulary, hidden_size=bench.hidden, intermediate_size=4 * bench.hidden,
            num_hidden_layers=2, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
            attn_implementation=ATTENTION,
        )  # fmt: skip
        backbone = Qwen2ForCausalLM(config).to(like.backbone.dtype).eval()
        head = MTPHead(backbone).to(like.backbone.dtype).eval()
    return Policy(
        backbone=backbone.to(like.device), tokenizer=like.tokenizer, mtp=head.to(like.device), layout=like.layout
    )


def wanted(prompts: Sequence[tuple[int, ...]], tokens: int, stops: tuple[int, ...]) -> list[Request]:
    """Return the requests of a step, one group per prompt."""
    params = SamplingParams(max_new_tokens=tokens, stop_token_ids=stops)
    return [
        Request(id=i, token_ids=prompts[i // GROUP], params=replace(params, seed=i))
        for i in range(GROUP * len(prompts))
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One arm's decoding of all requests."""

    cost: float  # processor seconds; on a GPU seconds
    inside: float  # of that, in the tracer
    seconds: float
    stats: DecodeStats
    traces: tuple[Trace, ...]


def turns(
    policy: Policy, asked: Sequence[Request], batch: int, rounds: int, progress: "tqdm[Any]"
) -> Mapping[str, list[Turn]]:
    """Run the turns of every arm; the first round warms up."""
    found: dict[str, list[Turn]] = {arm: [] for arm in ARMS}
    for number in range(rounds + 1):
        first = number % len(ARMS)
        for arm in (*ARMS[first:], *ARMS[:first]):
            turn = decode(policy, asked, batch, arm)
            found[arm] += [turn] if number else []
            noted({"batch": batch, "arm": arm, "turn": number, "cost s": turn.cost, "in the tracer s": turn.inside})
            progress.update()
    return found


def decode(policy: Policy, asked: Sequence[Request], batch: int, arm: TraceMode) -> Turn:
    """Decode all requests; for the arm ``sample``, the step's first prompt is traced."""
    step = len(asked) // GROUP
    chosen = [replace(request, trace=is_traced(arm, request.id // GROUP, step)) for request in asked]
    engine = TorchEngine(policy, DecodingConfig(), slots=batch, max_length=512)
    clock = time.perf_counter if policy.device.type == "cuda" else time.process_time
    inside = timed(engine, clock)
    started, cost = time.perf_counter(), clock()
    answers: list[Completion] = generate(engine, chosen)
    return Turn(
        cost=clock() - cost,
        inside=sum(inside),
        seconds=time.perf_counter() - started,
        stats=DecodeStats.total(a.stats for a in answers),
        traces=tuple(a.trace for a in answers if a.trace is not None),
    )


def timed(engine: TorchEngine, clock: Callable[[], float]) -> list[float]:
    """Record the seconds of each call of an engine's tracer from now on."""
    assert isinstance(engine.decoder, DraftVerify)
    spent: list[float] = []
    engine.decoder.observers = [clocked(observe, spent, clock) for observe in engine.decoder.observers]
    setattr(engine.tracer, "end", clocked(engine.tracer.end, spent, clock))  # noqa: B010
    return spent


def compared(found: Mapping[str, list[Turn]]) -> list[dict[str, Any]]:
    """Return one row per arm; its added cost over ``off`` is total over total, with rounds resampled."""
    rows = []
    off = np.array([turn.cost for turn in found["off"]])
    for arm, of_arm in found.items():
        own, last = np.array([turn.cost for turn in of_arm]), of_arm[-1]
        ratio = resampled(lambda weights, own=own: (weights @ own) / (weights @ off), len(off))  # type: ignore[misc]
        tokens, rows_of = last.stats.tokens, sum(len(trace) for trace in last.traces)
        row: dict[str, Any] = {
            "trace": arm,
            "tokens/s": max(turn.stats.tokens / turn.seconds for turn in of_arm),
            "cost ms/token": 1e3 * float(np.median(own)) / tokens,
            "timed %": 100 * float(np.median([turn.inside for turn in of_arm]) / np.median(off)),
            "added %": 100 * (ratio.value - 1),
            "low %": 100 * (ratio.low - 1),
            "high %": 100 * (ratio.high - 1),
            "accept length": last.stats.accept_length,
            "traced %": 100 * rows_of / tokens,
        }
        rows.append(row | ({"bytes/token": sum(map(size, last.traces)) / rows_of} if rows_of else {}))
    return rows


def size(trace: Trace) -> int:
    """Return the bytes of a trace's arrays."""
    return sum(getattr(trace, f.name).nbytes for f in fields(Trace) if f.name != "names")

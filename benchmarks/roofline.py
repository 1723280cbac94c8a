"""Distance of plain decoding from the limits of this machine: its speed beside the bounds by memory and by arithmetic.

A cycle of B rows reads every matrix once and each row's cache entries, and multiplies each weight with B vectors. Bytes
and operations follow from the model's settings; the rate of one thread for each is measured ("machine peaks" below).
The smaller of the two bounds is the roof. Small models do not come near it, because neither bound includes the cost of
calls. A model of as many layers, so narrow that it computes next to nothing, makes the same calls. The bounds leave out
sampling, norms and writes, which makes them no less true.

A pass that verifies K drafts at batch 1 multiplies K + 1 rows, as plain decoding of K + 1 requests does. So the rows of
batch 1 to 8 also show the cost of its products, beside reading the weights and beside the two libraries.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig

from bebop.bench.record import noted
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import ONEDNN, Policy, by_library, product
from bebop.model.checkpoint import load_policy
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams

TURNS, SECONDS = 5, 0.03  # of a measurement: so many turns of at least so long
PRODUCT_TURNS = 3  # of products, which are compared with one another
WIDTHS = (1, 2, 4)  # tokens of a row in a pass
BYTES = 4  # of a number: fp32
HEAD, INNER, VOCABULARY = 2, 8, 16  # sizes of a head, the MLP and the vocabulary where next to nothing is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineBench:
    """Settings of the benchmark."""

    models: tuple[ModelConfig, ...]
    task: TaskConfig
    batches: tuple[int, ...]
    rounds: int
    cycles: int  # of a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a cycle of plain decoding, from a model's settings."""

    matrices: dict[tuple[int, int], int]  # [N, K] as the engine joins them: how many
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Self:
        """Return the work of a decoder with grouped queries and a gated MLP; looking up embeddings costs nothing."""
        heads, hidden, inner = config.num_attention_heads, config.hidden_size, config.intermediate_size
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or hidden // heads
        layers = config.num_hidden_layers
        shapes = [((heads + 2 * kv_heads) * size, hidden), (hidden, heads * size), (2 * inner, hidden), (hidden, inner)]
        matrices = {shape: layers * shapes.count(shape) for shape in shapes}
        head = (config.vocab_size, hidden)
        matrices[head] = matrices.get(head, 0) + 1
        return cls(matrices=matrices, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=size)

    @property
    def weights(self) -> int:
        """Return the number of weights in the matrices."""
        return sum(rows * columns * count for (rows, columns), count in self.matrices.items())

    def cache(self, context: float) -> float:
        """Return the number of keys and values of a row with ``context`` entries."""
        return 2 * self.layers * self.kv_heads * self.head_dim * context

    def operations(self, context: float) -> float:
        """Return the multiplications and additions for a token after ``context`` entries."""
        return 2 * self.weights + 4 * self.layers * self.heads * self.head_dim * context


class Turn(NamedTuple):
    """Measurement of one turn."""

    seconds: float  # processor time of a cycle
    context: float  # entries that a row looks at, on average


def run(bench: RooflineBench) -> list[dict[str, Any]]:
    """Return one row per model and batch size; the engine and its hollow twin take turns, and the best counts."""
    rows = []
    call = call_seconds()
    with tqdm(total=len(bench.models) * len(bench.batches), desc="bound") as progress:
        for model in bench.models:
            policy = load_policy(model, need_head=False)
            source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
            hollow, work = narrow(policy), Work.of(policy.backbone.config)
            for batch in bench.batches:
                prompts = [source.prompt(i // 4).token_ids for i in range(batch)]
                found, calls = Turn(float("inf"), 0), float("inf")
                for _ in range(bench.rounds):
                    found = min(found, turn(policy, prompts, bench.cycles))
                    calls = min(calls, turn(hollow, [[1] * len(p) for p in prompts], bench.cycles).seconds)
                counted = operators(policy, prompts)
                told = bound(work, batch, found, calls, (counted, call))
                rows.append(noted({"model": model.path, **told, **passes(policy, prompts, bench.rounds)}))
                progress.update()
    return rows


def bound(work: Work, batch: int, found: Turn, calls: float, operators: tuple[int, float]) -> dict[str, Any]:
    """Return the row of one model and batch size.

    ``calls``: seconds of a cycle that computes next to nothing. ``operators``: operators of a cycle, seconds of one.
    """
    weights, cache = BYTES * work.weights, BYTES * batch * work.cache(found.context)
    read = peak_bandwidth(int(weights + cache))
    rate = peak_arithmetic(batch, [*work.matrices])
    alone, libraries, one_row = products(work, [(batch, product), (batch, by_library), (1, product)])
    memory, arithmetic = (weights + cache) / read, batch * work.operations(found.context) / rate
    return {
        **{"batch": batch, "context": found.context, "tokens/s": batch / found.seconds},
        **{"bound by memory": batch / memory, "bound by arithmetic": batch / arithmetic},
        **{"roof": batch / max(memory, arithmetic), "of the roof %": 100 * max(memory, arithmetic) / found.seconds},
        **{"products alone": batch / alone, "products ms": 1e3 * alone, "products, x one row": alone / one_row},
        **{"products of libraries ms": 1e3 * libraries, "reading, of products %": 100 * weights / read / alone},
        **{"weights MB": weights / 1e6, "cache MB": cache / 1e6, "GB/s": read / 1e9},
        **{"MFLOP/token": work.operations(found.context) / 1e6, "GFLOP/s": rate / 1e9},
        **{"cycle ms": 1e3 * found.seconds, "calls ms": 1e3 * calls},
        **{"operators": operators[0], "us each": 1e6 * operators[1], "operators ms": 1e3 * operators[0] * operators[1]},
        "of roof and calls %": 100 * (max(memory, arithmetic) + calls) / found.seconds,
    }


def charted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one bar for each of the speeds in a row."""
    speeds = ("tokens/s", "products alone", "bound by memory", "bound by arithmetic")
    return [
        {"case": f"{row['model']}, batch {row['batch']}", "what": "measured" if what == "tokens/s" else what}
        | {"tokens/s": row[what]}
        for row in rows
        for what in speeds
    ]


def turn(policy: Policy, prompts: Sequence[Sequence[int]], cycles: int) -> Turn:
    """Time cycles in which all rows decode, without those that read the prompts."""
    engine = started(policy, prompts, cycles + 3)
    engine.step()
    engine.step()
    entries, begun = 0, time.process_time()
    for _ in range(cycles):
        entries += sum(engine.fed) + len(prompts)
        engine.step()
    return Turn((time.process_time() - begun) / cycles, entries / cycles / len(prompts))


def started(policy: Policy, prompts: Sequence[Sequence[int]], tokens: int) -> TorchEngine:
    """Return an engine whose requests each decode ``tokens`` tokens."""
    longest = max(map(len, prompts)) + tokens
    engine = TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=len(prompts), max_length=longest)
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=i, token_ids=tuple(prompt), params=SamplingParams(max_new_tokens=tokens, seed=i)))
    return engine


@torch.inference_mode()
def passes(policy: Policy, prompts: Sequence[Sequence[int]], rounds: int) -> dict[str, float]:
    """Return the time of a pass over two and over four tokens of each row, in passes over one; they take turns."""
    engine = started(policy, prompts, 16)
    engine.step()
    assert isinstance(engine.decoder, DraftVerify)
    target, rows = engine.decoder.target, Rows(engine.slots, len(prompts), max(engine.fed) + WIDTHS[-1])
    spent: dict[int, list[float]] = {width: [] for width in WIDTHS}
    for _ in range(rounds * 8):
        for width, seconds in spent.items():
            tokens = rows.last[:, None].expand(-1, width)
            begun = time.process_time()
            policy.logits(target.verify(rows, tokens)[0])
            seconds.append(time.process_time() - begun)
    ratios = {width: [own / one for own, one in zip(spent[width], spent[1], strict=True)] for width in WIDTHS[1:]}
    return {f"pass over {width}, x one": statistics.median(found) for width, found in ratios.items()}


@torch.inference_mode()
def products(work: Work, arms: Sequence[tuple[int, Callable[[Tensor, Tensor], Tensor]]]) -> list[float]:
    """Return the seconds of a cycle's matrix products, one after the other, and nothing else.

    ``arms`` are numbers of rows with a multiply function. They take turns over the same matrices, and the best turn
    counts.
    """
    layer = [shape for shape, count in work.matrices.items() if count >= work.layers]
    order = [*layer * work.layers, *(shape for shape in work.matrices if shape not in layer)]
    weights = [torch.randn(shape) for shape in order]

    def every(rows: int, multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        states = [torch.randn(rows, 1, weight.shape[1]) for weight in weights]
        return lambda: [multiply(x, weight) for x, weight in zip(states, weights, strict=True)][-1]

    calls = [every(*arm) for arm in arms]
    turns = [[fastest(call) for call in calls] for _ in range(PRODUCT_TURNS)]
    return [min(seconds) for seconds in zip(*turns, strict=True)]


def narrow(policy: Policy) -> Policy:
    """Return a model of the same family with as many layers and heads, which computes next to nothing."""
    config = type(policy.backbone.config)(**policy.backbone.config.to_dict())
    config.head_dim, config.hidden_size = HEAD, HEAD * config.num_attention_heads
    config.intermediate_size, config.vocab_size = INNER, VOCABULARY
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    return Policy(backbone=backbone, tokenizer=policy.tokenizer, mtp=None, layout=policy.layout)


def operators(policy: Policy, prompts: Sequence[Sequence[int]]) -> int:
    """Return the number of operators that a cycle calls."""
    engine = started(policy, prompts, 8)
    engine.step()
    with counted() as calls:
        engine.step()
    return calls[0]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the operators that reach a backend within this block."""
    calls = [0]

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls[0] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        yield calls


# ---- machine peaks: what one thread can do at most
#
# In processor time, the best of several turns: other work on the machine can only slow a measurement down. It does so
# here as well, since caches and memory are shared; a roof that was measured too low shows as a share above 100 %.


def fastest(work: Callable[[], object]) -> float:
    """Return the processor seconds of one call of ``work``, after a warm-up call."""
    work()
    best, calls, turns = float("inf"), 1, 0
    while turns < TURNS:
        started = time.process_time()
        for _ in range(calls):
            work()
        spent = time.process_time() - started
        if spent < SECONDS:  # too short to be told from what reading the clock takes
            calls *= 2
            continue
        best, turns = min(best, spent / calls), turns + 1
    return best


@torch.inference_mode()
def peak_bandwidth(size: int) -> float:
    """Return the bytes per second of repeated reads from a buffer of ``size`` bytes, by the best of three ways.

    A small buffer stays in a cache.
    """
    values = torch.ones(max(4096, size // 4 // 4096 * 4096))
    matrix, vector = values.view(-1, 4096), torch.ones(4096)
    readers: list[Callable[[], object]] = [values.sum, lambda: torch.dot(values, values), lambda: matrix @ vector]
    return values.numel() * 4 / min(fastest(read) for read in readers)


@torch.inference_mode()
def peak_arithmetic(rows: int, shapes: list[tuple[int, int]]) -> float:
    """Return the operations per second of the fastest product of [rows, K] with one of the matrices [N, K].

    These are floating-point operations. The better of two libraries counts, over repeated products: a matrix that fits
    is in a cache.
    """
    best = 0.0
    for outputs, inputs in shapes:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
        ways: list[Callable[[], object]] = [lambda x=x, weight=weight: linear(x, weight)]  # type: ignore[misc]
        if ONEDNN is not None:
            ways.append(lambda x=x, weight=weight: ONEDNN(x, weight, None, "none", [], ""))  # type: ignore[misc]
        best = max(best, *(2 * rows * outputs * inputs / fastest(way) for way in ways))
    return best


@torch.inference_mode()
def call_seconds() -> float:
    """Return the seconds to call an operator, apart from its work, measured on one that adds two numbers."""
    one = torch.ones(1)
    into = torch.ones(1)

    def many() -> Tensor:
        for _ in range(100):
            torch.add(one, one, out=into)
        return into

    return fastest(many) / 100

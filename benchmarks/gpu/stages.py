"""The seven stages: the card, the tests, the TV loss, losses from hidden states, verification, decoding, training."""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bebop.bench.gpu.headline import headline
from bebop.bench.gpu.job import ARMS, carried_out, written
from bebop.bench.gpu.models import SHAPES, TINY, TRAINED, Decoding, Shape, policy_of, update
from bebop.bench.gpu.sampling_cycle import cases as sampling_cycles
from bebop.bench.gpu.stage import Context, Row, Stage, warmed
from bebop.bench.precision import TYPES, deviations_of, random_policy, random_shape
from bebop.bench.publish import WAYS, Publishing
from bebop.kernels.block_verify import block_verify
from bebop.kernels.linear_losses import linear_draft_loss
from bebop.kernels.losses import tv_loss
from bebop.kernels.paged_attention import paged_attention
from bebop.kernels.row_losses import row_losses, scale_rows
from bebop.kernels.verify import chain_verify, sample
from bebop.model.backbone import Policy
from bebop.rollout.decoding.sampling import BatchSampling, entropy
from bebop.trainer.scorer import token_logprobs

VOCABULARY = 151_936  # of Qwen3
CALLS = 1000  # of an operation whose launch is timed
LORA = 8  # rank of an adapter


# ---- 0: the card


def card(context: Context) -> None:
    """Measure the peak rates of the card and its machine."""
    device, dry = context.device, context.dry
    if shutil.which("nvidia-smi"):
        asked = "name,driver_version,clocks.sm,clocks.mem,memory.total,power.limit"
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        context.keep("nvidia-smi", None, columns=asked, text=told.stdout.strip())
    context.keep("copy GB/s", _copy_rate(context), steady=context.rows[-1].get("steady"))
    side = 64 if dry else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    context.time("product, bf16", lambda: a @ b, flops=2 * side**3)
    context.keep("bf16 TFLOP/s", context.rows[-1].get("TFLOP/s"), steady=context.rows[-1].get("steady"))
    one = torch.ones(16, device=device)

    def adds() -> None:
        for _ in range(CALLS):
            torch.add(one, one, out=one)

    context.keep("us an eager operation", 1e6 * _wall(adds, device) / CALLS)
    if device.type == "cuda":
        context.keep("us a kernel in a graph", 1e6 * _wall(_graph(adds).replay, device) / CALLS)
        pinned = torch.empty(1 << 26, dtype=torch.uint8).pin_memory()
        large = torch.empty_like(pinned, device=device)
        context.time("to the device, 64 MiB", lambda: large.copy_(pinned, non_blocking=True), bytes_=1 << 26)
        context.time("to the host, 64 MiB", lambda: pinned.copy_(large, non_blocking=True), bytes_=1 << 26)
    context.keep("us a read of one number", 1e6 * _wall(lambda: [one[0].item() for _ in range(100)], device) / 100)
    context.keep(
        "us a number sent", 1e6 * _wall(lambda: [torch.tensor(1, device=device) for _ in range(100)], device) / 100
    )


def _copy_rate(context: Context) -> float | None:
    """Time a copy of 1 GiB, which adds a row; return its GB/s."""
    size = 1 << (14 if context.dry else 28)  # of float32
    source = torch.ones(size, device=context.device)
    into = torch.empty_like(source)
    context.time("copy", lambda: into.copy_(source), bytes_=8 * size)
    found: float | None = context.rows[-1].get("GB/s")
    return found


def _wall(call: Callable[[], object], device: torch.device) -> float:
    """Return the wall-clock seconds of a call, the best of five."""
    found = []
    for _ in range(6):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found[1:])


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a call as a captured CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


# ---- 1: the tests


def tests(context: Context) -> None:
    """Test kernels, engine and trainer on this card by ``pytest -m gpu``, with one line per failure.

    Left out are files without such a test, the tests of engines that are not installed, and plugins: they import
    missing packages.
    """
    chosen = ["--collect-only"] if context.dry else []
    # -vv: each test is a line as it ends, so that a run that is cut off tells how far it came.
    command = [sys.executable, "-m", "pytest", "-vv", "-m", "gpu", "--tb=line", "-p", "no:cacheprovider"]
    command += [*chosen, *gpu_tests()]
    alone, began = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, time.perf_counter()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=max(1.0, context.left), check=False, env=alone
        )
        output, code = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, code = f"{(late.stdout or b'').decode()}\nError: the time was over", -1
    ended = [word.lower() for word in re.findall(r"^\S+::.* (PASSED|FAILED|SKIPPED|ERROR)\b", output, re.MULTILINE)]
    count = {word: ended.count(word) for word in dict.fromkeys(ended)}
    lines = [line for line in output.splitlines() if re.search(r"^(FAILED|ERROR)|Error:|:: *.*(FAILED|ERROR)\b", line)]
    failed = count.get("failed", 0) + count.get("error", 0)
    context.keep(
        "failed", failed or int(code != 0), seconds=time.perf_counter() - began, count=count, lines=lines[-40:]
    )


def gpu_tests() -> list[str]:
    """Return the files with a test for a GPU; those of an engine that is not installed cannot be imported."""
    found = sorted(file for file in Path("tests").rglob("test_*.py") if "pytest.mark.gpu" in file.read_text())
    return [str(file) for file in found if file.parts[1] != "integration" or find_spec(file.parts[2])]


# ---- 2: the TV loss


def tv(context: Context) -> None:
    """Time the TV loss: the kernel alone, the cost of an upstream gradient, tiles of other widths, and memory traffic.

    The upstream gradient is applied as before, as now, and folded in.
    """
    rows, vocabulary = (4, 200) if context.dry else (8192, VOCABULARY)
    draft, target = _logits(context, rows, vocabulary)
    size = draft.numel() * draft.element_size()

    def alone() -> Tensor | None:
        return row_losses(draft, target, kind="tv").grad

    def whole(kind: str = "tv") -> None:
        tv_loss(draft, target, kind=kind).loss.sum().backward()
        draft.grad = None

    def weighted() -> None:
        (tv_loss(draft, target).loss * weights).sum().backward()
        draft.grad = None

    def folded() -> None:
        tv_loss(draft, target, row_weights=weights).loss.sum().backward()
        draft.grad = None

    weights = torch.rand(rows, device=context.device)
    ones = torch.ones_like(weights)
    warmed(
        [
            alone,
            whole,
            weighted,
            folded,
            *([] if context.dry else [partial(_launched, draft, target, b) for b in BLOCKS]),
        ]
    )
    grad = alone()
    assert grad is not None and grad.abs().max() > 0, "a gradient of zeros: nothing was computed"
    context.time("kernel alone", alone, bytes_=3 * size)
    context.time("multiplication as it was", lambda: grad.mul_(weights[:, None]), bytes_=2 * size)
    context.time("multiplication", lambda: scale_rows(grad, weights), bytes_=2 * size)
    context.time("multiplication by 1", lambda: scale_rows(grad, ones))
    context.time("whole, upstream 1", whole, bytes_=3 * size)
    context.time("whole, upstream weights", weighted, bytes_=3 * size)
    context.time("whole, weights folded in", folded, bytes_=3 * size)
    if not context.dry:
        for block in BLOCKS:
            context.time("kernel alone", partial(_launched, draft, target, block), bytes_=3 * size, block=block)
        _traffic(context, rows, vocabulary)
    for kind in ("kl", "ce"):
        context.time("whole", partial(whole, kind), bytes_=3 * size, kind=kind)


BLOCKS = (2048, 4096, 8192, 16_384)


def _launched(draft: Tensor, target: Tensor, block: int) -> object:
    """Run the kernel with tiles of another width."""
    from bebop.kernels.row_losses_triton import launch  # Triton is not everywhere

    return launch(draft, target, "tv", 1.0, None, 3.0, True, splits=1, block=block)


def _traffic(context: Context, rows: int, vocabulary: int) -> None:
    """Keep the bytes that reach memory and the hits in the second-level cache, by Nsight Compute if it is installed."""
    if shutil.which("ncu") is None:
        context.keep("ncu", None, skipped="it is not there")
        return
    code = (
        "import torch; from bebop.kernels.row_losses import row_losses; "
        f"x = torch.randn({rows}, {vocabulary}, device='cuda', dtype=torch.bfloat16); y = torch.randn_like(x); "
        "row_losses(x, y, kind='tv'); row_losses(x, y, kind='tv'); torch.cuda.synchronize()"
    )
    metrics = "dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sector_hit_rate.pct,gpu__time_duration.sum"
    # The card's clocks stay as they are: it may be lent, and its times stand beside those of other stages.
    command = ["ncu", "--clock-control", "none", "--csv", "--metrics", metrics]
    command += ["--kernel-name", "regex:_row", "--launch-skip", "1"]
    with context.tried("ncu"):
        done = subprocess.run(
            [*command, "--launch-count", "1", sys.executable, "-c", code],
            capture_output=True, text=True, timeout=max(5.0, min(40.0, context.left)), check=False,
        )  # fmt: skip
        for line in done.stdout.splitlines():
            parts = line.strip('"').split('","')
            if len(parts) > 3 and parts[-3] in metrics:
                context.keep(f"ncu {parts[-3]}", float(parts[-1].replace(",", "")), unit=parts[-2])


def _logits(context: Context, rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return similar draft (a leaf) and target [rows, V] in bf16; they are large, so they are made in place."""
    generator = torch.Generator(context.device).manual_seed(0)
    target = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=context.device).normal_(
        0, 2, generator=generator
    )
    draft = torch.empty_like(target).normal_(0, 0.4, generator=generator).add_(target)
    return draft.requires_grad_(), target


# ---- 3: losses from hidden states, log-probs


def linear(context: Context) -> None:
    """Time chunk sizes of the losses from hidden states and of the trainer's log-probs, beside their products alone."""
    rows, width, vocabulary = (8, 16, 96) if context.dry else (8192, 2048, VOCABULARY)
    hidden = torch.randn(rows, width, device=context.device, dtype=torch.bfloat16).requires_grad_()
    target = torch.randn(rows, width, device=context.device, dtype=torch.bfloat16)
    weight = (torch.randn(vocabulary, width, device=context.device) / width**0.5).to(torch.bfloat16)
    product = 2 * rows * width * vocabulary
    part = hidden.detach()[: min(rows, 1024)]
    context.time("product alone, 1024 rows", lambda: part @ weight.T, flops=2 * len(part) * width * vocabulary)

    def loss(chunk: int) -> None:
        linear_draft_loss(hidden, weight, target, weight, chunk_rows=chunk).loss.sum().backward()
        hidden.grad = None

    chunks = (4, 8) if context.dry else (512, 1024, 2048, 4096)
    warmed([partial(loss, chunks[0])])
    for chunk in chunks:
        context.time("tv from hidden states", partial(loss, chunk), flops=3 * product, chunk=chunk)
    head = weight.detach().float().requires_grad_()
    labels = torch.randint(vocabulary, (rows,), device=context.device)

    def logprobs(elements: int) -> None:
        found, entropies = token_logprobs(
            hidden, head, labels, temperature=1.0, dtype=torch.bfloat16, chunk_elements=elements
        )
        (found.sum() + 0.01 * entropies.sum()).backward()
        hidden.grad = head.grad = None

    for power in (8, 10) if context.dry else (24, 28, 30):
        context.time("log-probs", partial(logprobs, 1 << power), flops=4 * product, chunk=f"2^{power}")


# ---- 4: verification and sampling


def verify(context: Context) -> None:
    """Time a cycle's work on [B, K + 1, V] beside the model: verification, draws, entropies, truncation.

    All of it is also timed together, from probabilities and from logits, as CUDA graphs. Then the attention of four
    queries per row is timed, over pages and over slots.
    """
    for batch in (2,) if context.dry else (1, 32, 256):
        for made in (_cases, sampling_cycles):
            cases = made(context.device, batch, 3, 96 if context.dry else VOCABULARY)
            warmed([call for call, _ in cases.values()])
            for what, (call, size) in cases.items():
                with context.tried(what, batch=batch):
                    timed = replayed(call, context.device) if made is sampling_cycles else call
                    context.time(what, timed, bytes_=size, batch=batch, moves=size)
    _attention(context)


def replayed(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return a call of many operations as one launch, of a CUDA graph, as in an engine; on a CPU the call itself.

    From probabilities a cycle has more than a hundred operations. At B = 1 their launches take longer than their work
    on the device, and would be what is timed.
    """
    return _graph(call).replay if device.type == "cuda" else call


def _attention(context: Context) -> None:
    """Time attention of K + 1 = 4 queries per row over pages, by the kernel, and over slots, with the engine's mask.

    Rows have ``entries`` entries, or between one and as many. ``of_copy``: the rate at which the rows' entries are
    read, as a share of the rate of a copy.
    """
    copy = _copy_rate(context)
    for name, shape in ({"tiny": TINY} if context.dry else SHAPES).items():
        for batch, (entries, uneven) in product(
            (2,) if context.dry else (1, 32, 256),
            ((128, True),) if context.dry else ((512, False), (4096, False), (4096, True)),
        ):
            about: Row = {"model": name, "batch": batch, "entries": entries, "uneven": uneven}
            with context.tried("attention", **about):
                cases, size = _attention_cases(context.device, shape, batch, entries, uneven)
                pages, slots = (call() for call in cases.values())
                context.keep("attention differs by", float((pages - slots).abs().max()), **about)
                for what, call in cases.items():
                    context.time(what, call, bytes_=size, **about)
                    rate = context.rows[-1].get("GB/s")
                    context.rows[-1]["of_copy"] = rate / copy if rate and copy else None
                del cases, pages, slots


PAGE = 64  # entries


def _attention_cases(
    device: torch.device, shape: Shape, batch: int, entries: int, uneven: bool
) -> tuple[dict[str, Callable[[], Tensor]], float]:
    """Return calls by name, with equal results [B, 4, H, D], and the bytes of the keys and values that they see."""
    dtype, width = torch.bfloat16, 4
    group, heads = shape.heads // shape.kv_heads, (shape.heads, shape.kv_heads)
    ends = torch.full((batch,), entries, device=device)
    if uneven:
        ends = torch.randint(width, entries + 1, (batch,), generator=torch.Generator().manual_seed(0)).to(device)
    query = torch.randn(batch, heads[0], width, shape.head_dim, device=device, dtype=dtype)
    keys, values = (
        torch.empty(batch, heads[1], entries, shape.head_dim, device=device, dtype=dtype).normal_() for _ in range(2)
    )
    count = entries // PAGE
    table = torch.randperm(batch * count, device=device).view(batch, count)
    pools = [torch.empty(batch * count, heads[1], PAGE, shape.head_dim, device=device, dtype=dtype) for _ in range(2)]
    for pool, store in zip(pools, (keys, values), strict=True):
        pool[table.flatten()] = store.unflatten(2, (count, PAGE)).transpose(1, 2).flatten(0, 1)
    places = ends[:, None] - width + torch.arange(width, device=device)
    seen = torch.arange(entries, device=device) <= places[..., None]
    zero = torch.zeros((), dtype=dtype, device=device)
    bias = torch.where(seen, zero, zero - float("inf")).repeat(1, group, 1)[:, None]
    scaling = shape.head_dim**-0.5

    def slots() -> Tensor:
        asked = query.view(batch, heads[1], group * width, shape.head_dim)
        out = scaled_dot_product_attention(asked, keys, values, bias, scale=scaling)
        return out.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch, width, *heads[:1], shape.head_dim)

    def pages() -> Tensor:
        return paged_attention(query, pools[0], pools[1], table, places, entries, scaling)

    size = 2 * float(ends.sum()) * heads[1] * shape.head_dim * keys.element_size()
    return {"attention over pages": pages, "attention over slots": slots}, size


def _cases(
    device: torch.device, batch: int, drafts: int, vocabulary: int
) -> dict[str, tuple[Callable[[], object], float]]:
    """Return calls by name, each with the bytes that any implementation moves."""
    p = torch.randn(batch, drafts + 1, vocabulary, device=device).mul_(2).softmax(-1)
    q = (p[:, :drafts].log() + 0.4 * torch.randn(batch, drafts, vocabulary, device=device)).softmax(-1)
    numbers = torch.rand(batch, 2 * drafts + 2, dtype=torch.float64, device=device)
    checks, draws = (part.contiguous() for part in numbers.split([drafts + 2, drafts], 1))
    tokens = sample(q, draws)
    top_p = BatchSampling(top_p=torch.full((batch,), 0.9, device=device))
    logits, size = p.log(), p.numel() * p.element_size()
    return {
        "verify": (lambda: chain_verify(tokens, q, p, checks), 2 * size),
        "block verify": (lambda: block_verify(tokens, q, p, checks), 2 * size),
        "draw": (lambda: sample(p, draws[:, :1].expand(-1, drafts + 1)), size),
        "entropies": (lambda: entropy(p), size),
        "softmax": (lambda: logits.softmax(-1), 2 * size),
        "top-p": (lambda: top_p.probs(logits), 2 * size),
    }


# ---- 5: decoding


def engine(context: Context) -> None:
    """Time a cycle: kernel by kernel, as a CUDA graph, and as a graph launched before the previous one is read.

    Rows also have its launches, the share of it in which the device works, and reads of the device.
    """
    shapes = {"tiny": TINY} if context.dry else SHAPES
    for name, shape in shapes.items():
        policy = policy_of(shape, context.device)
        for batch in (2,) if context.dry else (1, 32, 256):
            known: dict[tuple[int, str], float] = {}  # by drafts and how cycles are launched
            for drafts, how in product((0, 1, 3), ("eager", "graphs", "overlap")):
                if how == "overlap" and drafts == 1:
                    continue  # between the other two
                system, graphs, overlap = "bebop" if drafts else "autoregressive", how != "eager", how == "overlap"
                about = {"model": name, "batch": batch, "system": system, "K": drafts, "graphs": graphs}
                about["overlap"] = overlap
                if context.left < 0:
                    context.keep("cycle", None, skipped="time is up", **about)
                    continue
                with context.tried("cycle", **about):
                    run = Decoding(policy, system, drafts, batch, graphs, overlap)
                    seconds = run.cycles(8 if context.dry else 30)
                    counted = run.counted()
                    cycle = known[drafts, how] = statistics.median(seconds)
                    plain, eager, graph = (known.get(key) for key in ((0, how), (drafts, "eager"), (drafts, "graphs")))
                    halves = [statistics.median(half) for half in (seconds[::2], seconds[1::2])]
                    context.keep(
                        "cycle", 1e3 * cycle, unit="ms", **counted, **about,
                        of_plain=cycle / plain if plain else None, of_eager=cycle / eager if eager else None,
                        of_graph=cycle / graph if overlap and graph else None,
                        steady=abs(halves[0] - halves[1]) <= 0.05 * min(halves),
                        busy=counted["busy ms"] / (1e3 * cycle) if counted["busy ms"] else None,
                    )  # fmt: skip
        _beside_slots(context, name, policy)
        del policy
        if context.device.type == "cuda":
            torch.cuda.empty_cache()


def _beside_slots(context: Context, name: str, policy: Policy) -> None:
    """Time a captured cycle with the KV cache in pages, and in slots, where attention is PyTorch's."""
    batch = 2 if context.dry else 32
    for paged in (True, False):
        about = {"model": name, "batch": batch, "system": "bebop", "K": 3, "graphs": True, "paged": paged}
        if context.left < 0:
            context.keep("cache", None, skipped="time is up", **about)
            continue
        with context.tried("cache", **about):
            seconds = Decoding(policy, "bebop", 3, batch, graphs=True, paged=paged).cycles(8 if context.dry else 30)
            context.keep("cache", 1e3 * statistics.median(seconds), unit="ms", **about)


# ---- beside: precision


def precise(context: Context) -> None:
    """Compare an engine's log-probs in bf16 and fp16 with fp32, TF32 off; no bound should be exceeded."""
    sizes = [(2, 64)] if context.dry else [(8, 256), (24, 256), (28, 1024)]
    completions, tokens = (8, 8) if context.dry else (64, 64)
    for (layers, width), dtype in product(sizes, TYPES):
        about = {"layers": layers, "width": width, "dtype": dtype}
        if context.left < 0:
            context.keep("log-probs", None, skipped="time is up", **about)
            continue
        with context.tried("log-probs", **about):
            vocabulary = 512 if context.dry else 32_768
            policy = random_policy(random_shape(layers, width, vocabulary), str(context.device))
            found, _ = deviations_of(policy, dtype, completions, tokens)
            context.keep("log-probs", found.pop("mean"), unit="nats", **{**about, **found})


# ---- 6: training


def trainer(context: Context) -> None:
    """Time updates with and without checkpointing: seconds, share of log-probs, peak memory measured and predicted.

    Then time the publication of the weights.
    """
    shapes = {"tiny": TINY} if context.dry else TRAINED
    for name, shape in shapes.items():
        arms = list(product((64,) if context.dry else (4096, 8192), (False, True), (0,)))
        if find_spec("peft"):  # it may have to be carried there
            arms.append((64 if context.dry else 8192, False, LORA))
        for tokens, again, rank in arms:
            about = {"model": name, "tokens": tokens, "checkpointing": again, "lora": rank}
            if context.left < 0:
                context.keep("update", None, skipped="time is up", **about)
                continue
            with context.tried("update", **about):
                context.keep("update", None, **about, **update(shape, context.device, tokens, again, rank))
            if context.device.type == "cuda":
                torch.cuda.empty_cache()
    for name, shape in shapes.items():
        _published(context, name, shape)


def _published(context: Context, name: str, shape: Shape) -> None:
    """Time publication from trainer to embedded engine, in total and in the pause.

    The ways are the object store's copies, shared memory, and gloo's broadcast over loopback.
    """
    about: dict[str, object] = {"model": name}
    if context.left < 0:
        context.keep("publish", None, skipped="time is up", **about)
        return
    with context.tried("publish", **about):
        both = Publishing(shape, context.device)
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for turn in range(3 if context.dry else 5):
            if turn > 1 and context.left < 0:
                break
            for way in WAYS if turn % 2 else reversed(WAYS):
                found[way].append(both.embedded(way))
        for way, turns in found.items():
            whole, pause = (statistics.median(one[place] for one in turns[1:]) for place in (0, 1))
            context.keep("publish", whole, unit="s", pause=pause, way=way, GB=both.bytes / 1e9, **about)
        context.keep("arrived", float(both.arrived()), **about)
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


# ---- by itself: a job


def job(context: Context) -> None:
    """Run a GRPO job, plain and with drafts, eager and overlapped, in turns; keep the seconds of a step.

    First with the built-in model, to see if it learns; then with random weights in SmolLM2's shape.
    """
    steps, size, rounds = (2, 1, 1) if context.dry else (15, 8, 2)
    with tempfile.TemporaryDirectory() as scratch:
        other = "tiny shape" if context.dry else "SmolLM2-135M"
        written(TINY if context.dry else SHAPES[other], Path(scratch) / other, context.device.type)
        places = {"built-in": "tiny", other: str(Path(scratch) / other)}
        for number, name in [(0, "built-in"), (0, other), *((n, m) for n in range(1, rounds) for m in places)]:
            for arm in ARMS:
                about = {"model": name, "arm": arm}
                if context.rows and context.left < 0:
                    context.keep("job", None, skipped="time is up", **about)
                    continue
                with context.tried("job", **about):
                    run = Path(scratch) / f"{number} {name} {arm}"
                    found = carried_out(run, arm, steps, size, context.device.type, places[name])
                    context.keep("job", found["time/step"], unit="s a step", **about, **found)


STAGES = (
    Stage(name="card", seconds=15, run=card, decides="above 8 us an operation, graphs come first"),
    Stage(name="tests", seconds=90, run=tests, decides="a failure comes before every number"),
    Stage(name="tv", seconds=70, run=tv, decides="which part of the TV loss is worth work"),
    Stage(name="linear", seconds=50, run=linear, decides="chunk sizes on a GPU"),
    Stage(name="verify", seconds=45, run=verify, decides="whether tokens are drawn from logits, and keys are in pages"),
    Stage(name="engine", seconds=150, run=engine, decides="the order of the engine's steps, the cost of a draft"),
    Stage(name="trainer", seconds=60, run=trainer, decides="tokens of a micro-batch, checkpointing"),
    Stage(name="job", seconds=240, run=job, decides="whether drafts pay in a whole job", asked=True),
    Stage(name="precision", seconds=60, run=precise, decides="bounds of log-probs on a GPU", asked=True),
    Stage(name="headline", seconds=240, run=headline, decides="what the paper's acceptances bring", asked=True),
)

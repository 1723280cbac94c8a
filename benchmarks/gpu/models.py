"""Decoding and training of models with random weights in the shapes of known ones, which is enough to measure speed."""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.profiler import ProfilerActivity, profile
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bebop.config.job import DecodingConfig, JobConfig, LoraConfig, ModelConfig, RolloutConfig, TrainerConfig
from bebop.config.simulate import MemoryConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.graphs import CudaRecorder, EagerRecorder, Recorder
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.simulation.memory import Question
from bebop.simulation.roofline import GPUS, Model
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.scorer import token_logprobs
from bebop.trajectory import Batch, Completion, Group, Prompt, SamplingParams, Trajectory

PROMPT, GROUP = 32, 4  # tokens of a prompt, completions of a group
CYCLES = 64  # that a completion has tokens for, if all drafts are accepted
WARM = 4  # cycles before those that are timed


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a model."""

    qwen: bool  # else Llama
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int


SHAPES = {
    "SmolLM2-135M": Shape(
        qwen=False, layers=30, hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49_152
    ),
    "Qwen3-1.7B": Shape(
        qwen=True, layers=28, hidden=2048, inner=6144, heads=16, kv_heads=8, head_dim=128, vocabulary=151_936
    ),
}
# The sizes of Qwen2.5-7B with the layers of Qwen3 and one matrix for both ends: 7.1 billion parameters.
DENSE_7B = Shape(
    qwen=True, layers=28, hidden=3584, inner=18_944, heads=28, kv_heads=4, head_dim=128, vocabulary=152_064
)
TRAINED = {
    "Qwen3-0.6B": replace(SHAPES["Qwen3-1.7B"], hidden=1024, inner=3072),
    "Qwen3-1.7B": SHAPES["Qwen3-1.7B"],
}
TINY = Shape(qwen=True, layers=2, hidden=32, inner=48, heads=4, kv_heads=2, head_dim=8, vocabulary=64)


def policy_of(shape: Shape, device: torch.device, *, mimo: bool = False) -> Policy:
    """Return a random policy with an MTP head in bfloat16, made on its device.

    ``mimo``: with Qwen2 layers and a separate language-model head, as in MiMo, the only family of this size for which
    vLLM has an MTP layer. Its products have the same sizes; Qwen3 adds norms of queries and keys.
    """
    common: dict[str, Any] = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim, "max_position_embeddings": 4096, "tie_word_embeddings": not mimo,
        "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "attn_implementation": ATTENTION,
    }  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            if mimo:
                backbone = Qwen2ForCausalLM(Qwen2Config(**common)).eval()
            elif shape.qwen:
                backbone = Qwen3ForCausalLM(Qwen3Config(**common)).eval()
            else:
                backbone = LlamaForCausalLM(LlamaConfig(**common)).eval()
            head = MTPHead(backbone).eval()
    finally:
        torch.set_default_dtype(before)
    words = Tokenizer(WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    return Policy(
        backbone=backbone.to(device, torch.bfloat16), tokenizer=tokenizer, mtp=head.to(device, torch.bfloat16),
        layout="mimo",
    )  # fmt: skip


def prompt_of(number: int, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens of a row's prompt; none of them is a stop token."""
    return tuple((7 * number + 3 * place) % (vocabulary - 1) + 1 for place in range(PROMPT))


class Decoding:
    """Engine with all rows in mid-completion."""

    def __init__(
        self,
        policy: Policy,
        system: str,
        drafts: int,
        batch: int,
        graphs: bool = False,
        overlap: bool = False,
        paged: bool | None = None,
        prepare: Callable[[TorchEngine], None] | None = None,
    ) -> None:
        """Make the engine and start a batch of prompts.

        ``graphs``: whether a cycle is launched as a graph; without a GPU its body runs as if it were. ``overlap``:
        whether it is launched before the previous cycle is read. ``paged``: whether the KV cache is in pages; None: on
        a GPU. ``prepare``: gets the engine before its first cycle.
        """
        config = DecodingConfig(system=system, draft_tokens=max(1, drafts))
        length = PROMPT + CYCLES * (drafts + 1)
        self.device = policy.device
        cuda = self.device.type == "cuda"
        self.recorder: Recorder | None = None
        if graphs:
            self.recorder = CudaRecorder() if cuda else EagerRecorder()
        self.overlap = overlap
        self.engine = TorchEngine(
            policy, config, slots=batch, max_length=length, recorder=self.recorder, overlap=overlap, paged=paged
        )
        self.engine.text = lambda *_: ""  # type: ignore[assignment]  # tokens beyond the tokenizer's
        if prepare is not None:
            prepare(self.engine)
        self.params = SamplingParams(max_new_tokens=length - PROMPT)
        self.restart(batch)

    def restart(self, batch: int, first_seed: int = 0) -> None:
        """End all requests, start ``batch`` prompts and run ``WARM`` cycles."""
        self.engine.abort()
        size = self.engine.policy.vocab_size
        for number in range(batch):
            params = replace(self.params, seed=first_seed + number)
            self.engine.add(Request(id=number, token_ids=prompt_of(number, size), params=params))
        for _ in range(WARM):
            self.engine.step()

    def cycles(self, count: int) -> list[float]:
        """Return the seconds of ``count`` cycles, each with its read of the device at the end.

        With overlap a step reads only the previous cycle and waits for nothing else; the device works on meanwhile.
        """
        seconds = []
        for _ in range(count):
            began = time.perf_counter()
            self.engine.step()
            if not self.overlap:
                self._wait()
            seconds.append(time.perf_counter() - began)
        return seconds

    def counted(self) -> dict[str, float]:
        """Count the work of one cycle.

        Counted are kernels, host calls that launch kernels or copies, milliseconds in which kernels run, waits for the
        device, tokens per row, and the memory of graphs.
        """
        cuda = self.device.type == "cuda"
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        before = int(self.engine.slots.count.sum())
        with profile(activities=kinds) as seen:
            self.engine.step()
            self._wait()
        emitted = int(self.engine.slots.count.sum()) - before
        events = seen.events()
        kernels = [e for e in events if str(e.device_type).endswith("CUDA")]
        calls = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")
        return {
            "launches": len(kernels) if cuda else sum(e.name.startswith("aten::") for e in events),
            "calls": sum(e.name.startswith(calls) for e in events),
            "graph MiB": 0.0 if self.recorder is None else self.recorder.held() / 2**20,
            "busy ms": sum(e.time_range.elapsed_us() for e in kernels) / 1e3,
            "waits": waits([e.name for e in events]),
            "tokens a row": emitted / max(1, len(self.engine.active)),
        }

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def waits(events: Iterable[str]) -> int:
    """Count the waits of a cycle for the device by the names of its profiled events.

    Each is one call of the CUDA runtime: of an event, as where the engine reads a cycle's results, or of a stream, as
    within ``.item()``. ``cudaDeviceSynchronize`` is the benchmark's own.
    """
    return sum(name in ("cudaEventSynchronize", "cudaStreamSynchronize", "cudaMemcpy") for name in events)


def update(
    shape: Shape, device: torch.device, tokens: int, checkpointing: bool = False, rank: int = 0
) -> dict[str, float | None]:
    """Return the seconds of an update on ``tokens`` tokens in one micro-batch, and of its log-probs alone.

    Also return the peak gigabytes, measured and as ``bebop.simulate memory`` predicts them. ``checkpointing``: whether
    layers are computed again in the backward pass. ``rank``: the rank of a trained adapter; 0: all weights are trained.
    The prediction is for training all weights.
    """
    gc.collect()  # layers that are computed again hold themselves: those of the update before would count in the peak
    if device.type == "cuda":
        torch.cuda.empty_cache()
    policy = policy_of(shape, device)
    rows, length = 2 * GROUP, tokens // (2 * GROUP)
    config = JobConfig(
        model=ModelConfig(dtype="bfloat16", device=device.type),
        trainer=TrainerConfig(
            groups_per_step=2,
            group_size=GROUP,
            max_tokens=tokens,
            lr=1e-6,
            checkpointing=checkpointing,
            lora=LoraConfig(rank=rank),
        ),
        rollout=RolloutConfig(staleness=0),  # else each update copies all weights to the host, for old policies
    )
    trainer = PolicyTrainer(policy, config)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(3):
        made = batch_of(rows, length, shape.vocabulary, step)
        began = time.perf_counter()
        trainer.update(made)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else None
    head = policy.backbone.get_output_embeddings().weight
    answered = rows * (length - PROMPT // 8)
    hidden = torch.randn(answered, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(shape.vocabulary, (answered,), device=device)
    alone = []
    for _ in range(3):
        began = time.perf_counter()
        found, _entropy = token_logprobs(hidden, head, labels, temperature=1.0, dtype=torch.bfloat16)
        found.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        alone.append(time.perf_counter() - began)
    return {
        "s": min(seconds[1:]),
        "log-probs s": min(alone[1:]),
        "peak GB": peak,
        "predicted GB": sum(question(shape, tokens, checkpointing).parts().values()) / 1e9,
        "tokens/s": tokens / min(seconds[1:]),
    }


def question(shape: Shape, tokens: int, checkpointing: bool) -> Question:
    """Return the question for ``bebop.simulate memory`` about an update on one GPU."""
    model = Model(
        layers=shape.layers, hidden=shape.hidden, heads=shape.heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, intermediate=shape.inner, vocabulary=shape.vocabulary, tied=True,
    )  # fmt: skip
    config = MemoryConfig(gpus=1, max_tokens=tokens, checkpointing=checkpointing)
    return Question(config, GPUS["h100"], model, "")


def batch_of(rows: int, length: int, vocabulary: int, seed: int) -> Batch:
    """Return two groups of completions whose rewards differ; prompts are an eighth of ``PROMPT`` long."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(2):
        ids = tuple(int(token) for token in rng.integers(1, vocabulary, PROMPT // 8))
        prompt = Prompt(index=2 * seed + number, task="none", text="", token_ids=ids, item={})
        answers = []
        for member in range(rows // 2):
            size = length - len(ids)
            completion = Completion(
                token_ids=rng.integers(1, vocabulary, size),
                logprobs=np.full(size, -np.log(vocabulary), dtype=np.float32),
                versions=np.full(size, seed, dtype=np.int64),
            )
            answers.append(Trajectory.single(completion, reward=float(member % 2)))
        groups.append(Group(prompt=prompt, trajectories=tuple(answers)))
    return Batch(groups=tuple(groups))

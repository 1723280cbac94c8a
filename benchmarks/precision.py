"""Distance of the embedded engine's log-probs in bf16 and fp16 from fp32, beside the bounds of ``certify.precision``.

Completions of one model in the coarse type are scored by transformers in fp32 with the very same weights. Models are
the built-in one, SmolLM2 if present, and random ones by depth and width; these have logits of a realistic size.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.bench.gpu.models import Shape, policy_of, prompt_of
from bebop.bench.record import noted
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.model_reference import ModelReference, cast_weights
from bebop.certify.precision import Deviations, entropy, gain_of, sampler_error
from bebop.config.decoding import DecodingConfig
from bebop.config.job import ModelConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.decoding.base import Draft, Rows, Verified
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import SamplingParams

TYPES = ("bfloat16", "float16")
LOGITS = 3.0  # standard deviation of a random model's
DEPTHS, WIDTHS = ((2, 64), (8, 64), (24, 64)), ((8, 256), (8, 576))  # layers and width of random models


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionBench:
    """Settings of the benchmark."""

    models: tuple[str, ...]  # paths; random ones are measured beside
    completions: int
    tokens: int  # of each
    seeds: int = 1  # of random weights


def run(bench: PrecisionBench) -> list[dict[str, Any]]:
    """Return one row for each model and type."""
    made: dict[str, Callable[[], Policy]] = {
        path: partial(load_policy, ModelConfig(path=path, dtype="bfloat16", device="cpu")) for path in bench.models
    }
    for seed in range(bench.seeds):
        for layers, width in (*DEPTHS, *WIDTHS):
            name, shape = f"random {layers} x {width} seed {seed}", random_shape(layers, width)
            made[name] = partial(random_policy, shape, seed=seed)
    rows = []
    for name, make in tqdm(made.items(), desc="precision"):
        policy = make()
        for dtype in TYPES:
            row = {"model": name, **deviations_of(policy, dtype, bench.completions, bench.tokens)[0]}
            noted(row)
            rows.append(row)
    return rows


def random_shape(layers: int, width: int, vocabulary: int = 512) -> Shape:
    """Return the shape of a Qwen3 model, with norms of queries and keys."""
    return Shape(
        qwen=True, layers=layers, hidden=width, inner=2 * width, heads=width // 16, kv_heads=width // 32, head_dim=16,
        vocabulary=vocabulary,
    )  # fmt: skip


@torch.no_grad()
def random_policy(shape: Shape, device: str = "cpu", seed: int = 0) -> Policy:
    """Return a bf16 policy whose layers keep the size of their inputs, and whose logits are as large as real ones."""
    policy = policy_of(shape, torch.device(device))
    torch.manual_seed(seed)
    for parameter in policy.backbone.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0, 1 / math.sqrt(parameter.shape[1]))
    head = policy.backbone.get_output_embeddings().weight
    head.mul_(LOGITS)
    return replace(policy, mtp=None)


def deviations_of(
    policy: Policy, dtype: str, completions: int, tokens: int, temperature: float = 1.0
) -> tuple[dict[str, Any], Deviations]:
    """Measure a policy whose weights are bf16, decoded in ``dtype`` on its device.

    ``sampler``: the largest distance of a reported log-prob from those of its own logits, in nats. ``TV``: the mean of
    |e^d - 1| / 2 over tokens, an estimate of the total variation from fp32.
    """
    with exact_products():
        exact, coarse = (
            replace(policy, mtp=None, parts={}, backbone=cast_weights(policy.backbone, kind))
            for kind in ("float32", dtype)
        )
        plain = DecodingConfig(system="autoregressive", draft_tokens=0)
        length = len(prompt_of(0, policy.vocab_size)) + tokens
        engine = TorchEngine(coarse, plain, slots=completions, max_length=length, measure=False)
        engine.text = lambda *_: ""  # type: ignore[assignment]  # tokens beyond a random model's tokenizer
        own: list[Tensor] = []  # [B] log-probs of each cycle's own logits
        assert isinstance(engine.decoder, DraftVerify)
        verify = engine.decoder.verify

        # No observer: while one is there, cycles go by probabilities on a GPU too, which no job does.
        def watched(rows: Rows, draft: Draft) -> Verified:
            found = verify(rows, draft)
            tokens = found.accepted.tokens[:, 0]
            nothing = torch.zeros_like(tokens, dtype=torch.float64)
            own.append(-sampler_error(found.out.logits[:, 0], tokens, nothing, temperature))
            return found

        engine.decoder.verify = watched
        params = SamplingParams(max_new_tokens=tokens, temperature=temperature)
        asked = [
            Request(id=i, token_ids=prompt_of(i, policy.vocab_size), params=replace(params, seed=i))
            for i in range(completions)
        ]
        answers = EmbeddedEngine(engine).sample(asked, lambda _: None)
        reference = ModelReference(exact, dtype=dtype)
        block = reference.block(answers, params)
    assert block.reported is not None and block.spread is not None and reference.gain is not None
    found, off = Deviations(), block.reported - block.logprobs
    found.add(off, block.spread, block.logprobs + entropy(block.probs))
    # All completions are equally long, so row i of every cycle is completion i.
    said = torch.stack([torch.from_numpy(answer.logprobs) for answer in answers])
    layers = policy.backbone.config.num_hidden_layers
    row: dict[str, Any] = {
        "layers": layers, "width": policy.backbone.config.hidden_size, "dtype": dtype, "tokens": len(found),
        **found.measured(), "gain": reference.gain, "amplification": reference.gain / gain_of(layers),
        "TV": float((off.exp() - 1).abs().mean() / 2),
        "sampler": float((said - torch.stack(own, 1).cpu()).abs().max()),
        "beyond": len(found.beyond()),
    }  # fmt: skip
    return row, found


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute products of fp32 matrices in fp32 within this block: TF32 keeps ten bits."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before

"""A model small enough for Triton's interpreter and many answers, and what its server's numbers should be."""

import copy
import functools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils.logging import set_verbosity_error

from bebop.config.job import DecodingConfig, JobConfig, ModelConfig, MonitorConfig, RolloutConfig, SamplingConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.mtp import MTPHead
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import Completion, SamplingParams
from tests.builders import letters
from tests.goodness_of_fit import p_value

VOCAB, DRAFTS = 12, 2
PROMPT = (3, 1, 4)
Array = NDArray[np.float64]


def policy(seed: int = 0, heads: int = 1) -> Policy:
    """One layer; distributions neither flat nor peaked, and a draft that differs from the target. Time goes with the
    heads."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=VOCAB - 1, pad_token_id=None, initializer_range=0.2, attn_implementation=ATTENTION,
    )  # fmt: skip
    backbone = Qwen2ForCausalLM(config).eval()
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, 0.3)
        for parameter in head.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 0.25)
    return Policy(backbone=backbone, tokenizer=letters(VOCAB), mtp=head, layout="mimo")


def checkpoint(folder: Path, seed: int = 0, heads: int = 1) -> Path:
    save_policy(policy(seed, heads), folder)
    return folder


def windows(folder: Path) -> Path:
    """Write a Gemma 3 whose first layer sees the last 8 tokens alone; the embedded engine refuses it."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, max_position_embeddings=256, sliding_window=8,
        layer_types=["sliding_attention", "full_attention"], bos_token_id=None, eos_token_id=VOCAB - 1,
        pad_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(folder)
    letters(VOCAB).save_pretrained(folder)
    return folder


def draft_model(folder: Path, seed: int = 5) -> Path:
    """Write a model without an MTP head that may draft for the others."""
    draft = policy(seed)
    draft.mtp = None
    save_policy(draft, folder)
    return folder


def job(folder: Path, system: str = "bebop", draft: Path | None = None, **rollout: Any) -> JobConfig:
    return JobConfig(
        model=ModelConfig(path=str(folder), device="cpu", draft=None if draft is None else str(draft)),
        decoding=DecodingConfig(system=system, draft_tokens=DRAFTS),
        rollout=RolloutConfig(max_length=120, slots=64, sampling=SamplingConfig(max_new_tokens=60), **rollout),
        monitor=MonitorConfig(decode_stats=True),
    )


def embedded(folder: Path, system: str = "bebop") -> TorchEngine:
    return TorchEngine(reload(folder), job(folder, system).decoding, slots=64, max_length=120)


def ask(count: int, tokens: int, temperature: float = 1.0, prompt: Sequence[int] = PROMPT) -> list[Request]:
    distributions = [SamplingParams(temperature=temperature, max_new_tokens=tokens, seed=i) for i in range(count)]
    return [Request(id=i, token_ids=tuple(prompt), params=params) for i, params in enumerate(distributions)]


def answers(engine: Any, requests: Sequence[Request]) -> list[Completion]:
    """Run requests to their end, in their order."""
    for request in requests:
        engine.add(request)
    return collect(engine, len(requests))


def collect(engine: Any, count: int, done: dict[int, Completion] | None = None) -> list[Completion]:
    done = {} if done is None else done
    while engine.unfinished:
        done |= {finished.id: finished.completion for finished in engine.step()}
    return [done[i] for i in range(count)]


@functools.cache
def stock(folder: Path) -> PreTrainedModel:
    """The backbone as transformers has it, with its own attention."""
    set_verbosity_error()  # it lists the head's weights as unexpected
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


@torch.no_grad()
def logprobs(folder: Path, prompt: Sequence[int], answer: Sequence[int], temperature: float = 1.0) -> Array:
    """log p of each token of an answer by transformers, with its own attention."""
    ids = torch.tensor([[*prompt, *answer]])
    distributions = (stock(folder)(ids).logits[0] / temperature).log_softmax(-1)
    rows = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return distributions[rows, ids[0, len(prompt) :]].double().numpy()


@torch.no_grad()
def distribution(folder: Path, context: Sequence[int], temperature: float = 1.0) -> Array:
    """Of the token after a context [V], by transformers."""
    return (stock(folder)(torch.tensor([[*context]])).logits[0, -1] / temperature).softmax(-1).double().numpy()


@torch.no_grad()
def joint_distribution(folder: Path, prompt: Sequence[int], temperature: float = 1.0, vocab: int = VOCAB) -> Array:
    """Exact distribution [V, V, V] of the first three tokens."""
    model = copy.deepcopy(stock(folder)).double()

    def sampling(ids: Tensor) -> Tensor:
        return (model(ids).logits[:, -1] / temperature).softmax(-1)

    start = torch.tensor([list(prompt)])
    first = sampling(start)[0]
    token = torch.arange(vocab)
    second = sampling(torch.cat([start.expand(vocab, -1), token[:, None]], 1))
    pairs = torch.cartesian_prod(token, token)
    third = sampling(torch.cat([start.expand(vocab**2, -1), pairs], 1)).view(vocab, vocab, vocab)
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def greedy_test(engine: ServedEngine, folder: Path) -> None:
    """Greedy completions with drafts are those of plain decoding, of log-probs 0."""
    plain = answers(embedded(folder, "autoregressive"), ask(2, 24, temperature=0.0))
    drafted = answers(engine, ask(2, 24, temperature=0.0))
    assert [c.token_ids.tolist() for c in drafted] == [c.token_ids.tolist() for c in plain]
    assert all(not c.logprobs.any() and c.finish_reason == "length" for c in drafted)


def logprobs_test(engine: ServedEngine, folder: Path) -> None:
    """Log-probs are those of the distribution at the temperature that was asked for, and at no other."""
    for temperature in (1.0, 0.7):
        for found in answers(engine, ask(4, 20, temperature)):
            wanted = logprobs(folder, PROMPT, found.token_ids.tolist(), temperature)
            np.testing.assert_allclose(found.logprobs, wanted, atol=1e-4)
            assert found.versions.tolist() == [0] * 20 and found.exact
    hotter = logprobs(folder, PROMPT, found.token_ids.tolist(), 1.0)
    assert np.abs(found.logprobs - hotter).max() > 1e-2  # the test would notice another temperature


def tokens_distribution_test(found: Sequence[Completion], folder: Path) -> None:
    """Single tokens and joint pairs follow the target's distribution; the same counts reject a slightly hotter one.

    The first two tokens of all answers, and the third of those that have one.
    """
    expected, hotter = joint_distribution(folder, PROMPT), joint_distribution(folder, PROMPT, temperature=1.25)
    for width, summed_out in ((2, ((), (0,), (1,))), (3, ((2,), (0,), (1,), (0, 1)))):
        ids = np.stack([c.token_ids[:width] for c in found if len(c.token_ids) >= width])
        counts = np.zeros((VOCAB,) * width)
        np.add.at(counts, tuple(ids.T), 1)
        wanted, wrong = (joint.sum(tuple(range(width, 3))) for joint in (expected, hotter))
        for axes in summed_out:
            assert p_value(counts.sum(axes), wanted.sum(axes)) > 1e-4, (width, axes)
        assert width == 3 or p_value(counts, wrong) < 1e-6
        if len(found[0].token_ids) == len(found[-1].token_ids):
            return  # all have the same length


def ask_many(engine: ServedEngine, rounds: Mapping[int, int], batch: int = 50) -> list[Completion]:
    """``rounds`` of so many batches for each length, and what they took."""
    began, found = time.perf_counter(), []
    for tokens, count in rounds.items():
        found += [c for _ in range(count) for c in answers(engine, ask(batch, tokens))]
    print(f"{len(found)} requests in {time.perf_counter() - began:.0f} s")
    return found


def reload(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=str(folder), device="cpu"), need_head=True)

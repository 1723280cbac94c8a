"""What PyTorch computes on a CPU in the place of SGLang's kernels, against those kernels in Triton's interpreter."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from bebop.rollout.sglang.cpu import _decode, _extend, top_k, top_p

HEADS, GROUPS, WIDTH, SLOTS = 4, 2, 16, 64
CACHED, NEW = (5, 0, 9), (3, 4, 1)  # tokens of three sequences


def ends(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def inputs(masked: bool) -> tuple[Any, ...]:
    """The arguments of ``extend_attention_fwd``, up to the one for what comes out."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, keys, values = (
        torch.randn(count, heads, WIDTH, generator=generator)
        for count, heads in ((sum(NEW), HEADS), *[(sum(NEW), GROUPS)] * 2, *[(SLOTS, GROUPS)] * 2)
    )
    places = torch.randperm(SLOTS, generator=generator)[: sum(CACHED)].to(torch.int32)
    sizes = tuple(n * (c + n) for c, n in zip(CACHED, NEW, strict=True))
    mask = torch.rand(sum(sizes), generator=generator) < 0.5
    for start, c, n in zip(ends(sizes).tolist(), CACHED, NEW, strict=False):
        for i in range(n):
            mask[start + i * (c + n) + c + i] = True  # a token sees itself
    return q, k, v, keys, values, ends(NEW), ends(CACHED), places, mask if masked else None, ends(sizes)


@pytest.mark.parametrize("masked", [False, True])
def test_new_tokens_attend_to_what_they_see(masked: bool) -> None:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd as kernel

    q, k, v, keys, values, new, cached, places, mask, starts = inputs(masked)

    def ran(function: Any, mask: Tensor | None) -> Tensor:
        out = torch.full_like(q, torch.nan)
        function(q, k, v, out, keys, values, new, cached, places, mask, True, starts, max(NEW), 1.0, 1.0, WIDTH**-0.5)
        return out

    def ours(*arguments: Any) -> None:
        _extend(lambda *_: pytest.fail("left to the kernel"), *arguments)

    wanted = ran(kernel, mask)
    torch.testing.assert_close(ran(ours, mask), wanted, rtol=1e-5, atol=1e-5)
    other = ran(ours, torch.ones_like(mask) if mask is not None else torch.ones(int(starts[-1]), dtype=torch.bool))
    assert not torch.allclose(other, wanted, atol=1e-2)  # who sees everything is noticed


def test_a_token_of_each_sequence_attends_to_the_cache() -> None:
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd as kernel

    _, _, _, keys, values, *_ = inputs(False)
    lengths = (5, 1, 9)
    places = torch.arange(sum(lengths), dtype=torch.int32)
    q = torch.randn(3, HEADS, WIDTH, generator=torch.Generator().manual_seed(4))

    def ran(function: Any) -> Tensor:
        out = torch.full_like(q, torch.nan)
        logits, sums = torch.zeros(3, HEADS, 1, WIDTH), torch.zeros(3, HEADS, 1)
        splits = torch.ones(3, dtype=torch.int32)
        function(q, keys, values, out, ends(lengths), places, logits, sums, splits, 1, WIDTH**-0.5, 1.0, 1.0)
        return out

    def ours(*arguments: Any) -> None:
        _decode(lambda *_: pytest.fail("left to the kernel"), *arguments)

    torch.testing.assert_close(ran(ours), ran(kernel), rtol=1e-5, atol=1e-5)


def test_windows_sinks_and_caps_are_left_to_the_kernel() -> None:
    q, k, v, keys, values, new, cached, places, mask, starts = inputs(False)
    asked: list[dict[str, Any]] = []
    for features in ({"sliding_window_size": 8}, {"sinks": torch.zeros(HEADS)}, {"logit_cap": 30.0}):
        _extend(
            lambda *_, **given: asked.append(given), q, k, v, q.clone(), keys, values, new, cached, places, mask, True,
            starts, max(NEW), 1.0, 1.0, None, **features,
        )  # fmt: skip
    assert [[*one] for one in asked] == [["sliding_window_size"], ["sinks"], ["logit_cap"]]


def test_truncation_is_that_of_transformers() -> None:
    """SGLang's own kernels for it ask for a GPU."""
    logits = 2 * torch.randn(4, 40, generator=torch.Generator().manual_seed(5))
    probs, ks, ps = logits.softmax(-1), (1, 7, 40, 1 << 30), (0.1, 0.5, 0.9, 1.0)
    for i, (k, p) in enumerate(zip(ks, ps, strict=True)):
        none = torch.zeros(1, 0, dtype=torch.long)
        for found, keeps in ((top_k(probs, torch.tensor(ks)), TopKLogitsWarper(k)),
                             (top_p(probs, torch.tensor(ps)), TopPLogitsWarper(p))):  # fmt: skip
            torch.testing.assert_close(found[i], keeps(none, logits[i : i + 1])[0].softmax(-1))
    assert (top_k(probs, torch.tensor(ks)) > 0).sum(-1).tolist() == [1, 7, 40, 40]

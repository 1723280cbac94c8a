"""What the fused losses hold and compute: chunks of logits alone, and each product once."""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.bench.memory import peak_bytes
from bebop.kernels import linear_losses
from bebop.kernels.linear_losses import linear_e2e_tv_loss
from bebop.kernels.losses import DraftLossOutput
from tests.cases import slow_but
from tests.kernels.hidden_states import MASK, VOCABULARY, anchors, fused, states, tokens_of, unfused


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        self.elements = max([self.elements, *(x.numel() for x in tensors)])
        return out


def test_logits_of_all_rows_never_exist() -> None:
    rows, vocabulary, width, chunk = 256, 1000, 4, 16
    inputs = states(rows, vocabulary, width)

    def learn(loss: Callable[[], DraftLossOutput]) -> None:
        loss().loss.sum().backward()

    with Largest() as seen:
        learn(lambda: fused(inputs, chunk_rows=chunk))
    assert seen.elements <= chunk * vocabulary
    with Largest() as seen:
        learn(lambda: unfused(inputs, "tv"))
    assert seen.elements >= rows * vocabulary
    assert peak_bytes(lambda: learn(lambda: unfused(inputs, "tv"))) > 3 * 4 * rows * vocabulary


def chunks_held(**options: Any) -> float:
    """Peak of a step beyond its inputs, in logits of one chunk; 3 chunks in all."""
    rows, vocabulary, chunk = 96, 16_384, 32
    hidden, weight, wide, head = states(rows, vocabulary, 4)
    weight.requires_grad_(options.get("weight_grad", False))
    tokens = options.pop("tokens", False)

    def step() -> None:
        if not tokens:
            fused((hidden, weight, wide, head), chunk_rows=chunk, **options).loss.sum().backward()
            return
        steps = [x.view(rows // 4, 4, -1) for x in (hidden, wide)]
        of_data = torch.zeros(rows // 4, 4, dtype=torch.long)
        mask = torch.ones(rows // 4, 4)
        linear_e2e_tv_loss(steps[0], weight, steps[1], head, mask, tokens=of_data, chunk_rows=chunk).backward()

    return peak_bytes(step) / (4 * chunk * vocabulary)


@pytest.mark.parametrize(
    "options",
    slow_but([{"tokens": True}], [{}, {"kind": "hybrid"}, {"weight_grad": True}, {"tokens": True}]),
    ids=str,
)
def test_peak_memory_is_three_logits_of_a_chunk(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of draft and target and a gradient; the loss itself works on 1 / 32 of the chunk at a time."""
    monkeypatch.setenv("BEBOP_COMPILE", "0")  # the eager core holds more, and a compiler takes seconds
    assert 2.9 < chunks_held(**options) < 3.4


def test_a_variant_that_keeps_logits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it keeps but those of the chunk before."""
    monkeypatch.setenv("BEBOP_COMPILE", "0")
    make = linear_losses._logits
    for count in (1, 3):
        kept: deque[tuple[Tensor, Tensor]] = deque(maxlen=count)

        def keep(*arguments: Any, kept: deque[tuple[Tensor, Tensor]] = kept) -> tuple[Tensor, Tensor]:
            kept.append(make(*arguments))
            return kept[-1]

        monkeypatch.setattr(linear_losses, "_logits", keep)
        assert chunks_held() > max(3.4, 2 * count)


class Products(TorchDispatchMode):
    """How many products there were with a head [d, V]."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.count = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm and args[1].shape[1] == self.vocabulary:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_one_product_with_each_head_per_chunk() -> None:
    inputs = anchors()
    with Products(VOCABULARY) as seen:
        linear_e2e_tv_loss(*inputs, MASK, tokens=tokens_of(inputs[0]), chunk_rows=2).backward()
    assert int(MASK.cumprod(-1).sum()) == 6 and seen.count == 2 * 3

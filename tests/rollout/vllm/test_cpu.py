"""What is asked of vLLM's CPU build before it is mended, and the mends themselves."""

import importlib
import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from bebop.rollout.interpreter import _draw_by_numpy
from bebop.rollout.vllm import cpu
from bebop.rollout.vllm.cpu import (
    Expansion,
    _packing_again,
    attributes,
    empties_weights,
    expanded,
    fails_on_nothing,
    norm_layer_by_layer,
    norms_by_the_first_weight,
    plain_gemm,
    trips_over,
)


def stock(x: torch.Tensor, cu: torch.Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
    """As vllm#55005: what is computed is thrown away."""
    return torch.full((tokens,), 3, dtype=x.dtype)


def missing(*args: Any) -> torch.Tensor:
    raise RuntimeError("no kernel for a CPU")


def test_each_value_once_for_each_draft() -> None:
    x, cu = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 2, 5], dtype=torch.int32)
    assert expanded(x, cu, 5).tolist() == [0.5, 0.5, 2, 2, 2]
    assert expanded(torch.tensor([4, 0, 6]), torch.tensor([1, 3, 4]), 4, 0, 9).tolist() == [4, 9, 9, 6]
    assert expanded(x, torch.zeros(3, dtype=torch.int32), 0).tolist() == []


@pytest.mark.parametrize(("own", "works"), [(expanded, True), (stock, False), (missing, False)])
@pytest.mark.parametrize("x", [torch.tensor([0.5, 2.0]), torch.tensor([5, 7], dtype=torch.int32)])
def test_vllms_own_is_kept_where_it_works(own: Any, works: bool, x: torch.Tensor) -> None:
    expansion = Expansion(own)
    assert expansion.works is None
    assert expansion(x, torch.tensor([1, 3], dtype=torch.int32), 3).tolist() == [*x[:1].tolist(), *[x[1].item()] * 2]
    assert expansion.works is works


def test_layers_that_lose_their_weights() -> None:
    def emptied(layer: Any, remove_weight: bool) -> None:
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    assert empties_weights(SimpleNamespace(dispatch_cpu_unquantized_gemm=emptied))  # type: ignore[arg-type]
    assert not empties_weights(SimpleNamespace(dispatch_cpu_unquantized_gemm=plain_gemm))  # type: ignore[arg-type]


def first_weight(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    """As the CPU build's ``rms_norm`` takes weights of several layers."""
    whole_norm(out, x, weight[0] if weight.dim() == 2 else weight, epsilon)


def whole_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    scale = weight[:, None] if weight.dim() == 2 else weight
    out.copy_(x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * scale)


def test_keys_of_a_block_drafter_are_normed_by_the_weights_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm: Any = ModuleType("vllm")
    vllm._custom_ops = SimpleNamespace(rms_norm=whole_norm)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    assert not norms_by_the_first_weight()
    model = SimpleNamespace(_k_norm_weights=torch.tensor([[1.0, 1, 1, 1], [2, 2, 2, 3]]), _rms_norm_eps=1e-6)
    keys, wanted = torch.arange(16.0).view(2, 2, 4) + 1, torch.empty(2, 2, 4)
    whole_norm(wanted, keys, model._k_norm_weights, 1e-6)
    vllm._custom_ops.rms_norm = first_weight
    assert norms_by_the_first_weight() and torch.allclose(norm_layer_by_layer(model, keys), wanted)


def test_the_mended_layer_multiplies_with_what_it_holds() -> None:
    layer: Any = torch.nn.Linear(4, 3)
    plain_gemm(layer, True)
    with torch.no_grad():
        layer.weight.mul_(2)
    x = torch.ones(2, 4)
    assert torch.equal(layer.cpu_linear(x, layer.weight, layer.bias), layer(x))


def rebind(overrides: list[Any]) -> None:
    """As vLLM looks for kernels: ``vars`` of every value of every module that has a ``__dict__``."""
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            if hasattr(value, "__dict__"):
                vars_of(value).get("kernel")


def vars_of(value: Any) -> Any:
    return DISPATCHER.vars(value)


DISPATCHER = SimpleNamespace(_rebind_kernels=rebind, vars=vars)


def test_a_look_at_all_modules_passes_what_makes_attributes_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert trips_over(DISPATCHER)
    monkeypatch.setattr(DISPATCHER, "vars", attributes)
    assert not trips_over(DISPATCHER) and "bebop_probe" not in sys.modules
    assert attributes(SimpleNamespace(kernel=3)) == {"kernel": 3} and "interpret" in attributes(cpu)


def test_the_largest_of_nothing() -> None:
    def largest(logits: torch.Tensor, k: torch.Tensor, p: None) -> torch.Tensor:
        return logits.topk(int(k.max())).values

    assert fails_on_nothing(SimpleNamespace(apply_top_k_top_p=largest))  # type: ignore[arg-type]
    assert not fails_on_nothing(SimpleNamespace(apply_top_k_top_p=lambda x, k, p: x))  # type: ignore[arg-type]


@pytest.mark.parametrize("packs", [False, True])
def test_experts_are_packed_with_every_update(packs: bool) -> None:
    """Once for each call, whether vLLM's own packs on updates or the first time alone."""
    calls: list[object] = []

    class Experts:
        def process_weights_after_loading(self, layer: object) -> None:
            calls.append(layer)

    def own(method: Any, layer: object, w13: object, w2: object) -> None:
        first, method.moe_kernel = method.moe_kernel is None, SimpleNamespace(fused_experts=experts)
        if first or packs:
            experts.process_weights_after_loading(layer)

    experts, method, setup = Experts(), SimpleNamespace(moe_kernel=None), _packing_again(own)
    for layer in ("first", "second", "third"):
        setup(method, layer, None, None)
    assert calls == ["first", "second", "third"]


@triton.jit
def _numbers_kernel(out, seed, place, n: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, n)
    first, second, third, fourth = tl.randint4x(seed, at)
    tl.store(out + at, first)
    tl.store(out + n + at, second)
    tl.store(out + 2 * n + at, third)
    tl.store(out + 3 * n + at, fourth)
    tl.store(out + 4 * n, tl.randint(seed, place))


def numbers(seed: int) -> torch.Tensor:
    out = torch.zeros(4 * 64 + 1, dtype=torch.int32)
    _numbers_kernel[(1,)](out, seed, 5 + seed % 3, 64)
    return out


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_philox_by_numpy_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    random: Any = importlib.import_module("triton.language.random")
    before = [numbers(seed) for seed in (0, 12345, 2**31 - 1, 2**40 + 17)]
    monkeypatch.setattr(random, "philox_impl", own := random.philox_impl)  # is put back afterwards
    _draw_by_numpy(importlib.import_module("triton.runtime.interpreter"))
    assert random.philox_impl is not own
    after = [numbers(seed) for seed in (0, 12345, 2**31 - 1, 2**40 + 17)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert len({tuple(one.tolist()) for one in after}) == 4

"""Repairs of vLLM's CPU build, so that drafts are verified correctly and weights can change (see docs/upstream.md).

Only broken functions are repaired: each repair first tests the installed version, with numbers that it cannot get right
by chance. The second model runner consists of Triton kernels, which ``interpret`` runs on a CPU: for tests, not for
speed.
"""

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from bebop.errors import UserError
from bebop.rollout.interpreter import quicken


def mend() -> list[str]:
    """Repair broken functions and return their names. It is called before a model is loaded, and more than once."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.sample.ops import topk_topp_sampler

    mended = []
    topk_topp_sampler.HAS_TRITON = False  # a loop of its kernel counts in Python's numbers when it is interpreted
    if not hasattr(CpuPlatform.check_and_update_config, "__wrapped__"):
        CpuPlatform.check_and_update_config = classmethod(_scheduled_as_asked(CpuPlatform.check_and_update_config))
    if empties_weights(utils):
        utils.dispatch_cpu_unquantized_gemm = plain_gemm
        mended.append("linear layers")
    if fails_on_nothing(rejection_sampler):
        rejection_sampler.apply_top_k_top_p = _unless_nothing(rejection_sampler.apply_top_k_top_p)
        mended.append("top-k of nothing")
    method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    if not hasattr(method._setup_kernel, "packs_again"):
        method._setup_kernel = _packing_again(method._setup_kernel)
    if find_spec("vllm.triton_utils.dispatcher"):
        dispatcher: Any = importlib.import_module("vllm.triton_utils.dispatcher")
        if trips_over(dispatcher):
            dispatcher.vars = attributes
            mended.append("a look at all modules")
    if norms_by_the_first_weight():
        from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

        DFlashQwen3Model._normalize_context_k = norm_layer_by_layer
        mended.append("keys of block drafters")
    if not isinstance(rejection_sampler.expand_batch_to_tokens, Expansion):
        rejection_sampler.expand_batch_to_tokens = Expansion(rejection_sampler.expand_batch_to_tokens)
    return mended


class MakesUpAll:
    """An object with a value for every name, ``__dict__`` too, as numba's library is once it is imported."""

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        return object()


def trips_over(dispatcher: Any) -> bool:
    """Return whether vLLM's search for kernels in all modules raises an error at an object like ``MakesUpAll``.

    If so, no engine starts in a process that has numba.
    """
    probe = ModuleType("bebop_probe")
    probe.__dict__["value"] = MakesUpAll()
    sys.modules[probe.__name__] = probe
    try:
        dispatcher._rebind_kernels([])
    except AttributeError:
        return True
    finally:
        del sys.modules[probe.__name__]
    return False


def attributes(value: Any) -> Mapping[str, Any]:
    """Return the result of ``vars`` for objects with real attributes, and nothing for those that make them up."""
    found = value.__dict__
    return found if isinstance(found, Mapping) else {}


def _scheduled_as_asked(own: Any) -> Any:
    """Return ``check_and_update_config`` that keeps the requested scheduling.

    vLLM schedules one step after another on a CPU, whatever was requested; tests need the behaviour of a GPU.
    """

    @functools.wraps(own.__func__)
    def check_and_update_config(platform: Any, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        own.__func__(platform, config)
        config.scheduler_config.async_scheduling = asked and config.use_v2_model_runner

    return check_and_update_config


def empties_weights(utils: ModuleType) -> bool:
    """Return whether a prepared linear layer has no parameter left that an update could be written to."""
    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.weight.numel() == 0


def plain_gemm(layer: Any, remove_weight: bool) -> None:
    """Multiply with the unchanged parameters, in place of ``dispatch_cpu_unquantized_gemm``."""
    layer.cpu_linear = linear


def fails_on_nothing(sampler: ModuleType) -> bool:
    """Return whether top-k raises an error for no elements, as in a step that verifies no draft at all."""
    try:
        sampler.apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return True
    return False


def _unless_nothing(own: Any) -> Any:
    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return own(logits, k, p) if len(logits) else logits

    return apply_top_k_top_p


def norms_by_the_first_weight() -> bool:
    """Return whether a norm of several layers at once uses the weight of the first for all of them."""
    from vllm import _custom_ops

    rows, weights = torch.ones(2, 1, 8), torch.stack([torch.ones(8), torch.full((8,), 2.0)])
    out = torch.empty_like(rows)
    try:
        _custom_ops.rms_norm(out, rows, weights, 1e-6)
    except RuntimeError:  # it takes one weight alone
        return True
    return torch.equal(out[1], out[0])


def norm_layer_by_layer(model: Any, keys: Tensor) -> Tensor:
    """Return the norm of keys [L, N, heads, D] of a DFlash drafter's context, each layer by its own weight."""
    from vllm import _custom_ops

    out = torch.empty_like(keys)
    for layer, weight in enumerate(model._k_norm_weights):
        _custom_ops.rms_norm(out[layer], keys[layer], weight, model._rms_norm_eps)
    return out


def _packing_again(own: Any) -> Any:
    """Return ``_setup_kernel`` that packs experts on every update; vLLM's own does so only on the first load.

    An update would otherwise copy plain weights to where the kernel reads packed ones.
    """

    def _setup_kernel(method: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
        if method.moe_kernel is None:  # the first time
            own(method, layer=layer, w13=w13, w2=w2)
            return
        experts, packed = method.moe_kernel.fused_experts, list[Any]()
        pack = experts.process_weights_after_loading
        experts.process_weights_after_loading = lambda layer: packed.append(pack(layer))
        try:
            own(method, layer=layer, w13=w13, w2=w2)
        finally:
            del experts.process_weights_after_loading
        if not packed:  # a version that does it itself is left alone
            pack(layer)

    _setup_kernel.packs_again = True  # type: ignore[attr-defined]
    return _setup_kernel


class Expansion:
    """``expand_batch_to_tokens``: it repeats a request's temperature, top-p and top-k once for each of its drafts.

    vLLM's own function is used once a test has shown that it writes its results. In vllm#55005 it writes them into a
    copy that is thrown away, so that verification uses temperatures that happened to lie in memory. Its kernels are set
    when the model is, so the test runs on first use.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.works: bool | None = None  # not tested yet

    def __call__(
        self, x: Tensor, cu_num_tokens: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        """Expand [B] with cumulated counts [B] to [tokens]; ``replace_from`` becomes ``replace_to``."""
        if self.works is None:
            self.works = self._asked(x, cu_num_tokens)
        expand = self.own if self.works else expanded
        return expand(x, cu_num_tokens, tokens, replace_from, replace_to)

    def _asked(self, x: Tensor, cu_num_tokens: Tensor) -> bool:
        """Test vLLM's own function with random numbers of the given dtypes; return whether it works."""
        values = torch.rand(3).to(x) if x.is_floating_point() else torch.randint(1, 1 << 30, (3,)).to(x)
        counts = torch.tensor([2, 3, 7]).to(cu_num_tokens)
        try:
            return torch.equal(self.own(values, counts, 7, 0, 1), expanded(values, counts, 7, 0, 1))
        except (RuntimeError, TypeError):  # no kernel for a CPU at all
            return False


def expanded(x: Tensor, cu_num_tokens: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Return the correct result of ``expand_batch_to_tokens``."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=tokens)


# ---- Triton's interpreter in place of a compiler, for the second model runner


def interpret() -> None:
    """Make Triton kernels run on this process's CPU. It is called before vLLM is imported, and more than once.

    Raise ``UserError`` if Triton or vLLM was imported without the interpreter, which cannot be changed later.
    """
    set_already = os.environ.get("TRITON_INTERPRET") == "1"
    if not set_already and "triton" in sys.modules:
        raise UserError(
            "rollout.vllm.model_runner=v2 on a CPU runs in Triton's interpreter: set TRITON_INTERPRET=1 for the whole "
            "process, or give v1"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    backends = importlib.import_module("triton.backends")
    if "cpu" in backends.backends:
        return
    if "vllm.triton_utils" in sys.modules:
        raise UserError("rollout.vllm.model_runner=v2 on a CPU must be the first engine of its process: give v1")
    backends.backends["cpu"] = backends.Backend(compiler=backends.backends["nvidia"].compiler, driver=_driver())
    interpreter = importlib.import_module("triton.runtime.interpreter")
    _add_log1p(interpreter)
    _take_any_mask(interpreter)
    quicken()


def _driver() -> type:
    """Return the driver class of a backend for a CPU, which compiles no kernels; vLLM asks whether there is one."""
    base = importlib.import_module("triton.backends.driver").DriverBase
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cpu", 0, 32)
    answers: dict[str, Any] = {
        "map_python_to_cpp_type": lambda self, kind: "int",
        "get_current_target": lambda self: target,
        "get_active_torch_device": lambda self: torch.device("cpu"),
        "get_benchmarker": lambda self: None,
        "get_current_device": lambda self: 0,
        "get_current_stream": lambda self, device=None: 0,
    }
    return type("CpuDriver", (base,), {"is_active": classmethod(lambda kind: True), **answers})


def _add_log1p(interpreter: Any) -> None:
    """Compute log(1 + x) by NumPy, for draws from residuals: the interpreter has none of CUDA's functions."""
    language = importlib.import_module("triton.language")

    def log1p(x: Any, _semantic: Any = None) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return language.tensor(interpreter.TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice: Any = importlib.import_module("triton.language.extra.libdevice")
    libdevice.log1p = log1p


def _take_any_mask(interpreter: Any) -> None:
    """Convert masks to booleans: in Triton 3.9's interpreter the mask of a vector and a scalar condition is none."""
    builder, language = interpreter.InterpreterBuilder, importlib.import_module("triton.language")
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        if mask.data.dtype == np.bool_:
            return mask
        return interpreter.TensorHandle(np.asarray(mask.data).astype(np.bool_), language.int1)

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, ptrs, boolean(mask), *rest, **named)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *rest, **named)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store

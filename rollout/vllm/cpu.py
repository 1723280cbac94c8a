"""What vLLM's CPU build needs so that drafts are verified right and weights can change; docs/upstream.md tells of each.

Nothing is mended that is not broken: each mend asks the installed version first, with numbers that it cannot have by
chance.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def mend() -> list[str]:
    """Mend broken functions and return their names. It is called before a model is loaded, and more than once."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.v1.sample import rejection_sampler

    mended = []
    if empties_weights(utils):
        utils.dispatch_cpu_unquantized_gemm = plain_gemm
        mended.append("linear layers")
    if fails_on_nothing(rejection_sampler):
        rejection_sampler.apply_top_k_top_p = _unless_nothing(rejection_sampler.apply_top_k_top_p)
        mended.append("top-k of nothing")
    method = unquantized_fused_moe_method.UnquantizedFusedMoEMethod
    if not hasattr(method._setup_kernel, "packs_again"):
        method._setup_kernel = _packing_again(method._setup_kernel)
    if not isinstance(rejection_sampler.expand_batch_to_tokens, Expansion):
        rejection_sampler.expand_batch_to_tokens = Expansion(rejection_sampler.expand_batch_to_tokens)
    return mended


def empties_weights(utils: ModuleType) -> bool:
    """Return whether a linear layer has no parameter left once it is prepared, which an update could be written to."""
    layer = torch.nn.Linear(64, 64, bias=False).requires_grad_(False)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return layer.weight.numel() == 0


def plain_gemm(layer: Any, remove_weight: bool) -> None:
    """Multiply with the parameters as they are, in place of ``dispatch_cpu_unquantized_gemm``."""
    layer.cpu_linear = linear


def fails_on_nothing(sampler: ModuleType) -> bool:
    """Return whether top-k takes the largest of no elements in a step that verifies no draft at all."""
    try:
        sampler.apply_top_k_top_p(torch.empty(0, 8), torch.empty(0, dtype=torch.int32), None)
    except RuntimeError:
        return True
    return False


def _unless_nothing(own: Any) -> Any:
    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return own(logits, k, p) if len(logits) else logits

    return apply_top_k_top_p


def _packing_again(own: Any) -> Any:
    """Return ``_setup_kernel`` that packs experts on every update; vLLM's own does so when it first loads them alone.

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
    """``expand_batch_to_tokens``: a request's temperature, top-p and top-k, once for each of its drafts.

    vLLM's own, once it has shown that it writes what it computes (vllm#55005: into a copy that is thrown away, so that
    verification takes place at temperatures that happened to lie in memory). Its kernels are put in place when the
    model is, so it is asked when it is first needed.
    """

    def __init__(self, own: Any) -> None:
        self.own = own
        self.works: bool | None = None  # not asked yet

    def __call__(
        self, x: Tensor, cu_num_tokens: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        """Expand [B] with cumulated counts [B] to [tokens]; ``replace_from`` becomes ``replace_to``."""
        if self.works is None:
            self.works = self._asked(x, cu_num_tokens)
        expand = self.own if self.works else expanded
        return expand(x, cu_num_tokens, tokens, replace_from, replace_to)

    def _asked(self, x: Tensor, cu_num_tokens: Tensor) -> bool:
        """Try vLLM's own with random numbers of the kinds at hand; return whether it works."""
        values = torch.rand(3).to(x) if x.is_floating_point() else torch.randint(1, 1 << 30, (3,)).to(x)
        counts = torch.tensor([2, 3, 7]).to(cu_num_tokens)
        try:
            return torch.equal(self.own(values, counts, 7, 0, 1), expanded(values, counts, 7, 0, 1))
        except (RuntimeError, TypeError):  # no kernel for a CPU at all
            return False


def expanded(x: Tensor, cu_num_tokens: Tensor, tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Return what ``expand_batch_to_tokens`` is meant to be."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return values.repeat_interleave(counts, output_size=tokens)

"""What lets SGLang verify drafts on a CPU, through Triton's interpreter: for tests, not for speed.

Two functions exist for CUDA only and have a Triton version in SGLang itself. The third, target-only sampling, is
rejection sampling of a one-hot draft distribution, for which there is a Triton kernel too.
"""

from typing import Any

from torch import Tensor


def replace() -> None:
    """Put the Triton versions in place of the CUDA ones."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    tree = "sglang.kernels.ops.speculative.spec_tree."
    HookRegistry.register(tree + "build_tree_kernel_efficient_func", _build_tree, HookType.REPLACE)
    HookRegistry.register(tree + "verify_tree_greedy_func", _verify_greedy, HookType.REPLACE)
    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", _with_target_only, HookType.AROUND)
    # What records the experts of a mixture registers its buffer with CUDA, whatever the device.
    pages = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(pages, _unregistered, HookType.REPLACE)


def _unregistered(*_args: Any, **_settings: Any) -> None:
    """Leave memory of the host as it is."""


def _build_tree(*args: Any) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def _verify_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, *args: Any, topk: int = -1, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(predicts, accept_index, accept_token_num, *args, **kwargs)
    return predicts, accept_index, accept_token_num


def _with_target_only(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``eagle_sample``, after filling the place of the missing kernel.

    Not through the registry: the place holds None, and the registry replaces a thing wherever it finds it.
    """
    from sglang.srt.speculative import eagle_utils

    if eagle_utils.tree_speculative_sampling_target_only is None:
        eagle_utils.tree_speculative_sampling_target_only = _target_only
    return original(*args, **kwargs)


def _target_only(*, candidates: Tensor, target_probs: Tensor, draft_probs: Tensor, **kwargs: Any) -> None:
    """Accept a greedy draft x with p(x); else sample from p without x."""
    from sglang.kernels.ops.speculative.verify_sampling import chain_speculative_sampling_triton

    draft_probs[:, :-1].scatter_(-1, candidates[:, 1:].long()[..., None], 1.0)
    chain_speculative_sampling_triton(
        candidates=candidates, target_probs=target_probs, draft_probs=draft_probs, **kwargs
    )

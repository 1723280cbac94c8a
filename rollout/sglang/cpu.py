"""Replacements that let SGLang verify drafts on a CPU, through Triton's interpreter: for tests, not for speed.

Two functions exist for CUDA only and have a Triton version in SGLang itself. The third, target-only sampling, is
rejection sampling of a one-hot draft distribution, for which there is a Triton kernel too. PyTorch truncates the
verified distributions, since SGLang has that for a GPU alone. Attention is PyTorch's as well: the interpreter would
spend most of its time there, the more so the more heads and layers a model has.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.interpreter import quicken

# Arguments of attention that say how a GPU computes it, and do not change the result.
HOW = ("extend_seq_lens_cpu", "use_pdl", "enable_lean", "lean_Mp", "lean_Lp", "lean_Op", "lean_locks", "uneven_batch")


def replace() -> None:
    """Replace CUDA functions of SGLang by their Triton or PyTorch versions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    quicken()
    tree = "sglang.kernels.ops.speculative.spec_tree."
    HookRegistry.register(tree + "build_tree_kernel_efficient_func", _build_tree, HookType.REPLACE)
    HookRegistry.register(tree + "verify_tree_greedy_func", _verify_greedy, HookType.REPLACE)
    HookRegistry.register("sglang.srt.speculative.eagle_utils.eagle_sample", _with_all_kernels, HookType.AROUND)
    attention = "sglang.kernels.ops.attention."
    HookRegistry.register(attention + "extend_attention.extend_attention_fwd", _extend, HookType.AROUND)
    HookRegistry.register(attention + "decode_attention.decode_attention_fwd", _decode, HookType.AROUND)
    # The recorder of the experts of a mixture registers its buffer with CUDA, whatever the device.
    pages = "sglang.srt.mem_cache.pool_host.common._cuda_host_register"
    HookRegistry.register(pages, _unregistered, HookType.REPLACE)


def _unregistered(*_args: Any, **_settings: Any) -> None:
    """Do nothing, in place of registering host memory with CUDA."""


def _build_tree(*args: Any) -> None:
    from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton

    sgl_build_tree_kernel_triton(*args)


def _verify_greedy(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, *args: Any, topk: int = -1, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from sglang.kernels.ops.speculative.spec_tree import verify_tree_greedy_triton

    verify_tree_greedy_triton(predicts, accept_index, accept_token_num, *args, **kwargs)
    return predicts, accept_index, accept_token_num


def _with_all_kernels(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``eagle_sample``, after filling the places of the missing kernels.

    This does not use the registry: the places hold None, and the registry replaces a value wherever it finds it.
    """
    from sglang.kernels.ops.sampling import renorm
    from sglang.srt.speculative import eagle_utils

    if eagle_utils.tree_speculative_sampling_target_only is None:
        eagle_utils.tree_speculative_sampling_target_only = _target_only
    if eagle_utils.top_p_renorm_prob is None:
        for module in (eagle_utils, renorm):
            module.top_k_renorm_prob, module.top_p_renorm_prob = top_k, top_p
    return original(*args, **kwargs)


def top_k(probs: Tensor, k: Tensor) -> Tensor:
    """Return distributions [N, V] of the ``k`` [N] likeliest tokens each, truncated as in the embedded engine."""
    return BatchSampling(top_k=k).probs(probs.log()[:, None])[:, 0]


def top_p(probs: Tensor, p: Tensor) -> Tensor:
    """Return distributions [N, V] of the fewest likeliest tokens that have ``p`` [N] of the probability together."""
    return BatchSampling(top_p=p).probs(probs.log()[:, None])[:, 0]


def _target_only(*, candidates: Tensor, target_probs: Tensor, draft_probs: Tensor, **kwargs: Any) -> None:
    """Accept a greedy draft x with probability p(x); else sample from p without x."""
    from sglang.kernels.ops.speculative.verify_sampling import chain_speculative_sampling_triton

    draft_probs[:, :-1].scatter_(-1, candidates[:, 1:].long()[..., None], 1.0)
    chain_speculative_sampling_triton(
        candidates=candidates, target_probs=target_probs, draft_probs=draft_probs, **kwargs
    )


# ---- attention


def _extend(
    original: Callable[..., None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    q_ends: Tensor,
    cache_ends: Tensor,
    places: Tensor,
    mask: Tensor | None,
    causal: bool,
    mask_starts: Tensor | None,
    longest: int,
    k_scale: float,
    v_scale: float,
    scale: float | None = None,
    **features: Any,
) -> None:
    """Compute attention from new tokens to cached tokens and to one another, into ``out`` [T, H, D].

    q [T, H, D], k and v [T, G, D] are those of the new tokens of all sequences, one after another: sequence i has the
    tokens up to ``q_ends[i + 1]``, and in the caches [S, G, D] the ``places`` up to ``cache_ends[i + 1]``. ``mask``
    says for each new token of a sequence whether it sees each of its tokens, flat from ``mask_starts[i]``; cached
    tokens are always seen. Calls with features that it does not know go to SGLang's own kernel.
    """
    if not (causal or mask is not None) or not _plain(k_cache, k_scale, v_scale, features):
        original(
            q, k, v, out, k_cache, v_cache, q_ends, cache_ends, places, mask, causal, mask_starts, longest, k_scale,
            v_scale, scale, **features,
        )  # fmt: skip
        return
    ends, cached = q_ends.tolist(), cache_ends.tolist()
    for i, (begin, end) in enumerate(pairwise(ends)):
        if begin == end:
            continue
        old, new = places[cached[i] : cached[i + 1]].long(), slice(begin, end)
        seen = torch.ones(end - begin, len(old) + end - begin, dtype=torch.bool)
        if mask is None or mask_starts is None:
            seen = seen.tril(len(old))
        else:
            start = int(mask_starts[i])
            seen[:, len(old) :] = mask[start : start + seen.numel()].view_as(seen)[:, len(old) :] != 0
        keys, values = torch.cat([k_cache[old], k[new]]), torch.cat([v_cache[old], v[new]])
        out[new] = _attend(q[new], keys, values, seen, scale)


def _decode(
    original: Callable[..., None],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    cache_ends: Tensor,
    places: Tensor,
    logits: Tensor,
    sums: Tensor,
    splits: Tensor,
    most_splits: int,
    scale: float,
    k_scale: float,
    v_scale: float,
    **features: Any,
) -> None:
    """Compute attention from one token of each sequence, q [B, H, D], to cached tokens, into ``out`` [B, H, D].

    Other arguments are as in ``_extend``.
    """
    if not _plain(k_cache, k_scale, v_scale, features):
        original(
            q, k_cache, v_cache, out, cache_ends, places, logits, sums, splits, most_splits, scale, k_scale, v_scale,
            **features,
        )  # fmt: skip
        return
    cached = cache_ends.tolist()
    for i in range(len(q)):
        old = places[cached[i] : cached[i + 1]].long()
        out[i : i + 1] = _attend(q[i : i + 1], k_cache[old], v_cache[old], None, scale)


def _plain(cache: Tensor, k_scale: float, v_scale: float, features: dict[str, Any]) -> bool:
    """Return whether this is plain attention.

    That means no sliding window, no cap, no sinks, no pages of a shape of their own, no scales of an 8-bit cache.
    """
    if cache.dim() != 3 or (k_scale, v_scale) != (1.0, 1.0):
        return False
    asked = [value for name, value in features.items() if name not in HOW]
    return all(v is None or v is False or (type(v) in (int, float) and v in (-1, 0, 1)) for v in asked)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float | None) -> Tensor:
    """Return attention [T, H, D] of q [T, H, D] to k and v [N, G, D], G a divisor of H; ``seen`` [T, N]."""
    q, k, v = (one.to(q.dtype).transpose(0, 1)[None] for one in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)

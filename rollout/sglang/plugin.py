"""Plugin of SGLang (entry point group ``sglang.srt.plugins``) that records what happens in verification.

``BEBOP_VERIFY_EVERY``: one in so many verification steps is measured: overlap and entropies of drafts. With it, traced
requests have an entry for each of their steps, see ``tracing.py``. ``BEBOP_CERTIFY=1``: certificates may observe the
draws of their own requests, see ``certify.py``. The plugin does nothing unless one is set. SGLang logs and swallows
errors in a plugin. So the engine's self-test looks for ``bebop_verify`` in a completion, and a certificate for
``bebop_certify``.
"""

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.stats import PairStats, pair_stats
from bebop.rollout.host_copy import HostCopy, LateEntries
from bebop.trajectory import MEASURED

SLICE = 1 << 26  # elements of one distribution that are measured at a time: 256 MB in fp32
EVERY = "BEBOP_VERIFY_EVERY"
CERTIFY = "BEBOP_CERTIFY"
CPU = "BEBOP_SGLANG_CPU"
TARGET = "sglang.srt.speculative.eagle_utils.eagle_sample"
Sample = Callable[..., tuple[Tensor, Tensor, Tensor]]


def register() -> None:
    """Register the hooks. SGLang calls it in each of its processes, wherever bebop is installed beside it."""
    if os.environ.get(CPU) == "1":
        from bebop.rollout.sglang.cpu import replace

        replace()
    if every := int(os.environ.get(EVERY) or 0):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from bebop.rollout.sglang.tracing import Following

        HookRegistry.register(TARGET, Measure(every), HookType.AROUND)
        HookRegistry.register(TARGET, Following(_distribution, _reports), HookType.AROUND)
    if os.environ.get(CERTIFY) == "1":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from bebop.rollout.sglang.certify import Inside

        HookRegistry.register(TARGET, Inside(_distribution, _reports, _settings), HookType.AROUND)


class Measure:
    """A wrapper of SGLang's verification; one in ``every`` steps gets an entry per request in ``meta_info``.

    An entry: ``accepted`` drafts, ``weight`` (the steps that it stands for), and per draft position ``overlap``,
    ``target_only``, ``draft_entropy`` and ``target_entropy``. Greedy requests have none of these distributions, and no
    entry; trees of drafts have none, either. Nothing waits for the device here: entries are read once the step is over.
    """

    def __init__(self, every: int, reports: Callable[[], bool] | None = None) -> None:
        """Measure one in ``every`` steps.

        ``reports`` says whether this rank's results reach the completion; None: SGLang's rank decides.
        """
        self.every, self.step = every, 0
        self.reports = reports or _reports

    def __call__(self, original: Sample, verify: Any, batch: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``eagle_sample``, measure it if it is due, and return its own result."""
        result = original(verify, batch, logits, *args, **kwargs)
        tree = getattr(verify, "tree_topk", 1) > 1  # its rows are nodes, and not positions
        if tree or batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
            return result
        measured, self.step = self.step % self.every == 0, self.step + 1
        if measured and self.reports():
            entries = self._entries(verify, batch.sampling_info, logits.next_token_logits, result[1])
            logits.customized_info = {**(logits.customized_info or {}), "bebop_verify": entries}
        return result

    def _entries(self, verify: Any, sampling: Any, logits: Tensor, lengths: Tensor) -> LateEntries:
        """Return one entry per request, whose numbers SGLang's overlapped scheduler reads after the next launch.

        SGLang has already put penalties and masks into the logits [B*(K+1), V].
        """
        rows, width, vocabulary = len(lengths), verify.draft_token_num, logits.shape[-1]
        logits, drafted = logits.view(rows, width, vocabulary), verify.draft_token.view(rows, width)[:, 1:]
        size = max(1, SLICE // (width * vocabulary))  # requests: SGLang leaves no memory for copies of all logits
        tables = []
        for begin in range(0, rows, size):
            some = slice(begin, begin + size)
            target = _distribution(logits[some].flatten(0, 1), _of_rows(sampling, some), width)
            draft = None if verify.draft_probs is None else verify.draft_probs[some]
            stats = statistics(draft, target.view(-1, width, vocabulary)[:, :-1], drafted[some])
            tables.append(torch.stack([getattr(stats, name).view(-1, width - 1) for name in MEASURED], 1))
        return LateEntries(HostCopy(table=torch.cat(tables), accepted=lengths - 1), rows, self._made)

    def _made(self, found: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """Return the entries, from ``table`` [B, 4, K] of ``MEASURED`` and ``accepted`` [B] on the host."""
        return [
            {"accepted": count, "weight": self.every, **dict(zip(MEASURED, row, strict=True))}
            for count, row in zip(found["accepted"].tolist(), found["table"].tolist(), strict=True)
        ]


def statistics(draft: Tensor | None, target: Tensor, drafted: Tensor) -> PairStats:
    """Return statistics of draft distributions q and target distributions p, both [B, K, V].

    ``draft`` is None for greedy drafts; ``drafted`` [B, K] are the drafts.
    """
    if draft is None:
        draft = torch.zeros_like(target).scatter_(-1, drafted.long()[..., None], 1.0)
    return pair_stats(draft.flatten(0, 1), target.flatten(0, 1), from_logits=False)


def _of_rows(sampling: Any, rows: slice) -> Any:
    """Return what ``_distribution`` reads of SGLang's sampling settings, for some requests."""
    return SimpleNamespace(
        temperatures=sampling.temperatures[rows],
        need_top_k_sampling=sampling.need_top_k_sampling,
        need_top_p_sampling=sampling.need_top_p_sampling,
        top_ks=sampling.top_ks[rows] if sampling.need_top_k_sampling else None,
        top_ps=sampling.top_ps[rows] if sampling.need_top_p_sampling else None,
    )


def _distribution(logits: Tensor, sampling: Any, width: int) -> Tensor:
    """Return the target's distributions [B*(K+1), V] as verification uses them: temperature, top-k, top-p."""
    probs = (logits.float() / sampling.temperatures.repeat_interleave(width, 0)).softmax(-1)
    if not (sampling.need_top_k_sampling or sampling.need_top_p_sampling):
        return probs
    from sglang.kernels.ops.sampling.renorm import top_k_renorm_prob, top_p_renorm_prob

    if sampling.need_top_k_sampling:
        probs = top_k_renorm_prob(probs, sampling.top_ks.repeat_interleave(width, 0))
    if sampling.need_top_p_sampling:
        probs = top_p_renorm_prob(probs, sampling.top_ps.repeat_interleave(width, 0))
    return probs


def _settings() -> Any:
    from sglang.srt.runtime_context import get_spec

    return get_spec()


def _reports() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return int(get_parallel().attn_tp_rank) == 0

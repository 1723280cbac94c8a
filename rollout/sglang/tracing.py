"""Records of SGLang's verification for traced requests, and the traces that are made of them.

The plugin registers it, beside its measurements. Requests whose names begin with ``bebop-trace-`` get an entry per
cycle in ``meta_info["bebop_trace"]``: the emitted tokens and the places of the cycle (see
``rollout.decoding.verify_trace``), as text. No other requests are recorded. For the prefill's token it is only known
that no draft was tested. Greedy completions and plain decoding have no entries, and no trace.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.rollout.decoding.verify_trace import PLAIN, condensed, unknown, unpacked
from bebop.rollout.host_copy import HostCopy, LateEntries, to_device
from bebop.trajectory import NONE, Trace, join_traces

PREFIX = "bebop-trace-"
ENTRY = "bebop_trace"
Sample = Callable[..., tuple[Tensor, Tensor, Tensor]]
Distribution = Callable[[Tensor, Any, int], Tensor]


class Following:
    """A wrapper of SGLang's verification that records entries for traced requests."""

    def __init__(self, distribution: Distribution, reports: Callable[[], bool]) -> None:
        """Keep two functions of SGLang.

        ``distribution`` gives the target distributions [B*(K+1), V] as verification uses them. ``reports`` says whether
        this rank's results reach the completions.
        """
        self.distribution, self.reports = distribution, reports

    def __call__(self, original: Sample, verify: Any, batch: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``eagle_sample``, record the traced requests, and return its own result."""
        if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
            return original(verify, batch, logits, *args, **kwargs)
        chosen = [i for i, request in enumerate(batch.reqs) if str(request.rid).startswith(PREFIX)]
        if not chosen or not self.reports():
            return original(verify, batch, logits, *args, **kwargs)
        at = to_device(chosen, logits.next_token_logits.device)
        q = None if verify.draft_probs is None else verify.draft_probs[at]  # a copy, as it was before verification
        result = original(verify, batch, logits, *args, **kwargs)
        count = len(batch.reqs)
        copy = HostCopy(tables=self._tables(at, q, verify, batch, logits, result))
        entries = LateEntries(copy, count, lambda found: _entries(chosen, count, found["tables"].numpy()))
        logits.customized_info = {**(logits.customized_info or {}), ENTRY: entries}
        return result

    def _tables(self, at: Tensor, q: Tensor | None, verify: Any, batch: Any, logits: Any, result: Any) -> Tensor:
        """Return the tokens and their places [R, K + 1, 8 + 4M], int32, of the requests in rows ``at`` [R].

        SGLang has already put penalties and masks into the logits [B*(K+1), V].
        """
        predicted, lengths, index = result
        width, rows = verify.draft_token_num, len(batch.reqs)
        p = self.distribution(logits.next_token_logits, batch.sampling_info, width).view(rows, width, -1)[at]
        drafts, accepted = verify.draft_token.view(rows, width)[at, 1:].long(), (lengths[at] - 1).long()
        last = predicted.long()[index[at].long().gather(1, accepted[:, None])]
        tokens = torch.nn.functional.pad(drafts, (0, 1)).scatter(1, accepted[:, None], last)
        places = condensed(drafts, q, None, None, p, tokens, accepted, accepted + 1)
        return torch.cat([tokens[..., None].int(), places], -1)


def _entries(chosen: Sequence[int], count: int, tables: NDArray[np.int32]) -> list[dict[str, Any]]:
    """Return an entry for each of ``count`` requests; it is empty for requests that are not ``chosen``."""
    entries: list[dict[str, Any]] = [{} for _ in range(count)]
    for i, table in zip(chosen, tables, strict=True):
        entries[i] = {"width": len(table), "bits": b64encode(table.tobytes()).decode()}
    return entries


def parse_trace(meta: Mapping[str, Any], ids: NDArray[np.int64], drafter: str) -> Trace | None:
    """Return the trace of a completion [T]: the prefill's token and those of the cycles.

    Return None if the entries do not add up to the completion. A retracted completion has a second token of a prefill,
    and the tokens of a cycle may reach beyond its end. So the tokens that cycles report are compared with the
    completion.
    """
    entries = [entry for entry in meta.get(ENTRY) or [] if entry]
    if not entries or not len(ids):
        return None
    tables = [np.frombuffer(b64decode(e["bits"]), dtype="<i4").reshape(e["width"], -1) for e in entries]
    written = np.concatenate([table[table[:, 1] != NONE, 0] for table in tables])[: len(ids) - 1]
    if not np.array_equal(written, ids[1:]):
        return None
    top = (tables[0].shape[1] - 8) // 4
    first = unknown(1, top)
    places = [torch.from_numpy(table[:, 1:].astype(np.int32)) for table in tables]
    rest = unpacked(places, [drafter] * len(places), len(ids) - 1, top)
    return join_traces([replace(first, verdicts=np.full_like(first.verdicts, PLAIN)), rest])

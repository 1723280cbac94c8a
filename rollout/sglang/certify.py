"""Instrumentation of SGLang's verification for certificates: each draw of a cycle goes to a ``WhiteBox`` in its
process.

The plugin registers it where ``BEBOP_CERTIFY=1``. It observes requests whose names begin with ``certify-RUN-``, each
run by a box of its own, and no other requests. Every cycle of such a request leaves the number of accepted drafts in
``meta_info["bebop_certify"]``. The observations of the box so far come with the cycles of a request named
``certify-RUN-state-N``, which is not observed itself.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bebop import __version__
from bebop.certify.white_box import TREE, WhiteBox

PREFIX = "certify-"
STATE = "state-"
ENTRY = "bebop_certify"
RUNS = 8  # boxes that are kept
Sample = Callable[..., tuple[Tensor, Tensor, Tensor]]
Distribution = Callable[[Tensor, Any, int], Tensor]


def name(run: str, rest: str) -> str:
    """Return the name of a request of a run, with an end mark, since SGLang treats names as prefixes in places."""
    return f"{PREFIX}{run}-{rest}."


class Inside:
    """A wrapper of SGLang's verification that passes each draw to the white box of its run."""

    def __init__(self, distribution: Distribution, reports: Callable[[], bool], settings: Callable[[], Any]) -> None:
        """Make a wrapper without boxes.

        Args:
            distribution: gives the target distributions [B*(K+1), V] as verification uses them.
            reports: whether this rank's results reach the completions.
            settings: gives SGLang's settings of verification, read in every cycle.
        """
        self.distribution, self.reports, self.settings = distribution, reports, settings
        self.boxes: OrderedDict[str, WhiteBox] = OrderedDict()

    def __call__(self, original: Sample, verify: Any, batch: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Run ``eagle_sample``, observe it, and return its own result."""
        runs = [] if batch.forward_mode.is_idle() else [run_of(request.rid) for request in batch.reqs]
        if not any(runs) or batch.sampling_info.is_all_greedy or not self.reports():
            return original(verify, batch, logits, *args, **kwargs)
        drawn = None if verify.draft_probs is None else verify.draft_probs.clone()  # as it was before verification
        result = original(verify, batch, logits, *args, **kwargs)
        self._see(runs, drawn, verify, batch, logits, result)
        counts = (result[1] - 1).tolist()
        entries = [self._entry(request.rid, count) for request, count in zip(batch.reqs, counts, strict=True)]
        logits.customized_info = {**(logits.customized_info or {}), ENTRY: entries}
        return result

    def _see(
        self, runs: Sequence[str | None], drawn: Tensor | None, verify: Any, batch: Any, logits: Any, result: Any
    ) -> None:
        """Pass each run's rows to its box. SGLang has already put penalties and masks into the logits [B*(K+1), V]."""
        predicted, lengths, index = result
        width, rows = verify.draft_token_num, len(runs)
        target = self.distribution(logits.next_token_logits, batch.sampling_info, width).view(rows, width, -1)
        drafts = verify.draft_token.view(rows, width)[:, 1:].long()
        accepted = (lengths - 1).long()
        following = predicted.long()[index.long().gather(1, accepted[:, None])[:, 0]]
        block = bool(getattr(self.settings(), "speculative_use_block_verification", False))
        for run in {run for run in runs if run is not None}:
            own = [i for i, other in enumerate(runs) if other == run and not is_state(batch.reqs[i].rid)]
            if not own:
                continue
            if getattr(verify, "tree_topk", 1) > 1:  # its rows are nodes, and not positions
                self._box(run).skip(len(own), *TREE)
                continue
            at = torch.tensor(own, device=target.device)
            self._box(run).update(
                drafts[at],
                None if drawn is None else drawn[at],
                target[at],
                accepted[at],
                following[at],
                stops=ends(batch.reqs[own[0]]),
                stepwise=not block,
            )

    def _box(self, run: str) -> WhiteBox:
        box = self.boxes.setdefault(run, WhiteBox())
        self.boxes.move_to_end(run)
        while len(self.boxes) > RUNS:
            self.boxes.popitem(last=False)
        return box

    def _entry(self, rid: str, accepted: int) -> dict[str, Any]:
        """Return the entry of one request's cycle; empty for a request of no run."""
        run = run_of(rid)
        if run is None:
            return {}
        state = {"bebop": __version__, "box": self._box(run).state_dict()} if is_state(rid) else None
        return {"accepted": accepted, "state": json.dumps(state) if state else ""}


def run_of(rid: Any) -> str | None:
    """Return the run that a request belongs to; None if it belongs to no run."""
    parts = str(rid).split("-", 2)
    return parts[1] if str(rid).startswith(PREFIX) and len(parts) == 3 else None


def is_state(rid: Any) -> bool:
    """Return whether a request asks for the observations so far."""
    return str(rid).split("-", 2)[-1].startswith(STATE)


def ends(request: Any) -> tuple[int, ...]:
    """Return the tokens that end a request's completion."""
    params = request.sampling_params
    own = set(params.stop_token_ids or ())
    return tuple(sorted(own if params.ignore_eos else own | set(request.eos_token_ids or ())))

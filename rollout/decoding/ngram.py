"""Drafts looked up in a row's own context: the tokens after the last occurrence of its longest suffix seen before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.kernels.uniforms import digest
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.slots import Slots

MAX_SUFFIX = 4  # tokens of a suffix that are compared


class NgramDrafter:
    """Drafter without model and state: drafts are one-hot, and a row whose newest token is new to it drafts nothing."""

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        """Accept the arguments of every drafter, and use none of them."""

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Do nothing: the slots keep the context."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        The width is that of the longest draft, so that no pass is widened for nothing.
        """
        prompts = rows.slots.prompts[: rows.batch, : rows.used]
        rows.reseed(digest(prompts, rows.slots.asked[: rows.batch]))  # a prompt may hold what this seed drew before
        context, newest = rows.context(), rows.sizes - 1
        end, matched = last_match(context, newest)
        wanted = length.start(rows)
        counts = torch.where(matched, (newest - end).clamp_max(length.limit), 0)
        counts = counts if wanted is None else torch.minimum(counts, wanted)
        after = end[:, None] + 1 + torch.arange(int(counts.max()), device=context.device)
        return Draft(tokens=context.gather(1, after.clamp_max(context.shape[1] - 1)), probs=None, lengths=counts)

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Do nothing: the slots keep the context."""


def last_match(context: Tensor, newest: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the longest suffix of each row that occurs before ended last [B], and whether there is one [B].

    ``context`` is [B, C], and its newest token is at place ``newest`` [B]. Suffixes have at most MAX_SUFFIX tokens.
    """
    width = context.shape[1]
    places = torch.arange(width, device=context.device)
    alive = places < newest[:, None]
    run = torch.zeros_like(context)  # [B, C] tokens before and at each place that equal the newest ones
    for back in range(MAX_SUFFIX):
        token = context.gather(1, (newest - back).clamp_min(0)[:, None])
        alive = alive & (places >= back) & (context.roll(back, 1) == token)
        run = run + alive
    end = (run * width + places).argmax(1)
    return end, run.gather(1, end[:, None])[:, 0] > 0

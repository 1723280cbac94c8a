"""Accept length on text of the target for drafts of any temperature and truncation, all from the same hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.probe import CHUNK
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.trainer.chains import TokenRow, chain_rows
from bebop.trainer.objectives import Sampling, Steps, unroll

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TextSampling:
    """Temperature and truncation that turn logits into the distribution to sample from."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0

    def probs(self, logits: Tensor) -> Tensor:
        """Return distributions [n, V] of logits [n, V], computed as the engine does."""
        temperature, mass = (torch.full(logits.shape[:1], x) for x in (self.temperature, self.top_p))
        return BatchSampling(temperature=temperature, top_p=mass if self.top_p < 1 else None).probs(logits[:, None])[
            :, 0
        ]


@torch.no_grad()
def accept_lengths(
    model: Policy,
    rows: Sequence[TokenRow],
    depth: int,
    drafts: Sequence[TextSampling],
    target: TextSampling,
    batch: int = 48,
) -> list[float]:
    """Return accepted drafts + 1, a mean over tokens, for each way to sample drafts; unbiased on text of ``target``."""
    totals, count = torch.zeros(len(drafts)), 0
    for start in range(0, len(rows), batch):
        steps = states(model, rows[start : start + batch], depth)
        chosen = steps.mask.any(-1)
        mask = steps.mask[chosen]
        survive, overlap = pairs(steps, chosen, mask, drafts, target)
        totals += expected(survive, overlap).sum(1)
        count += len(mask)
    return [float(total) / count for total in totals]


def states(model: Policy, rows: Sequence[TokenRow], depth: int) -> Steps:
    """Return the hidden states of both models at every step of the text."""
    assert model.mtp is not None
    layout = chain_rows(rows, depth)
    positions = torch.arange(layout.token_ids.shape[1]).expand_as(layout.token_ids)
    hidden = model.hidden(layout.token_ids, positions, CausalContext())
    weight = model.backbone.get_output_embeddings().weight
    return unroll(model.mtp, model.embed(layout.token_ids), hidden, weight, layout, Sampling())


def pairs(
    steps: Steps, chosen: Tensor, mask: Tensor, drafts: Sequence[TextSampling], target: TextSampling
) -> tuple[Tensor, Tensor]:
    """Return min(1, q(y) / p(y)) of the text's token y, and the overlap: both [D, n, K], 0 where there is no step."""
    columns = [x[chosen][mask] for x in (steps.draft, steps.target, steps.tokens)]
    chunks: list[Tensor] = []
    for draft, backbone, y in zip(*(torch.split(column, CHUNK) for column in columns), strict=True):
        p, logits = target.probs(backbone @ steps.weight.T), draft @ steps.weight.T
        own = p.gather(1, y[:, None])[:, 0]
        distributions = (sampling.probs(logits) for sampling in drafts)
        chunks.append(torch.stack([
            torch.stack([(q.gather(1, y[:, None])[:, 0] / own).clamp_max(1), torch.minimum(p, q).sum(-1)])
            for q in distributions
        ]))  # fmt: skip
    flat = torch.cat(chunks, -1)  # [D, 2, steps]
    spread = torch.zeros(*flat.shape[:2], *mask.shape).masked_scatter(mask, flat)
    return spread[:, 0], spread[:, 1]


def expected(survive: Tensor, overlap: Tensor) -> Tensor:
    """Return 1 + sum_j prod_{i<j} survive_i overlap_j over the last axis (SPEC 0.6, last form)."""
    before = torch.cat([torch.ones_like(survive[..., :1]), survive[..., :-1].cumprod(-1)], -1)
    return 1 + (before * overlap).sum(-1)

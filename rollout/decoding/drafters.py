"""Drafters. One so far: the model's own MTP head, applied recursively."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bebop.kernels.verify import sample
from bebop.rollout.decoding.protocols import Draft, DraftLength, DraftModel
from bebop.rollout.decoding.sampling import BatchSampling, entropy


@dataclass(frozen=True, slots=True, kw_only=True)
class MTPDrafter:
    """Samples each draft from the MTP head's distribution; at temperature 0 the distribution is one-hot, which is
    target-only."""

    temperature: float | None = None  # None: that of the target

    def propose(self, model: DraftModel, sampling: BatchSampling, length: DraftLength, uniforms: Tensor) -> Draft:
        """See ``Drafter``. Rows that stop early keep drafting beside the others; those drafts do not count."""
        own = sampling
        if self.temperature is not None:
            own = replace(sampling, temperature=torch.full_like(uniforms[:, 0], self.temperature, dtype=torch.float32))
        hidden, seen = model.draft_hidden(), model.seen()
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        entropies: list[Tensor] = []
        alive: Tensor | None = None
        lengths: Tensor | None = None
        for step in range(length.limit):
            distribution = own.probs(model.draft_logits(hidden)[:, None], None if seen is None else seen[:, None])[:, 0]
            entropies.append(entropy(distribution))
            go_on = length.extend(step, torch.stack(entropies, 1))
            if go_on is not None:
                alive = go_on if alive is None else alive & go_on
                lengths = alive.long() if lengths is None else lengths + alive.long()
                if not alive.any() and tokens:
                    break
            token = sample(distribution, uniforms[:, step])
            tokens.append(token)
            probs.append(distribution)
            if seen is not None:
                seen = seen.scatter(-1, token[:, None], True)
            if step + 1 < length.limit:
                hidden = model.draft_step(step, token, hidden)
        return Draft(
            tokens=torch.stack(tokens, 1),
            probs=torch.stack(probs, 1),
            entropies=torch.stack(entropies[: len(tokens)], 1),
            lengths=lengths,
            forwards=len(tokens) - 1,
        )

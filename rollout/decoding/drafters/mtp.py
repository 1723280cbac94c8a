"""Drafts of the model's own MTP head, applied recursively."""

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.verify import sample
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.head import HeadDrafter
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.decoding.temperature import DraftTemperature, Drawn
from bebop.rollout.slots import Slots


class MTPDrafter(HeadDrafter):
    """Samples each draft from the head's distribution, a chain of them."""

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(policy, slots, config)
        self.tempered = DraftTemperature(slots) if config.chooses_temperature else None
        self.drawn: Drawn | None = None  # from ``propose`` to ``commit``

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """See ``Drafter``. Rows that stop early keep drafting beside the others; those drafts do not count."""
        length.start(rows)
        if length.limit == 0:  # the cache follows all the same
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, forwards=1)
        hidden, seen = self.hidden[: rows.batch], rows.seen
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        entropies: list[Tensor] = []
        chosen = None if self.tempered is None else self.tempered.choose(rows, length.limit)
        drawn = Drawn()
        alive: Tensor | None = None
        lengths: Tensor | None = None
        for step in range(length.limit):
            logits = self.policy.logits(hidden)[:, None]
            temperature = self.temperature if chosen is None else chosen[:, step]
            distribution = rows.probs(logits, None if seen is None else seen[:, None], temperature)[:, 0]
            entropies.append(entropy(distribution))
            known = torch.stack(entropies, 1)
            go_on = length.extend(step, known)
            if go_on is not None:
                alive = go_on if alive is None else alive & go_on
                lengths = alive.long() if lengths is None else lengths + alive.long()
                if not alive.any() and tokens:
                    break
            token = sample(distribution, rows.uniforms[:, step])
            tokens.append(token)
            probs.append(distribution)
            if self.tempered is not None:
                drawn.add(logits[:, 0], seen)
            if seen is not None:
                seen = seen.scatter(-1, token[:, None], True)
            if step + 1 < length.limit:
                hidden = self.step(rows, step, token, hidden)
        drawn.lengths = lengths
        self.drawn = drawn
        return Draft(
            tokens=torch.stack(tokens, 1),
            probs=None if self.temperature == 0 else torch.stack(probs, 1),
            entropies=known[:, : len(tokens)].contiguous(),
            lengths=lengths,
            forwards=len(tokens),
        )

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``."""
        if self.tempered is not None and self.drawn is not None:
            self.tempered.observe(rows, self.drawn, out.probs, emitted)
        self.drawn = None  # another drafter may be in charge of the next cycle
        super().commit(rows, out, tokens, emitted)

    def step(self, rows: Rows, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """One recursive pass: the tokens [B] just drafted at ``step`` and hidden [B, d] -> the next hidden [B, d].

        Position ids go on from the anchor: t, t + 1, ...
        """
        return self._feed(rows, step, tokens[:, None], hidden[:, None])[:, 0]


EntryClass = MTPDrafter

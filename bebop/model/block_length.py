"""The network that chooses a request's block size from what the target makes of its prompt (SPEC 5.4)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TOP = 16  # sorted logits that a choice looks at


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEnd:
    """What is known of B prompts once they are read."""

    logits: Tensor  # [B, V] of the target at the last token, raw
    hidden: Tensor  # [B, d] its state there, final norm applied
    lengths: Tensor  # [B] tokens of the prompts


def _sorted(end: PromptEnd) -> Tensor:
    """The largest logits in falling order, the entropy (nats) and the margin: whatever tokens they belong to."""
    logits = end.logits.float()
    top = logits.topk(min(TOP, logits.shape[-1])).values
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    return torch.cat([top, entropy, top[:, :1] - top[:, 1:2]], -1)


# What a network may be given; BlockPilot found normalised logits and softmax worse than raw logits.
FEATURES: Mapping[str, Callable[[PromptEnd], Tensor]] = {
    "logits": lambda end: end.logits,
    "sorted": _sorted,
    "hidden": lambda end: end.hidden,
    "length": lambda end: end.lengths[:, None] / 100,
}


class BlockLengthNetwork(nn.Module):
    """A number for each candidate block size: two hidden layers, the second with a residual. The largest decides.

    Whether they are the logits of a classifier or the tokens a cycle that each size would give, is a matter of
    training.
    """

    def __init__(
        self,
        *,
        inputs: int,
        candidates: Sequence[int],
        default: int,
        hidden: int = 64,
        layers: int = 2,
        dropout: float = 0.2,
        features: str = "logits",
    ) -> None:
        """``inputs``: numbers that it looks at, V for logits; ``features``: which, a row of ``FEATURES``.

        ``candidates``: block sizes b, the newest token's slot included, in rising order; ``default``: the size until
        one is chosen, which takes the logits of a request's first cycle.
        """
        super().__init__()
        assert list(candidates) == sorted(set(candidates)), "candidates rise"
        self.candidates, self.default, self.features = tuple(candidates), default, features
        self.first = nn.Linear(inputs, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers - 1))
        self.last = nn.Linear(hidden, len(self.candidates))
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.last.weight)

    def forward(self, features: Tensor) -> Tensor:
        """Scores [B, C] of the candidates for features [B, inputs]."""
        x = self.dropout(self.first(features).relu())
        for layer in self.hidden:
            x = x + self.dropout(layer(x).relu())
        return self.last(x)

    def sizes(self, features: Tensor) -> Tensor:
        """The block size [B] for features [B, inputs]."""
        candidates = torch.tensor(self.candidates, device=features.device)
        return candidates[self(features.to(self.last.weight.dtype)).argmax(-1)]

    def choose(self, end: PromptEnd) -> Tensor:
        """The block size [B] of each prompt."""
        return self.sizes(FEATURES[self.features](end))


EntryClass = BlockLengthNetwork

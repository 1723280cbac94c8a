"""The network that chooses a request's block size from the logits at the end of its prompt (SPEC 5.4)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class BlockLengthNetwork(nn.Module):
    """A classifier over candidate block sizes: two hidden layers, the second with a residual.

    The feature is the raw logit vector; BlockPilot found normalised logits and softmax worse.
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
    ) -> None:
        """``inputs``: V; ``candidates``: block sizes b, the newest token's slot included, in rising order.

        ``default``: the size until one is chosen, which takes the logits of a request's first cycle.
        """
        super().__init__()
        assert list(candidates) == sorted(set(candidates)), "candidates rise"
        self.candidates, self.default = tuple(candidates), default
        self.first = nn.Linear(inputs, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers - 1))
        self.last = nn.Linear(hidden, len(self.candidates))
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.last.weight)

    def forward(self, logits: Tensor) -> Tensor:
        """Scores [B, C] of the candidates for logits [B, V]."""
        x = self.dropout(self.first(logits).relu())
        for layer in self.hidden:
            x = x + self.dropout(layer(x).relu())
        return self.last(x)

    def choose(self, logits: Tensor) -> Tensor:
        """The block size [B] for logits [B, V] at the last token of each prompt."""
        sizes = torch.tensor(self.candidates, device=logits.device)
        return sizes[self(logits.to(self.last.weight.dtype)).argmax(-1)]


EntryClass = BlockLengthNetwork

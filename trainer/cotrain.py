"""The MTP head trained beside the policy, on the hidden states that the policy's own update computes anyway.

Everything of the policy is a constant here: hidden states are detached, embedding and language-model head too.
Optimizer, learning rate, clipping and gradient norm are the head's own, so that the policy's update is the same to the
bit with and without it.
"""

from collections.abc import Sequence

from torch import Tensor

from bebop.config import HeadConfig
from bebop.metrics import Mean, Metrics
from bebop.model.backbone import Policy
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.trainer.packing import PackedRows
from bebop.trainer.state import State


class CoTrainer:
    """One rank of co-training; all ranks make the same calls."""

    def __init__(self, policy: Policy, config: HeadConfig, temperature: float, rank: int = 0, world: int = 1) -> None:
        """``policy`` as it is handed to ``PolicyTrainer``, before its backbone is split over the ranks."""
        self.heads = HeadTrainer(WholeBackend(policy, Sampling(temperature=temperature), rank, world), config)

    @property
    def version(self) -> int:
        """Updates of the head so far; 0: it is the one that the checkpoint came with."""
        return self.heads.version

    def update(self, kept: Sequence[tuple[PackedRows, Tensor]]) -> Metrics:
        """One step on the rows and hidden states [N, d] of a policy update; metrics ``head/*``."""
        rows = [row for packed, hidden in kept for row in packed.known(hidden) if row.answer.any()]
        numbers = self.heads.update_share(rows)
        return {name: Mean(value, 1.0) for name, value in numbers.items()}

    def state_dict(self) -> State:
        """See ``HeadTrainer``."""
        return self.heads.state_dict()

    def load_state_dict(self, state: State) -> None:
        """See ``HeadTrainer``."""
        self.heads.load_state_dict(state)

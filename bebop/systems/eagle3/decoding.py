"""EAGLE-3 drafter of the engine: a chain, each draft drawn from the network's own distribution.

The cycle, the cache and the draft temperature are those of the MTP head (``rollout/decoding/mtp.py``). q is 0 outside
the draft vocabulary, and verification uses that q. So tokens that cannot be drafted come from the residual, and the
output distribution stays the target's.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import TargetOutput, takes_logits
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.slots import Slots
from bebop.systems.eagle3.network import Eagle3Network


@takes_logits
class Eagle3Drafter(MTPDrafter):
    """Drafter that samples from the network's distribution over the draft vocabulary; greedy at temperature 0."""

    name = "eagle3"
    network: Eagle3Network

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(policy, slots, config)
        self.layers = self.network.taps

    def _make(self, config: DecodingConfig) -> Callable[..., Any]:
        network = self.policy.parts["eagle3"]
        assert isinstance(network, Eagle3Network)
        depth = self.policy.backbone.config.num_hidden_layers
        if max(network.taps) >= depth:
            raise UserError(
                f"the EAGLE-3 drafter reads layer {max(network.taps)}, and the model has layers 0..{depth - 1}"
            )
        self.network = network.to(self.policy.backbone.dtype)
        self.layer = 0
        own = network.config
        self.shape = (1, own.num_key_value_heads, own.head_dim)
        return self.network

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...], from the network's own table or the target's."""
        own = self.network.embed_tokens
        return self.policy.embed(tokens) if own is None else own(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, V] of states [B, d]."""
        return self.network.logits(hidden)

    def states(self, out: TargetOutput) -> Tensor:
        """Return the input [B, n, d] of the first step, from a pass of the target."""
        return self.network.features(out.layers)

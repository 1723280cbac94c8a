"""What PAD emits, worked out by passes over whole texts: no engine, no cache, no cycle (SPEC 4.4)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.systems.pad.network import PivotNetwork
from tests.builders import tiny_policy

VOCAB, STOP, LAYER, TAU, P_MIN = 5, 2, 0, 0.5, 0.02


def policy() -> Policy:
    """The tiny policy of the exactness test."""
    return tiny_policy(VOCAB, seed=11, sharp=16.0)


def random_network(position: str, policy: Policy, seed: int = 7) -> PivotNetwork:
    """Scores on both sides of TAU, which depend on the state more than on anything else."""
    torch.manual_seed(seed)
    network = PivotNetwork(size=32, layer=LAYER, position=position, inner=16, middle=8)  # type: ignore[arg-type]
    ids = torch.randint(VOCAB, (200, 5))
    with torch.no_grad():
        hidden, states = _passed(policy, ids, LAYER)
        p = policy.logits(hidden).softmax(-1)
        entropy = torch.special.entr(p).sum(-1)
        network.standardise(states.flatten(0, 1), p[..., 0].flatten(), entropy.flatten())
        for parameter in network.parameters():
            parameter.normal_(0, 0.7)
    return network.eval()


def _passed(policy: Policy, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Final hidden states of texts [B, T], and those after a layer, both [B, T, d]."""
    states: dict[str, Tensor] = {}
    module = policy.backbone.get_decoder().layers[layer]
    hook = module.register_forward_hook(lambda _m, _i, out: states.update(h=out[0] if isinstance(out, tuple) else out))
    hidden = policy.hidden(ids, torch.arange(ids.shape[1]).expand_as(ids), CausalContext())
    hook.remove()
    return hidden, states["h"]


@dataclass(frozen=True, slots=True)
class Step:
    """One draft at some prefixes [n]: of target and draft, and who is accepted whatever the test says, all [n, V]."""

    p: Tensor
    q: Tensor
    members: Tensor

    def stays(self) -> Tensor:
        """The chance [n, V] that a token is drafted and accepted."""
        return torch.where(self.members, self.q, self.q.minimum(self.p))

    def recovered(self) -> Tensor:
        """The chance [n, V] that the draft is rejected and a token comes in its place."""
        excess = (self.p - self.q).clamp_min(0)
        rejected = 1 - self.stays().sum(-1, keepdim=True)
        return rejected * excess / excess.sum(-1, keepdim=True)

    def emitted(self) -> Tensor:
        """The chance [n, V] that a token comes out."""
        return self.stays() + self.recovered()


@dataclass(frozen=True, slots=True)
class PadDistribution:
    """What a PAD engine with two drafts emits, for a policy, its classifier and a temperature."""

    policy: Policy
    network: PivotNetwork
    temperature: float = 1.0
    stop: int = STOP  # -1: none

    def cycle(self, context: Sequence[int]) -> tuple[Step, Step, Tensor]:
        """A cycle that begins after a context: its first draft [1, V], its second [V, V], and p of the bonus [V, V, V].

        The drafts are on the second axis from the front: row v of the second step is after the first draft v.
        """
        pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
        ids = torch.cat([torch.tensor(context).expand(len(pairs), -1), pairs], 1)
        at = len(context) - 1
        with torch.no_grad():
            hidden, states = _passed(self.policy, ids, self.network.layer)
            assert self.policy.mtp is not None
            heads = chain(self.policy.mtp, self.policy.embed(ids), hidden, 2)
            drafts = [self._probs(head[:, at - 1]) for head in heads]
            p = [self._probs(hidden[:, at + k]).view(VOCAB, VOCAB, VOCAB) for k in range(3)]
            h = [states[:, at + k].view(VOCAB, VOCAB, -1) for k in range(3)]
        q = [d.view(VOCAB, VOCAB, VOCAB) for d in drafts]
        ahead = self.network.position == "pred"
        # The state that predicts a candidate is the same for all; that of the candidate comes after it.
        first = h[0][0, :1, None].expand(1, VOCAB, -1) if ahead else h[1][None, :, 0]
        second = h[1][:, :1].expand(VOCAB, VOCAB, -1) if ahead else h[2]
        one = self._step(p[0][0, :1], q[0][0, :1], first)
        return one, self._step(p[1][:, 0], q[1][:, 0], second), p[2]

    def joint(self, context: Sequence[int]) -> Tensor:
        """Joint distribution [V, V, V] of the next three tokens; what follows the stop token counts as more of it."""
        one, two, bonus = self.cycle(context)
        table = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
        for a in range(VOCAB):
            if a == self.stop:
                table[a, a, a] = one.emitted()[0, a]
                continue
            again = self.cycle([*context, a])
            stays, goes = one.stays()[0, a], one.recovered()[0, a]
            for b in range(VOCAB):
                if b == self.stop:
                    table[a, b, b] = stays * two.emitted()[a, b] + goes * again[0].emitted()[0, b]
                    continue
                fresh = self.cycle([*context, a, b])[0].emitted()[0]
                table[a, b] += stays * (two.stays()[a, b] * bonus[a, b] + two.recovered()[a, b] * fresh)
                table[a, b] += goes * again[0].stays()[0, b] * again[1].emitted()[b]
                table[a, b] += goes * again[0].recovered()[0, b] * fresh
        return table

    def without_overrides(self) -> "PadDistribution":
        """Rejection sampling: the target's own distribution."""
        never = PivotNetwork(size=self.network.of_hidden.in_features, layer=self.network.layer, inner=1, middle=1)
        with torch.no_grad():
            never.out.weight.zero_()
            never.out.bias.copy_(torch.tensor([-50.0, 50.0]))
        return replace(self, network=never)

    def _probs(self, hidden: Tensor) -> Tensor:
        return (self.policy.logits(hidden).double() / self.temperature).softmax(-1)

    def _step(self, p: Tensor, q: Tensor, h: Tensor) -> Step:
        """``h`` [n, V, d]: the state by which each candidate is judged."""
        entropy = torch.special.entr(p).sum(-1, keepdim=True).expand_as(p)
        with torch.no_grad():
            scores = self.network(h, p.float(), entropy.float()).softmax(-1)[..., 1]
        members = (scores < TAU) & (p >= P_MIN) & (torch.arange(VOCAB) != self.stop)
        return Step(p=p, q=q, members=members)

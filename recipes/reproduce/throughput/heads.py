"""Heads of several qualities: the model's own, two trained ones, and the best one with noise on its weights."""

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from bebop.adaptation.probe import probe
from bebop.model.backbone import Policy
from bebop.trainer.objectives import Sampling
from recipes.reproduce.study import HELD_OUT, SEEDS, Arm, head, policy, text, untrained

DRAFTS = 3  # K, where it is not swept
NOISE = (0.2, 0.35, 0.5)  # standard deviation, in units of each weight's root mean square
TRAINED = ("hard_ce", "e2e_tv")
BEST = "e2e_tv"
HEADS = ("start", *TRAINED, *(f"{BEST}, noise {level}" for level in NOISE))

State = dict[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The model of a seed with the weights of all its heads."""

    model: Policy
    states: dict[str, State]  # head -> weights
    accepted: dict[str, float]  # head -> expected accepted drafts of DRAFTS, on held-out text

    def use(self, name: str) -> Policy:
        """Load this head into the model and return the model."""
        assert self.model.mtp is not None
        self.model.mtp.load_state_dict(self.states[name])
        return self.model


def arms() -> list[Arm]:
    """Return the arms of all heads to train."""
    return [Arm(objective=name, seed=seed) for seed in SEEDS for name in TRAINED]


def make(arm: Arm) -> None:
    """Train a head, unless it is kept already."""
    head(arm)


def noisy(state: Mapping[str, Tensor], level: float, seed: int) -> State:
    """Return the weights with Gaussian noise of ``level`` times each tensor's root mean square."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: w + level * w.square().mean().sqrt() * torch.randn(w.shape, generator=generator, dtype=w.dtype)
        for name, w in state.items()
    }


def bench(seed: int) -> Bench:
    """Return all heads of a seed, with their acceptance on held-out text."""
    model = untrained(policy())
    assert model.mtp is not None
    states = {"start": _state(model)} | {name: _state(head(Arm(objective=name, seed=seed))) for name in TRAINED}
    states |= {f"{BEST}, noise {level}": noisy(states[BEST], level, seed) for level in NOISE}
    heads = Bench(model=model, states=states, accepted={})
    model.mtp.eval().requires_grad_(False)
    rows = text(seed, HELD_OUT)
    for name in HEADS:
        heads.accepted[name] = float(probe(heads.use(name), rows, DRAFTS, Sampling()).accept.mean()) - 1
    return heads


def _state(model: Policy) -> State:
    assert model.mtp is not None
    return {name: tensor.detach().clone() for name, tensor in model.mtp.state_dict().items()}

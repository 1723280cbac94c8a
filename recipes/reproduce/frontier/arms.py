"""The arms: every decoding system, those with options at several of them, and a planted rule whose error is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, ModelConfig
from bebop.kernels.pivot import pivot_verify
from bebop.kernels.uniforms import uniforms
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from recipes.reproduce.frontier import pipo

# Options of systems that are measured at several; a system without a row is measured as it is by default.
SWEPT: Mapping[str, tuple[dict[str, Any], ...]] = {
    "pad": tuple({"tau": tau} for tau in (0.1, 0.3, 0.5, 0.7)),
    "pipo": pipo.SETTINGS,
}
# Of systems with a cycle of their own: what stands for the witness (``witness.py``), summed over each answer.
OWN_WITNESS = {"pipo": pipo.of_pairs}
# What no trained part of a system was trained on: questions (seed, count), and the job that they are of.
questions, config = pipo.held_out, pipo.config
# In the figure: colours of families, and where the names of their settings stand, in points of print.
INKS = {"exact": "tv", "pad": "hard_ce", "pipo": pipo.INK, "planted": "start"}
BY_VARIATION: Mapping[str, Sequence[tuple[int, int]]] = {"pad": ((4, -9),), "pipo": pipo.OFFSETS}
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5)
DRAFTS_OF = "bebop"  # the system whose drafts the planted rule judges
LENGTH = 512  # tokens of prompt and answer
COINS = 1 << 39  # added to a request's seed: numbers that nothing else draws


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to decode: Arm(system="pad", options={"tau": 0.3})."""

    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None  # of the planted rule; None: the system's own rule

    @property
    def family(self) -> str:
        """What its points are joined as."""
        return self.system if self.epsilon is None else "planted"

    @property
    def name(self) -> str:
        """As numbers and pages call it: "pad 0.3"."""
        values = [f"{value:g}" for value in self.options.values()]
        return " ".join([self.family, *values] if self.epsilon is None else [self.family, f"{self.epsilon:g}"])

    @property
    def exact(self) -> bool:
        """Whether it promises the target's distribution."""
        return self.epsilon is None and SYSTEMS[self.system].exact

    @property
    def config(self) -> DecodingConfig:
        """As the engine takes it: the system's own number of drafts."""
        drafts = SYSTEMS[self.system].draft_tokens
        return DecodingConfig(system=self.system, draft_tokens=drafts, options=dict(self.options))


def all_arms() -> tuple[Arm, ...]:
    """Return an arm for each system and setting; a new system comes along by itself.

    The built-in model has no smaller one that could draft for it.
    """
    names = [name for name, system in SYSTEMS.items() if not system.separate]
    own = [Arm(system=name, options=options) for name in names for options in SWEPT.get(name, ({},))]
    return (*own, *(Arm(system=DRAFTS_OF, epsilon=epsilon) for epsilon in EPSILONS))


ARMS = all_arms()
PLAIN = next(arm for arm in ARMS if not SYSTEMS[arm.system].drafts)


class Planted:
    """Rejection sampling that keeps a failed draft with probability epsilon, whatever the draft.

    A tested position emits P = (1 - epsilon) p + epsilon q: total variation to p is epsilon TV(p, q), and as much is
    accepted beyond the overlap of p and q (SPEC 4.4, with a share of every token in the place of a set of tokens).
    """

    exact = False
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ("overridden",)

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        kept = coins(rows, draft.tokens.shape[1]) < self.epsilon
        accepted, token, overridden = pivot_verify(draft.tokens, draft.probs, out.probs, uniforms, kept, draft.lengths)
        return Accepted.chain(draft, accepted, token, counts={"overridden": overridden})

    def variation(self, p: Tensor, q: Tensor) -> Tensor:
        """TV(P, p) [...] of target and draft [..., V]."""
        return self.epsilon * (1 - torch.minimum(p, q).sum(-1))


def coins(rows: Rows, drafts: int) -> Tensor:
    """A uniform [B, K] for each draft, apart from those that it is drawn and tested with."""
    return uniforms(rows.slots.seed[: rows.batch] + COINS, rows.fed, drafts)


@cache
def policy() -> Policy:
    """The built-in model with all parts that a system needs."""
    torch.set_num_threads(1)
    needs = sorted({part for system in SYSTEMS.values() for part in system.needs})
    return load_policy(ModelConfig(path="tiny", device="cpu"), need_head=True, needs=needs)


def engine(model: Policy, arm: Arm, slots: int, watched: bool = False) -> TorchEngine:
    """An engine that decodes like an arm; ``watched``: with all statistics and what the decoder keeps of an answer."""
    made = TorchEngine(model, arm.config, slots=slots, max_length=LENGTH, measure=watched, keep_state=watched)
    if arm.epsilon is not None:
        assert isinstance(made.decoder, DraftVerify)
        made.decoder.rule = Planted(arm.epsilon)
        made.slots.extend_stats(Planted.counts)
    return made

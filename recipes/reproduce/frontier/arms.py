"""Arms of the study: every decoding system, some at several options, and a planted rule whose error is known."""

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

# Options of systems that are measured at several settings; a system without a row is measured at its defaults.
SWEPT: Mapping[str, tuple[dict[str, Any], ...]] = {
    "pad": tuple({"tau": tau} for tau in (0.1, 0.3, 0.5, 0.7)),
    "pipo": pipo.SETTINGS,
}
# Systems with a cycle of their own: the function that replaces the witness (``witness.py``), summed per completion.
OWN_WITNESS = {"pipo": pipo.of_pairs}
# Questions (seed, count) that no part of a system was trained on, and the configuration of their job.
questions, config = pipo.held_out, pipo.config
# In the figure: colours of families, and offsets of the names of their settings, in points of print.
INKS = {"exact": "tv", "pad": "hard_ce", "pipo": pipo.INK, "planted": "start"}
BY_VARIATION: Mapping[str, Sequence[tuple[int, int]]] = {"pad": ((4, -9),), "pipo": pipo.OFFSETS}
EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5)
DRAFTS_OF = "bebop"  # the system whose drafts the planted rule judges
LENGTH = 512  # maximal tokens of prompt and completion
COINS = 1 << 39  # added to a request's seed, so that nothing else draws the same numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to decode: Arm(system="pad", options={"tau": 0.3})."""

    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    epsilon: float | None = None  # strength of the planted rule; None: the system's own rule

    @property
    def family(self) -> str:
        """Return the name of the arm's family, whose points a figure joins."""
        return self.system if self.epsilon is None else "planted"

    @property
    def name(self) -> str:
        """Return the name in numbers and on pages: "pad 0.3"."""
        values = [f"{value:g}" for value in self.options.values()]
        return " ".join([self.family, *values] if self.epsilon is None else [self.family, f"{self.epsilon:g}"])

    @property
    def exact(self) -> bool:
        """Return whether the arm promises the target's distribution."""
        return self.epsilon is None and SYSTEMS[self.system].exact

    @property
    def config(self) -> DecodingConfig:
        """Return the engine's decoding configuration, with the system's default number of drafts."""
        drafts = SYSTEMS[self.system].draft_tokens
        return DecodingConfig(system=self.system, draft_tokens=drafts, options=dict(self.options))


def all_arms() -> tuple[Arm, ...]:
    """Return an arm for each system and setting; a new system is included automatically.

    Systems with a separate draft model are left out: no smaller model can draft for the built-in one.
    """
    names = [name for name, system in SYSTEMS.items() if not system.separate]
    own = [Arm(system=name, options=options) for name in names for options in SWEPT.get(name, ({},))]
    return (*own, *(Arm(system=DRAFTS_OF, epsilon=epsilon) for epsilon in EPSILONS))


ARMS = all_arms()
PLAIN = next(arm for arm in ARMS if not SYSTEMS[arm.system].drafts)


class Planted:
    """Rejection sampling that keeps a failed draft with probability epsilon, whatever the draft.

    A tested position emits P = (1 - epsilon) p + epsilon q. Its total variation to p is epsilon TV(p, q), and it
    accepts as much beyond the overlap of p and q. This is SPEC 4.4 with a share of every token in place of a set of
    tokens.
    """

    exact = False
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ("overridden",)

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify drafts and keep failed ones by coin flips; see ``AcceptanceRule``."""
        kept = coins(rows, draft.tokens.shape[1]) < self.epsilon
        accepted, token, overridden = pivot_verify(draft.tokens, draft.probs, out.probs, uniforms, kept, draft.lengths)
        return Accepted.chain(draft, accepted, token, counts={"overridden": overridden})

    def variation(self, p: Tensor, q: Tensor) -> Tensor:
        """Return TV(P, p) [...] of target and draft [..., V]."""
        return self.epsilon * (1 - torch.minimum(p, q).sum(-1))


def coins(rows: Rows, drafts: int) -> Tensor:
    """Return a uniform [B, K] for each draft, independent of those that draw and test it."""
    return uniforms(rows.slots.seed[: rows.batch] + COINS, rows.fed, drafts)


@cache
def policy() -> Policy:
    """Load the built-in model with all parts that a system needs, and set torch to one thread."""
    torch.set_num_threads(1)
    needs = sorted({part for system in SYSTEMS.values() for part in system.needs})
    return load_policy(ModelConfig(path="tiny", device="cpu"), need_head=True, needs=needs)


def engine(model: Policy, arm: Arm, slots: int, watched: bool = False) -> TorchEngine:
    """Return an engine that decodes like an arm; ``watched`` adds all statistics and keeps the decoder's state."""
    made = TorchEngine(model, arm.config, slots=slots, max_length=LENGTH, measure=watched, keep_state=watched)
    if arm.epsilon is not None:
        assert isinstance(made.decoder, DraftVerify)
        made.decoder.rule = Planted(arm.epsilon)
        made.slots.extend_stats(Planted.counts)
    return made

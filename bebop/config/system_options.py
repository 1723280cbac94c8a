"""Define the settings that one decoding system or one trained part has alone: a dataclass each, which its row names.

They are given as ``decoding.options.NAME=VALUE`` and ``options.NAME=VALUE``.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bebop.config.fields import (
    FROM_0_BELOW_1,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    above,
    check,
    from_dict,
    setting,
    within,
)
from bebop.config.tree_shape import MAX_NODES, grows, likeliest

SHARE = within(0, 1)


def parsed(cls: type | None, values: Mapping[str, Any], section: str, owner: str) -> Any:
    """Return the options ``cls`` of a system or part, made of what was given; None where it has none.

    ``section``: what the names begin with; ``owner``: how a refusal calls whoever has no options.
    """
    if cls is None:
        check(not values, section.removesuffix("."), dict(values), f"{owner} has no options")
        return None
    return from_dict(cls, values, section)


class SystemOptions(Settings):
    """Base of the options of a decoding system."""

    __slots__ = ()
    SECTION = "decoding.options."


class TrainingOptions(Settings):
    """Base of the options by which a part is trained."""

    __slots__ = ()
    SECTION = "options."


@dataclass(frozen=True, slots=True, kw_only=True)
class PadOptions(SystemOptions):
    """Which rejected drafts are accepted all the same (SPEC 4.2)."""

    tau: float = setting(0.3, "rejected drafts whose pivot score is below it are accepted; 0: none", SHARE)
    p_min: float = setting(1e-3, "least probability of such a draft under the target", FROM_0_BELOW_1)


CHANCES = Limit(
    lambda ranks: bool(ranks) and sum(ranks) <= 1 and all(0 < chance < 1 for chance in ranks),
    "give numbers above 0 that sum to 1 or less",
)
TABLE = Limit(
    lambda table: bool(table) and all(row and all(0 < chance <= 1 for chance in row) for row in table),
    "give a row of numbers above 0, up to 1, for each depth",
)
SHAPE = Limit(
    grows, f"give 1 to {MAX_NODES} paths, each after its parent and its sibling before, as [[0], [1], [0, 0]]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions(SystemOptions):
    """Which tree is drafted, ``draft_tokens`` nodes in all."""

    shape: tuple[tuple[int, ...], ...] | None = setting(
        None, "paths of its nodes, numbers of children from 0; the first draft_tokens count; null: from ranks", SHAPE
    )
    ranks: tuple[float, ...] = setting(
        lambda: (0.6, 0.2, 0.1), "chance of a first, second, ... child to be accepted: the likeliest nodes", CHANCES
    )
    chances: tuple[tuple[float, ...], ...] | None = setting(
        None, "the same for each depth, beyond the last as there; null: the drafter's own, else ranks", TABLE
    )

    @property
    def most_drafts(self) -> int:
        """Return how many nodes ``draft_tokens`` may ask for."""
        return MAX_NODES if self.shape is None else len(self.shape)

    def table(self, known: Sequence[Sequence[float]] = ()) -> Sequence[Sequence[float]]:
        """Return chances of children by depth; ``known`` are those that the drafter brings along."""
        return self.chances or known or (self.ranks,)

    def paths(
        self, nodes: int, known: Sequence[Sequence[float]] = (), deepest: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the paths of the tree with so many nodes, parents before children and siblings in order.

        Without a ``shape`` they are the likeliest, not below depth ``deepest``.
        """
        return likeliest(self.table(known), nodes, deepest) if self.shape is None else self.shape[:nodes]


@dataclass(frozen=True, slots=True, kw_only=True)
class FirpOptions(TreeOptions):
    """Which tree is drafted, and which of its nodes another one may grow from (SPEC 3.3)."""

    ranks: tuple[float, ...] = setting(
        lambda: (0.3, 0.15, 0.1, 0.07, 0.05, 0.04, 0.03, 0.02),
        "chance of a first, second, ... child to be accepted, where the part has no chances of its own",
        CHANCES,
    )
    pseudo_paths: int | None = setting(
        None,
        "M: pseudo states beside nodes on the M likeliest paths alone, a plain step after any other; null: all",
        POSITIVE,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaOptions(SystemOptions):
    """How a block size follows what was accepted (SPEC 5.6)."""

    decay: float = setting(0.9, "weight of a cycle over that of the one after it", FROM_0_BELOW_1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryOptions(SystemOptions):
    """Which other completions of a prompt are drafted from."""

    tokens: int = setting(1 << 18, "tokens of completions that each worker keeps ready to be matched", POSITIVE)
    past_tokens: int = setting(
        1 << 24,
        "tokens of past completions that the driver keeps, 4 bytes each: all of two epochs, or few of them serve",
        POSITIVE,
    )
    completions: int = setting(16, "past completions of a prompt that count, the newest", POSITIVE)
    siblings: bool = setting(
        True,
        "completions in progress count, too: which tokens come, not their distribution, depends on those beside them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipoOptions(SystemOptions):
    """Which drafts stand in the second place of a pair (SPEC 2.5)."""

    tau: float | None = setting(
        None,
        "drafts are kept from this confidence on; below 0: all of them, 1 or more: none; null: what the part says",
        Limit(math.isfinite, "give a number, or null"),
    )
    gate: Literal["confidence", "random"] = setting(
        "confidence", "what keeps drafts; random: chance, whatever they are, an ablation"
    )
    keep: float = setting(0.5, "share of the drafts that gate=random keeps", SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotTraining(TrainingOptions):
    """How rejected drafts are labelled, and the classifier trained on them (SPEC 4.2, 4.3)."""

    rollouts: int = setting(16, "K, continuations of each kind for one candidate", within(1, 1 << 10))
    places: int = setting(4, "positions of a completion whose rejected drafts are labelled", POSITIVE)
    depth: int = setting(3, "drafts of a block whose rejections are looked at", within(1, 16))
    p_min: float = setting(1e-3, "least probability of a candidate under the target", FROM_0_BELOW_1)
    draft_temperature: float | None = setting(None, "of the drafts; null: the target's", above(0))
    definition: Literal["paper", "residual"] = setting("residual", "what a candidate is compared with")
    tol: float = setting(0.1, "a pivot lowers the chance of success by more", SHARE)
    success: float = setting(1.0, "least reward of a completion that succeeds")
    judge: bool = setting(True, "check the worked steps of a candidate's success: it may become a pivot")
    twice: float = setting(
        0.25, "share of the prompts labelled twice, to see how far labels can be trusted", within(0, 1)
    )
    feat_pos: Literal["pred", "cand"] = setting("pred", "state that predicts the candidate, or the candidate's own")
    features: Literal["all", "hidden", "scalars"] = setting("all", "what the classifier sees: h, and p, log p, H(p)")
    layer: int | None = setting(None, "of the target, from 0; null: three quarters up", NOT_NEGATIVE)
    inner: int = setting(64, "width of what a state is turned into", POSITIVE)
    middle: int = setting(32, "width of the hidden layer over that and the scalars", POSITIVE)
    lr: float = setting(1e-3, "learning rate", above(0))
    weight_decay: float = setting(1e-2, "decoupled", NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTraining(TrainingOptions):
    """Training of the block drafter (``bebop.adapt part=block``)."""

    steps: int = setting(2000, "updates", POSITIVE)
    rows_per_step: int = setting(16, "completions in one update", POSITIVE)
    anchors: int = setting(8, "random blocks in one completion", POSITIVE)
    block: int = setting(8, "B, slots of a block in training, the anchor's included", within(2, 17))
    layers: int = setting(2, "Qwen3 layers of the drafter", POSITIVE)
    width: int = setting(384, "of their MLPs", POSITIVE)
    taps: int = setting(2, "layers of the target that it reads, evenly spaced from 1 to L - 3", POSITIVE)
    objective: Literal["ce", "hard_ce", "kl", "rkl", "jsd", "tv", "nla", "hybrid", "e2e_tv"] = setting(
        "e2e_tv", "what is minimised after the warm-up; all but e2e_tv slot by slot"
    )
    warm: float = setting(0.7, "share of the steps that are trained on ce first", SHARE)
    decay: float = setting(4.0, "g: slot k weighs exp(-(k - 1) / g)", above(0))
    lr: float = setting(2e-3, "learning rate, after a warm-up; falls as a cosine", above(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class FirpTraining(TrainingOptions):
    """Training of pseudo hidden states (``bebop.adapt part=firp``, SPEC 3.2)."""

    layers: tuple[int, ...] | None = setting(
        None, "t_k, layers of the target after which step k enters, from 1 on; null: three from the middle up"
    )
    steps: int = setting(600, "updates of each step; those before it are there and frozen", POSITIVE)
    rows_per_step: int = setting(16, "completions in one update", POSITIVE)
    anchors: int = setting(24, "random anchors in one completion", POSITIVE)
    objective: Literal["kl", "tv", "e2e_tv"] = setting(
        "kl", "what is minimised after the warm-up; e2e_tv weighs an anchor by the acceptance of the earlier steps"
    )
    warm: float = setting(0.3, "share of the updates of a step that are on kl first", SHARE)
    calibration: int = setting(
        64, "prompts of the training on whose greedy completions ranks are counted, for the shape of trees", POSITIVE
    )
    lr: float = setting(1e-2, "learning rate, after a warm-up; falls as a cosine within each step", above(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLengthTraining(TrainingOptions):
    """Training of the choice of block sizes (``bebop.adapt part=block_length``)."""

    smallest: int = setting(2, "smallest block size that can be chosen, the newest token included", within(1, 17))
    largest: int = setting(8, "largest block size that can be chosen", within(1, 17))
    label: Literal["tau", "speed"] = setting(
        "tau", "a prompt's best size: most tokens a cycle, or most tokens a second"
    )
    features: Literal["logits", "sorted", "hidden", "length"] = setting(
        "logits",
        "what it looks at: the logits at the end of the prompt, the largest of them sorted with entropy and margin, "
        "the last state, or the prompt's length",
    )
    target: Literal["classify", "regress"] = setting(
        "classify", "what is learned: which size is best, or the score of every size"
    )
    temperature: float = setting(0.0, "of the completions that sizes are compared on; 0 is greedy", NOT_NEGATIVE)
    seeds: int = setting(1, "completions of a prompt with each size; above 0 they are random: 4 or more", POSITIVE)
    hidden: int = setting(64, "width of the two hidden layers", POSITIVE)
    steps: int = setting(1500, "updates", POSITIVE)
    batch: int = setting(64, "prompts in one update", POSITIVE)
    lr: float = setting(1e-3, "learning rate", above(0))

    def _validate(self) -> None:
        self.require(self.smallest < self.largest, "largest", "it must exceed options.smallest")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipoTraining(TrainingOptions):
    """Training of the network of pairs (SPEC 2.3, 2.4)."""

    stage: Literal["sft", "opd"] = setting(
        "sft",
        "on the model's own correct completions, or by distillation on completions of the network in model.parts.pipo",
    )
    steps: int = setting(700, "updates", POSITIVE)
    rows_per_step: int = setting(12, "completions in one update", POSITIVE)
    lr: float | None = setting(
        None, "learning rate, after a warm-up; falls as a cosine; null: 2e-3 in sft, 5e-4 in opd", above(0)
    )
    mtp_weight: float = setting(1.0, "of the second token's loss, beside the first one's", NOT_NEGATIVE)
    confidence_weight: float = setting(1.0, "of the confidence head's loss", NOT_NEGATIVE)
    compressor: Literal["mlp", "random"] = setting(
        "mlp", "sft: a + b + MLP, or a linear map that begins as noise, an ablation"
    )
    samples: int = setting(2, "sft: completions of each question, of which those of a reward of 1 are kept", POSITIVE)
    rho: float = setting(0.5, "sft: PADs are put after at most this share of a completion's tokens", SHARE)
    rollouts: int = setting(96, "opd: completions that are drawn at a time, and trained on once", POSITIVE)
    gate: float | None = setting(
        None,
        "opd: threshold of the confidence in those completions; null: what the part says",
        Limit(math.isfinite, "give a number, or null"),
    )
    pad_ratio: float = setting(0.35, "the share of half pairs that the threshold of the part is chosen for", SHARE)

    @property
    def rate(self) -> float:
        """Return the learning rate of the stage."""
        return self.lr if self.lr is not None else {"sft": 2e-3, "opd": 5e-4}[self.stage]

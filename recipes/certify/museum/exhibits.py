"""The exhibits: the report of each fault, the error, how it is planted, and the causes that name it correctly.

``EXHIBITS`` are faults. ``LOOK_ALIKES`` are exact rules that people reported as faults: these must pass. ``ATTACKS``
are faults that nobody reported; an attack on the certificate's names of causes found them misnamed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from bebop.certify.declared import Rule
from recipes.certify.museum import damage, planted
from recipes.certify.museum.damage import BonusLaw, Law, Parts, Place
from recipes.certify.museum.planted import Fault, fault


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exhibit:
    """One exhibit: Exhibit(name="vllm-55005", source="vllm-project/vllm #55005", wrong="Drafts are ...", ...)."""

    name: str
    source: str  # repository and number
    wrong: str  # what was wrong, in one sentence
    fault: Fault
    law: Law | None
    bonus: BonusLaw = damage.same_bonus
    first_alone: bool = False  # the law is of a cycle's first place
    declared: Law = damage.claimed  # what the engine says that it does inside
    rule: Rule = "rejection"  # what the engine declares to the white box
    black: tuple[str, ...] = ()  # causes that name it rightly, from outside
    white: tuple[str, ...] = ()  # and from inside
    sampling: Mapping[str, float] = field(default_factory=dict)  # that the fault needs, beside the temperature
    model: Literal["tiny", "random"] = "tiny"
    front: Literal["", "resumed", "shifted"] = ""  # a fault of what is asked for or reported
    remedy: str = ""  # of what no test of tokens can see: what could see it

    @property
    def url(self) -> str:
        """Return the report's address, or an empty string if nobody reported the fault."""
        repository, _, number = self.source.partition(" #")
        return f"https://github.com/{repository}/issues/{number}" if number else ""


def one_hot_drafts(at: Place) -> Parts:
    """Return the law that an engine with greedy drafts declares: one-hot q."""
    hot = planted.one_hot(at.q.argmax(-1), at.p)
    return Parts(drawn=hot, accept=at.p, left=damage.residual(at.p, hot))


def padded_drafts(at: Place) -> Parts:
    """Return the law that an engine declares for a drafted padding token: one-hot q."""
    hot = planted.one_hot(at.q.argmax(-1) * 0 + planted.PAD, at.p)
    return Parts(drawn=hot, accept=at.p, left=damage.residual(at.p, hot))


DRAFT = ("draft_leak",)
VERIFIED = ("acceptance", "recovered", "verification")
EXHIBITS = (
    Exhibit(
        name="vllm-47386",
        source="vllm-project/vllm #47386",
        wrong="The recovered token is drawn with the Gumbel noise of the draft that was rejected.",
        fault=Fault(make=planted.shared_noise),
        law=damage.shared_noise,
        black=("shared_noise", "shared_randomness", "draws"),
        white=("shared_noise", "recovered"),
        model="random",
    ),
    Exhibit(
        name="vllm-55005",
        source="vllm-project/vllm #55005",
        wrong="On CPUs drafts are judged at a temperature from memory that was never written.",
        fault=fault(planted.memory_temperature),
        law=damage.memory_temperature,
        black=("sharpness",),
        white=VERIFIED,
    ),
    Exhibit(
        name="ascend-7807",
        source="vllm-project/vllm-ascend #7807",
        wrong="Block verification holds products of p / q against products of uniforms, and keeps a token's residual.",
        fault=fault(planted.block_by_token),
        law=damage.block_by_token,
        first_alone=True,
        black=DRAFT,
        white=("acceptance",),
    ),
    Exhibit(
        name="ascend-7839",
        source="vllm-project/vllm-ascend #7839",
        wrong="Block verification takes drafts without probabilities for certain ones, and multiplies p alone.",
        fault=fault(planted.block_one_hot, planted.greedy),
        law=damage.block_one_hot,
        first_alone=True,
        declared=one_hot_drafts,
        black=DRAFT,
        white=("acceptance",),
    ),
    Exhibit(
        name="ascend-13470",
        source="vllm-project/vllm-ascend #13470",
        wrong="The uniform of the acceptance test is always 0, so that every draft is accepted.",
        fault=fault(planted.accept_all),
        law=damage.accept_all,
        black=DRAFT,
        white=("acceptance",),
    ),
    Exhibit(
        name="ascend-2881",
        source="vllm-project/vllm-ascend #2881",
        wrong="Recovery zeroes the draft's probability in place, and the bonus token is drawn from that row.",
        fault=fault(planted.bonus_without_draft),
        law=damage.claimed,
        bonus=damage.bonus_without_draft,
        black=("context", "wrong_row"),
        white=("bonus",),
    ),
    Exhibit(
        name="atom-2318",
        source="ROCm/ATOM #2318",
        wrong="Drafts are compared with the target's likeliest token at any temperature; the bonus alone is sampled.",
        fault=fault(planted.argmax_target),
        law=damage.argmax_target,
        black=("truncation", "sharpness"),
        white=VERIFIED,
    ),
    Exhibit(
        name="sglang-32922",
        source="sgl-project/sglang #32922",
        wrong="On ROCm every request takes the greedy path, whatever its temperature.",
        fault=fault(planted.argmax_always),
        law=damage.argmax_target,
        bonus=damage.argmax_bonus,
        black=("truncation", "sharpness"),
        white=(*VERIFIED, "bonus"),
    ),
    Exhibit(
        name="sglang-35771",
        source="sgl-project/sglang #35771",
        wrong="A draft that the target excludes is accepted when the uniform is exactly 0.",
        fault=fault(planted.zero_coin, size=planted.ZERO_COIN),
        law=damage.zero_coin,
        black=DRAFT,
        white=("acceptance",),
        sampling={"top_p": 0.9},
        remedy="A unit test of the kernel with a uniform of 0 and p = 0. A single such token is a proof.",
    ),
    Exhibit(
        name="sglang-ngram",
        source="sgl-project/sglang, n-gram drafts (found by Bebop)",
        wrong="Drafts that were not found are filled up with one token, whose probability is added once for each.",
        fault=fault(planted.pads_add_up, planted.pad, limit=1),
        law=damage.pads,
        first_alone=True,
        declared=padded_drafts,
        black=("override", "draft_leak"),
        white=("acceptance",),
    ),
    Exhibit(
        name="rtp-1295",
        source="alibaba/rtp-llm #1295",
        wrong="A draft that equals the target's own draw is accepted, and others still have the ratio test.",
        fault=fault(planted.match_or_ratio),
        law=damage.match_or_ratio,
        black=DRAFT,
        white=("acceptance",),
    ),
    Exhibit(
        name="spec-rl-14",
        source="ShopeeLLM/Spec-RL #14",
        wrong="After a rejection the token is drawn from p instead of the residual.",
        fault=fault(planted.recover_from_target),
        law=damage.recover_from_target,
        black=DRAFT,
        white=("recovered",),
    ),
    Exhibit(
        name="jaymody-3",
        source="jaymody/speculative-sampling #3",
        wrong="Drafts are the likeliest token and are judged as if they had been drawn from q.",
        fault=fault(draw=planted.greedy_as_sampled),
        law=damage.greedy_as_sampled,
        black=DRAFT,
        white=("draft_draw",),
    ),
    Exhibit(
        name="transformers-47932",
        source="huggingface/transformers #47932",
        wrong="Drafts are drawn after temperature and top-k, and judged by the q before them.",
        fault=fault(draw=planted.raw_recorded),
        law=damage.raw_recorded,
        black=("draft_leak", "sharpness", "truncation"),
        white=("draft_draw",),
        sampling={"top_k": 10},
    ),
    Exhibit(
        name="lattice-388",
        source="ohdearquant/lattice #388",
        wrong="Verification uses p and q without the temperature that was asked for.",
        fault=fault(planted.without_temperature),
        law=damage.without_temperature,
        bonus=damage.raw_bonus,
        black=("sharpness",),
        white=(*VERIFIED, "bonus"),
    ),
    Exhibit(
        name="deepspec-31",
        source="deepseek-ai/DeepSpec #31",
        wrong="Drafts are drawn from probabilities in bfloat16 and judged by those in float32.",
        fault=fault(draw=planted.drawn_in_bfloat16),
        law=damage.drawn_in_bfloat16,
        black=("draft_leak", "sharpness"),
        white=("draft_draw",),
        remedy="A test that the sampler's probabilities are those that verification is given, to the bit.",
    ),
)

LOOK_ALIKES = (
    Exhibit(
        name="eagle-329",
        source="SafeAILab/EAGLE #329",
        wrong="Reported: q is ignored. Exact: q counts as 1 at the draft, and the residual is p without the draft.",
        fault=fault(planted.q_ignored),
        law=damage.target_draw,
        rule="one_hot",
    ),
    Exhibit(
        name="mlx-swift-459",
        source="ml-explore/mlx-swift-lm #459",
        wrong="Reported: a draft stands if it equals a draw of the target. Exact: that draw is what is written.",
        fault=fault(planted.target_draw),
        law=damage.target_draw,
        rule="one_hot",
    ),
    Exhibit(
        name="dflash-74",
        source="z-lab/dflash #74",
        wrong="Reported: drafts ignore the temperature. Exact: greedy drafts are matched with draws of the target.",
        fault=fault(planted.target_draw, planted.greedy),
        law=damage.target_draw,
        declared=one_hot_drafts,
        rule="one_hot",
    ),
)

ATTACKS = (
    Exhibit(
        name="seed-without-prefix",
        source="an attack",
        wrong="A resumed request draws again with the uniforms of its beginning.",
        fault=fault(),
        law=None,
        black=("shared_randomness",),
        front="resumed",
    ),
    Exhibit(
        name="shifted-logprobs",
        source="an attack",
        wrong="The first token of a cycle is reported with the log-prob of the token before it.",
        fault=fault(),
        law=None,
        black=("reported_logprobs",),
        front="shifted",
    ),
    Exhibit(
        name="q-of-the-cycle-before",
        source="an attack",
        wrong="Verification is given the q of the cycle before.",
        fault=Fault(make=planted.stale_q),
        law=None,
        black=DRAFT,
        white=("verification",),
    ),
)
CLEAN = Exhibit(name="none", source="", wrong="Nothing.", fault=fault(), law=None)

"""The papers whose claims the recipes test, and the headings of ``RESULTS.md``: one more claim is a row."""

from collections.abc import Mapping
from dataclasses import dataclass

REAL, BUILT_IN = "SmolLM2", "built-in"
# What studies are about, in the order in which verdicts stand.
MODELS = {REAL: "SmolLM2-135M-Instruct", BUILT_IN: "the built-in model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper; ``name`` is what ``Rule.claim`` calls it."""

    name: str
    text: str
    beyond_reach: tuple[str, ...] = ()  # parts that no recipe can test, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A system of the mission and what its paper says of it."""

    title: str
    claims: tuple[Claim, ...]
    others: Mapping[str, str]  # further names of rules -> their headings; the last takes what goes beyond the paper
    recipes: tuple[str, ...]  # the studies of its claims, in their order; here stands what goes beyond it in them
    real: tuple[str, ...] = ()  # those on a real model, in their order; one within another's folder is "real.rl"


PAPERS = (
    Paper(
        title="Bebop",
        claims=(
            Claim(
                name="C1",
                text="Acceptance falls linearly with policy entropy, for greedy drafts and for sampled drafts of "
                "a head trained by cross-entropy.",
            ),
            Claim(
                name="C2",
                text="Rejection sampling (sampled drafts) beats target-only verification (greedy drafts).",
            ),
            Claim(
                name="C3",
                text="Training the head on total variation, end to end over several steps, raises acceptance under "
                "rejection sampling and removes most of its dependence on entropy.",
            ),
            Claim(
                name="C4",
                text="Drift of the policy's weights contributes almost nothing, so one adaptation before RL is enough.",
            ),
            Claim(
                name="C5",
                text="End-to-end asynchronous RL up to 1.8 times as fast (rollouts 2.4 times), about 10 % relative "
                "gain in acceptance, up to 25 % more throughput.",
                beyond_reach=(
                    "The sizes 1.8 (end-to-end RL) and 2.4 (rollouts) are those of large models on GPUs, where a pass "
                    "over a few tokens costs hardly more than a pass over one.",
                ),
            ),
        ),
        others={"Fig 14b": "Further findings of the paper", "beyond": "Beyond the paper"},
        recipes=("objectives", "budget", "temperature", "boundary", "top_k", "drift", "throughput", "beyond"),
        real=("real_entropy", "real_drafts", "real_losses", "real_pays", "real_pays_gpu", "real_steps", "real.rl"),
    ),
    Paper(
        title="PAD",
        claims=(
            Claim(name="PAD 1", text="A classifier on the target's hidden state tells pivot tokens from others."),
            Claim(
                name="PAD 2",
                text="Keeping the rejected drafts that it finds harmless raises acceptance while accuracy is kept.",
                beyond_reach=(
                    "The size 2.5 of the speedup is that of an 8B target and a .6B draft model on a GPU; here a pass "
                    "over a few tokens costs more than a pass over one.",
                ),
            ),
            Claim(name="PAD 3", text="It matters which rejected drafts are kept, not only how many."),
            Claim(
                name="PAD 4",
                text="Log-probs of the distribution that was really emitted make PAD usable in RL (ours).",
            ),
        ),
        others={"beyond PAD": "Beyond the paper on PAD"},
        recipes=("pad", "pad_training"),
    ),
    Paper(
        title="BlockPilot",
        claims=(
            Claim(name="BlockPilot 1", text="Drafts of whole blocks in one pass speed up decoding."),
            Claim(
                name="BlockPilot 2",
                text="The best block size differs from prompt to prompt, so that choosing it is worth having.",
            ),
            Claim(
                name="BlockPilot 3",
                text="The best size can be predicted from the logits at the end of the prompt.",
            ),
            Claim(name="BlockPilot 4", text="The prediction costs nothing to speak of."),
        ),
        others={"beyond BlockPilot": "Beyond the paper on BlockPilot"},
        recipes=("blockpilot",),
    ),
    Paper(
        title="FIRP",
        claims=(
            Claim(
                name="FIRP 1",
                text="A matrix for each step makes hidden states of future tokens inside the network, so that one pass "
                "gives several drafts.",
                beyond_reach=(
                    "The speedups of 1.9 to 2.8 are those of models of 7B and 13B on GPUs, where a pass over 16 to 63 "
                    "nodes and their pseudo states costs hardly more than a pass over one token.",
                ),
            ),
            Claim(name="FIRP 2", text="It accepts more than Medusa heads, and than heads on states of middle layers."),
            Claim(
                name="FIRP 3",
                text="Low and middle layers do equally well as places to enter pseudo states, high layers do not.",
            ),
            Claim(name="FIRP 4", text="Pseudo states of later steps gain from seeing those of earlier steps."),
            Claim(name="FIRP 5", text="Pseudo states become more and more like the real ones on their way up."),
            Claim(name="trees", text="Trees of drafts beat chains at equal verified positions."),
        ),
        others={"beyond FIRP": "Beyond the paper on FIRP"},
        recipes=("firp", "trees"),
    ),
    Paper(
        title="PIPO",
        claims=(
            Claim(
                name="PIPO 1",
                text="On-policy distillation improves on SFT, at an equal number of pairs and of tokens.",
            ),
            Claim(name="PIPO 2", text="The confidence beats a random gate that keeps as many drafts."),
            Claim(
                name="PIPO 3",
                text="Pairs take fewer passes at little loss of accuracy: here 1.5 tokens a pair at a reward of .25.",
                beyond_reach=(
                    "Sizes (2.07 times the tokens a second, accuracy on AIME and LiveCodeBench) are those of 4B and 9B "
                    "models on GPUs, trained on 34 thousand questions.",
                ),
            ),
            Claim(name="PIPO 4", text="The first token comes sooner: half as many positions are read."),
        ),
        others={"beyond PIPO": "Beyond the paper on PIPO"},
        recipes=("pipo",),
    ),
    Paper(
        title="The certificate of exactness",
        claims=(
            Claim(
                name="certificate 1",
                text="The black box, which sees tokens and log-probs, finds planted faults within the project's bars.",
            ),
            Claim(name="certificate 2", text="The white box finds those that hardly reach the tokens."),
            Claim(name="certificate 3", text="Engines without a fault raise no alarm, nor do bad draft heads."),
            Claim(name="certificate 4", text="What was found is named rightly."),
        ),
        others={"beyond the certificate": "Beyond the certificate"},
        recipes=("certificate",),
    ),
    Paper(
        title="The frontier of all systems",
        claims=(
            Claim(
                name="frontier 1",
                text="Tokens of every system are as far from the target's distribution as is promised: exact ones not "
                "at all, the planted rule and PAD by what is computed.",
            ),
            Claim(
                name="frontier 2",
                text="Where a draft is tested, a point of acceptance costs a point of total variation.",
            ),
            Claim(
                name="frontier 3",
                text="It matters where the error is spent: PAD keeps better drafts than chance at equal total "
                "variation.",
            ),
            Claim(name="frontier 4", text="Error buys speed: the fastest arm is an inexact one."),
        ),
        others={"beyond the frontier": "Beyond the frontier"},
        recipes=("frontier",),
    ),
)


REAL_STAGES = ("corpus", "states", "fused", "heads", "evaluation")  # what the studies on a real model share
REAL_STUDIES = tuple(study for paper in PAPERS for study in paper.real)
RECIPES = tuple(study for paper in PAPERS for study in paper.recipes)  # on the built-in model


def model_of(study: str) -> str:
    """Which of ``MODELS`` a study is about."""
    return REAL if study in REAL_STUDIES else BUILT_IN


def owner(study: str) -> Paper:
    """The paper that a study belongs to. A study of no paper counts as one of the first."""
    return next((paper for paper in PAPERS if study in (*paper.recipes, *paper.real)), PAPERS[0])


def heading(study: str, claim: str) -> str:
    """Under which claim or heading a finding of a study stands: what it names, or what goes beyond its paper."""
    if claim != "beyond" and any(claim in (*p.others, *(c.name for c in p.claims)) for p in PAPERS):
        return claim
    return [*owner(study).others][-1]

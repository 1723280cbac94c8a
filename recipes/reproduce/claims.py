"""The papers whose claims the recipes test, and the headings of ``RESULTS.md``. A new claim is one more ``Claim``."""

from collections.abc import Mapping
from dataclasses import dataclass

REAL, BUILT_IN = "SmolLM2", "built-in"
# The models that studies are about, in the order of verdicts on a page.
MODELS = {REAL: "SmolLM2-135M-Instruct", BUILT_IN: "the built-in model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of a paper; rules refer to it by ``name`` (``Rule.claim``)."""

    name: str
    text: str
    paper: str = ""  # where the paper makes it: models, entropy, bars; empty: the claim is ours
    here: str = ""  # where this project tests it: models, entropy, bars
    decides: str = ""  # an experiment that would settle the open part
    beyond_reach: tuple[str, ...] = ()  # parts that no recipe can test, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Paper:
    """A paper, or a subject of this project without one, and its claims."""

    title: str
    reference: str  # authors, title and number of the paper; empty: there is none
    claims: tuple[Claim, ...]
    others: Mapping[str, str]  # other values of ``Rule.claim`` -> headings; the last is for findings beyond the paper
    recipes: tuple[str, ...]  # studies on the built-in model, in order, with their findings beyond the paper
    real: tuple[str, ...] = ()  # studies on a real model, in order; "real.rl" is in the folder real/rl


PAPERS = (
    Paper(
        title="Bebop",
        reference="*Breaking Entropy Bounds: Accelerating RL Training via MTP with Rejection Sampling* (Li et "
        "al., arXiv 2606.12370)",
        claims=(
            Claim(
                name="C1",
                text="Acceptance falls linearly with policy entropy, for greedy drafts and for sampled drafts of "
                "a head trained by cross-entropy.",
                paper="35B-A3B and larger, heads that accept 65 to 90 % of three drafts, policies of .1 to "
                ".5 nats; lines over the steps of RL.",
                here="SmolLM2 at .35 nats (real_regime) and at .64 to 4.88, built-in model at about .2; over "
                "temperatures, prompts and tokens, and over few steps of RL.",
                decides="Heads that accept as much as the paper's, during RL.",
            ),
            Claim(
                name="C2",
                text="Rejection sampling (sampled drafts) beats target-only verification (greedy drafts).",
                paper="Means of 24 pairs of model and task; drafts are sampled in 23 of them.",
                here="SmolLM2 at .35 (real_regime) and 2.65 nats, the built-in model at about .2; by token, kind of "
                "prompt and temperature, and tokens per second of a processor.",
                decides="Heads that accept as much as the paper's; tokens per second on a GPU.",
            ),
            Claim(
                name="C3",
                text="Training the head on total variation, end to end over several steps, raises acceptance under "
                "rejection sampling and removes most of its dependence on entropy.",
                paper="35B-A3B, heads of cross-entropy at 65 to 90 % (three drafts): end-to-end TV adds 2.3"
                " to 8.0 points, target-only acceptance moves by less than .3.",
                here="One layer on SmolLM2: a million tokens at .35 nats, 29 % of three drafts accepted (real_regime), "
                "and 207,457 tokens at 2.65 nats; the built-in model.",
                decides="Ten million tokens (real_regime's form for a GPU), more seeds, heads of the paper's size.",
            ),
            Claim(
                name="C4",
                text="Drift of the policy's weights contributes almost nothing, so one adaptation before RL is enough.",
                paper="Reasoning and agentic RL; Eq. 16 over steps of RL. Its Limitations advise co-"
                "training where entropy leaves the range of the training.",
                here="SmolLM2: 60 steps, entropy from 3.0 to 1.1 and from 3.1 to 4.1 nats, accept length "
                "of the soft-CE head 1.86 to 1.70 and 1.86 to 1.80.",
                decides="Longer runs with more answers a step: the residual of Eq. 16 is undecided in both directions.",
            ),
            Claim(
                name="C5",
                text="End-to-end asynchronous RL up to 1.8 times as fast (rollouts 2.4 times), about 10 % relative "
                "gain in acceptance, up to 25 % more throughput.",
                paper="Large models on GPUs: asynchronous RL up to 1.8, rollouts 2.4 times as fast.",
                here="Two cores of a processor. On SmolLM2 rollouts are .23 of a step, so that free ones "
                "would make it 1.30 times as fast.",
                decides="A GPU: the commands are in benchmarks/gpu/NEXT.md.",
                beyond_reach=(
                    "The sizes 1.8 (end-to-end RL) and 2.4 (rollouts) are of large models on GPUs: a few tokens cost "
                    "hardly more than one there.",
                ),
            ),
        ),
        others={"Fig 14b": "Further findings of the paper", "beyond": "Beyond the paper"},
        recipes=(
            "objectives",
            "budget",
            "temperature",
            "boundary",
            "top_k",
            "drift",
            "throughput",
            "async_steps",
            "beyond",
        ),
        real=(
            "real_entropy",
            "real_drafts",
            "real_losses",
            "real_pays",
            "real_pays_gpu",
            "real_steps",
            "real_regime",
            "real.rl",
        ),
    ),
    Paper(
        title="PAD",
        reference="*Reject Only Critical Tokens: Pivot-Aware Speculative Decoding* (Ziashahabi et al., arXiv "
        "2511.00351)",
        claims=(
            Claim(
                name="PAD 1",
                text="A classifier on the target's hidden state tells pivot tokens from others.",
                paper="Qwen3-8B with a separate .6B draft model; ROC well above chance.",
                here="The built-in model with its own head, and with sharpened drafts.",
                decides="A separate draft model on a real task.",
            ),
            Claim(
                name="PAD 2",
                text="Keeping the rejected drafts that it finds harmless raises acceptance while accuracy is kept.",
                paper="Qwen3-8B and a .6B draft model, GSM8K, MBPP and AIME24: up to 2.5 times as fast as "
                "plain decoding, accuracy roughly kept.",
                here="The built-in model; a quarter of a token and .05 of utility, which are bars of ours.",
                decides="A task where many rejected drafts are harmless, and a separate draft model.",
                beyond_reach=(
                    "The speedup of 2.5 is of an 8B target and a .6B draft model on a GPU; here a few tokens cost more "
                    "than one.",
                ),
            ),
            Claim(
                name="PAD 3",
                text="It matters which rejected drafts are kept, not only how many.",
                paper="Not in the paper, which has no random control.",
                here="The built-in model.",
                decides="The same on a real task.",
            ),
            Claim(
                name="PAD 4",
                text="Log-probs of the distribution that was really emitted make PAD usable in RL (ours).",
            ),
        ),
        others={"beyond PAD": "Beyond the paper on PAD"},
        recipes=("pad", "pad_training"),
        real=("real_systems",),
    ),
    Paper(
        title="BlockPilot",
        reference="*BlockPilot: Instance-Adaptive Policy Learning for Diffusion-based Speculative Decoding* "
        "(Zhang et al., arXiv 2606.31315)",
        claims=(
            Claim(
                name="BlockPilot 1",
                text="Drafts of whole blocks in one pass speed up decoding.",
                paper="Qwen3-4B and 8B on a GPU: 3.5 to 4.7 times as fast as plain decoding.",
                here="The built-in model on a processor, one request.",
                decides="A GPU.",
            ),
            Claim(
                name="BlockPilot 2",
                text="The best block size differs from prompt to prompt, so that choosing it is worth having.",
                paper="Qwen3-4B: 6.59 tokens a cycle against 6.31 with blocks of 16.",
                here="SmolLM2, 40 prompts; the built-in model, 60 a seed, where noise gives an oracle as much.",
                decides="Hundreds of prompts, several answers each.",
            ),
            Claim(
                name="BlockPilot 3",
                text="The best size can be predicted from the logits at the end of the prompt.",
                paper="The released choices are the best size of all 64 samples, which is no held-out test.",
                here="Held-out prompts: SmolLM2, 510 others to learn from, and the built-in model.",
                decides="A drafter as good as the paper's, prompts as different.",
            ),
            Claim(
                name="BlockPilot 4",
                text="The prediction costs nothing to speak of.",
                paper="7.3 ms beside a pass of 183 to 278 ms.",
                here="The built-in model.",
                decides="Nothing is open.",
            ),
        ),
        others={"beyond BlockPilot": "Beyond the paper on BlockPilot"},
        recipes=("blockpilot",),
        real=("real_systems",),
    ),
    Paper(
        title="FIRP",
        reference="*FIRP: Faster LLM inference via future intermediate representation prediction* (Wu et al., "
        "arXiv 2410.20488)",
        claims=(
            Claim(
                name="FIRP 1",
                text="A matrix for each step makes hidden states of future tokens inside the network, so that one pass "
                "gives several drafts.",
                paper="7B and 13B chat models: 2.4 to 2.6 tokens a cycle with 16 to 63 nodes.",
                here="SmolLM2, 16 nodes, and the built-in model; 1.7 and 1.3 tokens are bars of ours.",
                decides="A model of the paper's size.",
                beyond_reach=(
                    "The speedups of 1.9 to 2.8 are of 7B and 13B models on GPUs: 16 to 63 nodes cost hardly more than "
                    "one token there.",
                ),
            ),
            Claim(
                name="FIRP 2",
                text="It accepts more than Medusa heads, and than heads on states of middle layers.",
                paper="2.36 to 2.62 tokens a cycle against 1.85 to 2.00 of Medusa heads.",
                here="SmolLM2 and the built-in model, equal answers and updates.",
                decides="A model of the paper's size.",
            ),
            Claim(
                name="FIRP 3",
                text="Low and middle layers do equally well as places to enter pseudo states, high layers do not.",
                paper="Accuracy is flat from low to middle layers and falls at high ones.",
                here="SmolLM2, 30 layers, a bar of ours; the built-in model, twelve layers.",
                decides="More seeds.",
            ),
            Claim(
                name="FIRP 4",
                text="Pseudo states of later steps gain from seeing those of earlier steps.",
                paper="Without them accuracy is lower.",
                here="The built-in model.",
                decides="A task where a draft depends on the one before.",
            ),
            Claim(
                name="FIRP 5",
                text="Pseudo states become more and more like the real ones on their way up.",
                paper="The cosine rises with the layer.",
                here="The built-in model.",
                decides="Nothing is open.",
            ),
            Claim(name="trees", text="Trees of drafts beat chains at equal verified positions."),
        ),
        others={"beyond FIRP": "Beyond the paper on FIRP"},
        recipes=("firp", "trees"),
        real=("real_systems",),
    ),
    Paper(
        title="PIPO",
        reference="*Pair-In, Pair-Out: Latent Multi-Token Prediction for Efficient LLMs* (Tan et al., arXiv "
        "2605.27255)",
        claims=(
            Claim(
                name="PIPO 1",
                text="On-policy distillation improves on SFT, at an equal number of pairs and of tokens.",
                paper="A stronger teacher; 4B: average of four 45.3 to 46.5, 9B: 51.2 to 57.3.",
                here="SmolLM2: 12 layers learn from all 30. The built-in model: the teacher is the policy itself, "
                "rolled out at tau .5. With 35 % of the drafts dropped OPD has .164 and SFT .312 of reward; with none "
                "dropped OPD .377 and SFT .269.",
                decides="Models of the paper's size.",
            ),
            Claim(
                name="PIPO 2",
                text="The confidence beats a random gate that keeps as many drafts.",
                paper="At every pad ratio between the ends.",
                here="The built-in model, one pad ratio.",
                decides="More answers.",
            ),
            Claim(
                name="PIPO 3",
                text="Pairs take fewer passes at little loss of accuracy: here 1.5 tokens a pair at a reward of .25.",
                paper="4B and 9B models: 2.07 times the tokens a second.",
                here="The built-in model; 1.5 tokens and a reward of .25 are bars of ours.",
                decides="A real model.",
                beyond_reach=(
                    "Sizes (2.07 times the tokens a second, accuracy on AIME and LiveCodeBench) are of 4B and 9B "
                    "models on GPUs.",
                ),
            ),
            Claim(
                name="PIPO 4",
                text="The first token comes sooner: half as many positions are read.",
                paper="Up to 2.64 times as fast to the first token.",
                here="The built-in model, 1,024 tokens.",
                decides="A real model on a GPU.",
            ),
        ),
        others={"beyond PIPO": "Beyond the paper on PIPO"},
        recipes=("pipo",),
        real=("real_systems",),
    ),
    Paper(
        title="The certificate of exactness",
        reference="",
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
        reference="",
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


REAL_STAGES = ("corpus", "states", "fused", "heads", "evaluation")  # stages that the studies on a real model share
# A study about several papers is listed once.
REAL_STUDIES = tuple(dict.fromkeys(study for paper in PAPERS for study in paper.real))
RECIPES = tuple(study for paper in PAPERS for study in paper.recipes)  # on the built-in model


def model_of(study: str) -> str:
    """Return the model that a study is about, a key of ``MODELS``."""
    return REAL if study in REAL_STUDIES else BUILT_IN


def owner(study: str) -> Paper:
    """Return the paper that a study belongs to; a study of no paper belongs to the first one."""
    return next((paper for paper in PAPERS if study in (*paper.recipes, *paper.real)), PAPERS[0])


def heading(study: str, claim: str) -> str:
    """Return the claim or heading that lists a finding: the claim that it names, or "beyond" of its study's paper."""
    if claim != "beyond" and any(claim in (*p.others, *(c.name for c in p.claims)) for p in PAPERS):
        return claim
    return [*owner(study).others][-1]

"""The rules of README.md. Arms are compared at 35 % of the drafts dropped, on the seed's questions."""

from recipes.reproduce.verdicts import Need, Part, Rule

TOKENS = 1.5  # the project's bars: tokens a pair, reward, speed of the first token
REWARD = 0.25
FASTER = 1.5
ENOUGH = 10_000  # answers in which no PAD may be
NONE = 0.5  # PADs that count as none
APART = 0.1  # pad ratios that differ by more are not compared
CALIBRATED = 0.05  # confidence that counts as right on average


def one(claim: str, statement: str, text: str, evidence: str, *parts: Part, needs: tuple[Need, ...] = ()) -> Rule:
    """Return a rule all of whose parts have to hold."""
    return Rule(claim=claim, statement=statement, text=text, evidence=evidence, any_of=(parts,), needs=needs)


def compared(claim: str, statement: str, arm: str, base: str, budget: str = "whole answers") -> Rule:
    """Return the rule that one arm beats another in reward by more than two runs of one arm differ."""
    return one(
        claim,
        statement,
        "confirmed if the difference in reward lies above 0 by more than the noise of the arms, refuted if below by as "
        "much; tested if the pad ratios do not differ by more than 0.1",
        f"Difference {{{arm} - {base}, {budget}}}: {arm} {{reward {arm}, {budget}}}, {base} {{reward {base}, "
        f"{budget}}}; plain decoding {{reward plain, {budget}}}.",
        Part(number=f"{arm} - {base}, {budget}", arms=(f"reward {arm}, {budget}", f"reward {base}, {budget}")),
        needs=(
            Need(
                number=f"pad ratios apart, {arm} and {base}",
                kind="not above",
                bound=APART,
                otherwise="the gates kept different shares of the drafts",
            ),
        ),
    )


RULES = (
    compared("PIPO 1", "Distillation improves on SFT at an equal number of pairs.", "OPD", "SFT", "equal pairs"),
    compared("PIPO 1", "So it does at an equal number of tokens.", "OPD", "SFT", "equal tokens"),
    compared("PIPO 1", "It improves on SFT that goes on for as many steps.", "OPD", "more SFT"),
    compared("PIPO 1", "It improves on SFT that has gone on for 700 steps.", "OPD of the shipped", "shipped SFT"),
    one(
        "PIPO 2",
        "A gate by confidence gives more reward than a random one that keeps as many drafts.",
        "confirmed if the difference in reward, mean over three gates, lies above 0, refuted if below",
        "Difference {confidence - random}, in total variation to the teacher {variation, confidence - random}; the "
        "pad ratios are {pad ratio of confidence} and {pad ratio of random}.",
        Part(number="confidence - random"),
    ),
    one(
        "PIPO 3",
        "The shipped network emits at least 1.5 tokens a pair at a reward of .25 or more on chain_sum.",
        "confirmed if tokens a pair lie above 1.5 and reward above 0.25, refuted if one of them lies below",
        "{shipped tokens} tokens a pair, reward {shipped reward}; plain decoding {reward plain, whole answers}.",
        Part(number="shipped tokens", bound=TOKENS),
        Part(number="shipped reward", bound=REWARD),
    ),
    one(
        "PIPO 4",
        "The first token of an answer to 1,024 tokens comes at least 1.5 times as fast as with plain decoding.",
        "confirmed if the ratio of processor times lies above 1.5, refuted if below",
        "{first token} times as fast; pairs are half as many positions.",
        Part(number="first token", bound=FASTER),
    ),
    compared(
        "beyond", "A compressor that begins as the sum beats one that begins as noise.", "SFT", "random compressor"
    ),
    compared("beyond", "Training with PADs beats training without.", "SFT", "no PADs in training"),
    one(
        "beyond",
        "After distillation the confidence is right on average.",
        "confirmed if mean confidence less mean acceptance of drafts lies within +-0.05, refuted if outside",
        "Mean difference {confidence less acceptance, OPD}; AUC against acceptance {AUC, OPD}.",
        Part(number="confidence less acceptance, OPD", kind="within", bound=CALIBRATED),
    ),
    one(
        "beyond",
        "After SFT it is biased low, as its target is.",
        "confirmed if mean confidence less mean acceptance lies below 0, refuted if above",
        "Mean difference {confidence less acceptance, SFT}; AUC against acceptance {AUC, SFT}.",
        Part(number="confidence less acceptance, SFT", kind="below"),
    ),
    one(
        "beyond",
        "PAD is never emitted.",
        "confirmed if no answer holds one, refuted if any does; tested with 10,000 answers or more",
        "{pads} PADs in {answers} answers.",
        Part(number="pads", kind="below", bound=NONE),
        needs=(Need(number="answers", kind="above", bound=ENOUGH, otherwise="too few answers"),),
    ),
)

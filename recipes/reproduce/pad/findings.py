"""The rules of README.md. Numbers are named by drafter, then quantity."""

from recipes.reproduce.verdicts import Need, Part, Rule

CHANCE = 0.6  # AUC that counts as well above chance
GAIN = 0.25  # accepted tokens
LOSS = 0.05  # utility: the share of answers that succeed
COLLAPSE = 0.25  # of the utility of plain rejection sampling
RATES = (0.8, 1.25)  # how far the rate of a control may be from the classifier's
WORDS = {"head": "drafts of the head", "skewed": "sharpened drafts"}


def told(drafter: str) -> Rule:
    """Return the rule of PAD 1 on the area under the curve."""
    return Rule(
        claim="PAD 1",
        statement=f"The classifier tells pivots from other rejected tokens well above chance, {WORDS[drafter]}.",
        text="confirmed if the AUC on test prompts lies above 0.6, refuted if below",
        evidence=f"AUC {{AUC {drafter}}}.",
        any_of=((Part(number=f"AUC {drafter}", bound=CHANCE),),),
    )


def kept(drafter: str) -> Rule:
    """Return the rule of PAD 2 at the tau that validation prompts chose."""
    return Rule(
        claim="PAD 2",
        statement="At the tau chosen on validation prompts a quarter of a token more is accepted and utility falls by "
        f"less than 0.05, {WORDS[drafter]}.",
        text="confirmed if accept length rises by more than 0.25 and the change in utility lies above -0.05, refuted "
        "if one of them lies below its bound",
        evidence=f"Accept length {{{drafter}, length change}}, utility {{{drafter}, utility change}} (plain rejection "
        f"sampling: {{{drafter}, utility plain}}); tau by seed: {{{drafter}, taus}}.",
        any_of=(
            (
                Part(number=f"{drafter}, length change", bound=GAIN),
                Part(number=f"{drafter}, utility change", bound=-LOSS),
            ),
        ),
    )


def same_rate(drafter: str, name: str) -> tuple[Need, Need]:
    """Require that a control overrides about as often as the classifier, within ``RATES``."""
    number, words = f"{drafter}, {name}, rate ratio", "it does not override at the rate of the classifier"
    return (
        Need(number=number, kind="not below", bound=RATES[0], otherwise=words),
        Need(number=number, kind="not above", bound=RATES[1], otherwise=words),
    )


def by_chance(drafter: str) -> Rule:
    """Return the rule of PAD 3 on random overrides, a control that the paper lacks."""
    return Rule(
        claim="PAD 3",
        statement=f"Overriding as many drafts at random loses 0.05 more utility than the classifier, {WORDS[drafter]}.",
        text="confirmed if utility with the classifier less utility with random overrides lies above 0.05, refuted if "
        "below",
        evidence=f"Difference {{{drafter}, classifier - random}} at tau {{{drafter}, compared taus}}, where utility "
        f"changes by {{{drafter}, compared, change}} and accept length by {{{drafter}, compared, length change}}; "
        f"random against plain {{{drafter}, random, change}}, override rate {{{drafter}, random, rate ratio}} of the "
        "classifier's.",
        any_of=((Part(number=f"{drafter}, classifier - random", bound=LOSS),),),
        needs=same_rate(drafter, "random"),
    )


def turned_round(drafter: str) -> Rule:
    """Return the rule of PAD 3 on the inverted classifier, which overrides the wrong drafts."""
    return Rule(
        claim="PAD 3",
        statement=f"With the classifier turned round, utility collapses at the same rate, {WORDS[drafter]}.",
        text="confirmed if more than a quarter of the utility of plain rejection sampling is lost, refuted if less",
        evidence=f"Share lost {{{drafter}, inverted, share lost}}; against the classifier "
        f"{{{drafter}, classifier - inverted}}, override rate {{{drafter}, inverted, rate ratio}} of its.",
        any_of=((Part(number=f"{drafter}, inverted, share lost", bound=COLLAPSE),),),
        needs=same_rate(drafter, "inverted"),
    )


def over_probability(drafter: str) -> Rule:
    """Return the rule that asks if a classifier is needed at all."""
    return Rule(
        claim="beyond",
        statement="The classifier keeps more utility than overriding the likeliest drafts at the same rate, "
        f"{WORDS[drafter]}.",
        text="confirmed if the difference in utility lies above 0, refuted if below",
        evidence=f"Difference {{{drafter}, classifier - probability}}; accept length of the probability rule "
        f"{{{drafter}, probability, length change}}, of the classifier {{{drafter}, compared, length change}}; against "
        f"the entropy rule {{{drafter}, classifier - entropy}}.",
        any_of=((Part(number=f"{drafter}, classifier - probability"),),),
        needs=same_rate(drafter, "probability"),
    )


RULES = (
    told("head"),
    told("skewed"),
    Rule(
        claim="PAD 1",
        statement="The hidden state says more than the probability of the token and the target's entropy, drafts of "
        "the head.",
        text="confirmed if the AUC with all features less that without the hidden state lies above 0, refuted if below",
        evidence="Difference {AUC all - scalars}.",
        any_of=((Part(number="AUC all - scalars"),),),
    ),
    *(kept(drafter) for drafter in WORDS),
    *(by_chance(drafter) for drafter in WORDS),
    *(turned_round(drafter) for drafter in WORDS),
    *(over_probability(drafter) for drafter in WORDS),
)

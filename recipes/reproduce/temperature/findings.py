"""The rules of README.md. Names of numbers: head, drafts, over what."""

from recipes.reproduce.verdicts import Need, Part, Rule

STRAIGHT = 0.9  # R squared above which a relation is called linear
LOSSES = ("e2e_tv", "tv", "nla", "rkl")  # what could flatten the slope of cross-entropy
WHERE = {
    "temperatures": "over temperatures",
    "tokens": "between tokens at temperature 1",
    "answers": "between answers at temperature 1",
}


def falls(drafts: str, way: str) -> Rule:
    """C1 for one kind of draft."""
    where = "over temperatures" if way == "temperatures" else "from token to token at temperature 1"
    return Rule(
        claim="C1",
        statement=f"Acceptance of {drafts} drafts of a cross-entropy head falls with the target's entropy, {where}.",
        text="confirmed if the slope lies below 0, refuted if above",
        evidence=f"Slope {{ce, {drafts}, {way}}} per nat with ce, {{hard_ce, {drafts}, {way}}} with hard_ce.",
        any_of=((Part(number=f"ce, {drafts}, {way}", kind="below"),),),
    )


def linear(drafts: str) -> Rule:
    """C1: linearly."""
    return Rule(
        claim="C1",
        statement=f"With {drafts} drafts it does so linearly over temperatures.",
        text="confirmed if R squared lies above 0.9, refuted if below",
        evidence=f"R squared {{R squared, {drafts}}} over the temperatures, head ce.",
        any_of=((Part(number=f"R squared, {drafts}", bound=STRAIGHT),),),
    )


def rise(head: str, base: str, way: str) -> Part:
    """The slope of one head minus that of another."""
    return Part(number=f"{head} - {base}, {way}", arms=(f"{head}, sampled, {way}", f"{base}, sampled, {way}"))


def flattens(base: str, way: str) -> Rule:
    """The second half of C3."""
    return Rule(
        claim="C3",
        statement=f"End-to-end TV takes entropy dependence from sampled drafts: flatter than {base}, {WHERE[way]}.",
        text="confirmed if the difference of slopes lies above 0 by more than the noise of the arms, refuted if below "
        f"by as much; tested if {base} falls at all",
        evidence=f"Slope {{e2e_tv, sampled, {way}}} per nat against {{{base}, sampled, {way}}}: difference "
        f"{{e2e_tv - {base}, {way}}}.",
        any_of=((rise("e2e_tv", base, way),),),
        needs=(Need(number=f"{base}, sampled, {way}", kind="below", otherwise=f"{base} does not fall"),),
    )


RULES = (
    falls("greedy", "temperatures"),
    falls("greedy", "tokens"),
    falls("sampled", "temperatures"),
    falls("sampled", "tokens"),
    linear("greedy"),
    linear("sampled"),
    flattens("ce", "temperatures"),
    flattens("ce", "tokens"),
    flattens("ce", "answers"),
    flattens("hard_ce", "temperatures"),
    Rule(
        claim="beyond",
        statement="Some loss flattens the slope of soft cross-entropy.",
        text="confirmed if the difference of slopes lies above 0 by more than the noise of the arms for one loss, over "
        "temperatures and over tokens (corrected for four losses); refuted if it lies below 0 by as much for all of "
        "them in both",
        evidence="Slope minus that of ce, over temperatures and over tokens: "
        + "; ".join(f"{loss}: {{{loss} - ce, temperatures}}, {{{loss} - ce, tokens}}" for loss in LOSSES)
        + ".",
        any_of=tuple((rise(loss, "ce", "temperatures"), rise(loss, "ce", "tokens")) for loss in LOSSES),
    ),
)

"""The rules of README.md as functions of intervals."""

from collections.abc import Mapping

from bebop.intervals import Interval
from recipes.common.record import Finding, Verdict, verdict

STRAIGHT = 0.9  # R squared above which a relation is called linear
LOSSES = ("e2e_tv", "tv", "nla", "rkl")  # what could flatten the slope of cross-entropy
Slopes = Mapping[tuple[str, str, str], Interval]  # (head, drafts, over what) -> slope
Rises = Mapping[tuple[str, str, str], Interval]  # (head, baseline, over what) -> difference of slopes


def below_zero(interval: Interval) -> Verdict:
    """Confirmed if the whole interval is negative, refuted if positive."""
    return verdict(Interval(-interval.value, -interval.high, -interval.low))


def flatter(rise: Interval, base: Interval) -> Verdict:
    """Whether a slope is flatter than one that falls: confirmed if it is less negative by an interval above 0.

    Refuted if it is more negative. Where the base does not fall there is nothing to flatten: never confirmed.
    """
    found = verdict(rise)
    return "undecided" if found == "confirmed" and base.high >= 0 else found


def any_flatter(rises: Rises) -> Verdict:
    """Confirmed if some loss has a flatter slope than soft cross-entropy over temperatures and over tokens alike.

    Refuted if every loss has a steeper one in both; the intervals are not corrected for the number of losses.
    """
    ways = ("temperatures", "tokens")
    found = [[rises[loss, "ce", way] for way in ways] for loss in LOSSES]
    if any(all(i.low > 0 for i in pair) for pair in found):
        return "confirmed"
    return "refuted" if all(i.high < 0 for pair in found for i in pair) else "undecided"


def judge(slopes: Slopes, straight: Mapping[str, Interval], rises: Rises) -> list[Finding]:
    """Every finding, in the order of README.md."""
    found = [falls(slopes, drafts, way) for drafts in ("greedy", "sampled") for way in ("temperatures", "tokens")]
    found += [linear(straight, drafts) for drafts in ("greedy", "sampled")]
    found += [flattens(slopes, rises, "ce", way) for way in ("temperatures", "tokens", "answers")]
    found.append(flattens(slopes, rises, "hard_ce", "temperatures"))
    told = "; ".join(f"{x}: {rises[x, 'ce', 'temperatures']}, {rises[x, 'ce', 'tokens']}" for x in LOSSES)
    return [
        *found,
        Finding(
            claim="beyond",
            statement="Some loss flattens the slope of soft cross-entropy.",
            rule="confirmed if the difference of slopes lies above 0 for one loss over temperatures and over tokens; "
            "refuted if it lies below 0 for all of them in both",
            verdict=any_flatter(rises),
            evidence=f"Slope minus that of ce, over temperatures and over tokens: {told}.",
        ),
    ]


def falls(slopes: Slopes, drafts: str, way: str) -> Finding:
    """C1 for one kind of draft."""
    soft, hard = slopes["ce", drafts, way], slopes["hard_ce", drafts, way]
    where = "over temperatures" if way == "temperatures" else "from token to token at temperature 1"
    return Finding(
        claim="C1",
        statement=f"Acceptance of {drafts} drafts of a cross-entropy head falls with the target's entropy, {where}.",
        rule="confirmed if the slope lies below 0, refuted if above",
        verdict=below_zero(soft),
        evidence=f"Slope {soft} per nat with ce, {hard} with hard_ce.",
    )


def linear(straight: Mapping[str, Interval], drafts: str) -> Finding:
    """C1: linearly."""
    return Finding(
        claim="C1",
        statement=f"With {drafts} drafts it does so linearly over temperatures.",
        rule=f"confirmed if R squared lies above {STRAIGHT}, refuted if below",
        verdict=verdict(straight[drafts], STRAIGHT),
        evidence=f"R squared {straight[drafts]} over the temperatures, head ce.",
    )


def flattens(slopes: Slopes, rises: Rises, base: str, way: str) -> Finding:
    """The second half of C3."""
    own, other, rise = slopes["e2e_tv", "sampled", way], slopes[base, "sampled", way], rises["e2e_tv", base, way]
    where = "over temperatures" if way == "temperatures" else f"between {way} at temperature 1"
    return Finding(
        claim="C3",
        statement=f"End-to-end TV takes entropy dependence from sampled drafts: flatter than {base}, {where}.",
        rule=f"confirmed if {base} falls and the difference of slopes lies above 0; refuted if it lies below 0",
        verdict=flatter(rise, other),
        evidence=f"Slope {own} per nat against {other}: difference {rise}.",
    )

"""The rules of README.md. Directions are the intended ones of the runs: falling and rising entropy."""

from recipes.reproduce.verdicts import Need, Part, Rule

MISMATCH = 0.01  # acceptance within which a mismatch counts as 0
ROSE = Need(
    number="entropy change, rising",
    kind="above",
    otherwise="the runs whose entropy was to rise did not (change in nats)",
)
FELL = Need(
    number="entropy change, falling", kind="below", otherwise="entropy was to fall and did not (change in nats)"
)
CONVERGED = Need(
    number="tv updates - frozen",
    kind="not above",
    otherwise="the head had not converged before RL: going on with its own objective makes it better (tokens)",
)


def still(direction: str, need: Need) -> Rule:
    """Return a rule: drift of the weights costs nothing, in one direction of entropy."""
    return Rule(
        claim="C4",
        statement=f"Drift of the weights costs almost nothing while entropy is {direction}: direct mismatch on fixed "
        "contexts is 0.",
        text=f"confirmed if it lies within +-0.01, refuted if outside; tested if entropy is {direction}",
        evidence=f"{{mismatch, {direction}}} (overlap at step 1, e2e_tv head).",
        any_of=((Part(number=f"mismatch, {direction}", kind="within", bound=MISMATCH),),),
        needs=(need,),
    )


RULES = (
    Rule(
        claim="C1",
        statement="Acceptance of greedy drafts (TO + CE head) falls as entropy rises during RL.",
        text="confirmed if the slope over the looks of both directions lies below 0, refuted if above; tested if the "
        "directions are two",
        evidence="Slope {slope TO + hard_ce} tokens per nat.",
        any_of=((Part(number="slope TO + hard_ce", kind="below"),),),
        needs=(FELL, ROSE),
    ),
    Rule(
        claim="C1",
        statement="So does that of sampled drafts with a head trained by cross-entropy (RS + CE).",
        text="confirmed if the slope over the looks of both directions lies below 0, refuted if above; tested if the "
        "directions are two",
        evidence="Slope {slope RS + hard_ce} tokens per nat; soft labels {slope RS + ce}.",
        any_of=((Part(number="slope RS + hard_ce", kind="below"),),),
        needs=(FELL, ROSE),
    ),
    Rule(
        claim="C3",
        statement="End-to-end TV removes most of that dependence: its slope is flatter.",
        text="confirmed if the slope of e2e_tv minus that of ce lies above 0 by more than the noise of the arms, "
        "refuted if below by as much; tested if the directions are two",
        evidence="Difference {slope e2e_tv - ce} tokens per nat.",
        any_of=((Part(number="slope e2e_tv - ce", arms=("slope RS + e2e_tv", "slope RS + ce")),),),
        needs=(FELL, ROSE),
    ),
    still("falling", FELL),
    still("rising", ROSE),
    Rule(
        claim="C4",
        statement="Updating a TV head by cross-entropy during RL makes it worse than leaving it alone.",
        text="confirmed if the change against the frozen head lies below 0 at the end by more than the noise of the "
        "arms, refuted if above by as much; tested if the head had converged, so that its own objective adds nothing",
        evidence="{ce updates - frozen} tokens; with TV updates instead {tv updates - frozen}.",
        any_of=(
            (
                Part(
                    number="ce updates - frozen",
                    kind="below",
                    arms=("end RS + tv, falling", "end RS + tv, ce updates, falling"),
                ),
            ),
        ),
        needs=(CONVERGED,),
    ),
)

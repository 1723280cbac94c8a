"""The rules of README.md. ``analysis.py`` computes the counts and chooses the compared systems."""

from recipes.reproduce.verdicts import Part, Rule

BATCHES = (1, 32)
NONE = 0.5  # a count below this is 0
EXACT = 0.005  # largest total variation that an exact system may show; the planted rule at epsilon .02 has as much
LANDS = {"planted": 0.1, "pad": 0.15}  # largest distance from 1 of the slope of sampled on computed total variation
SLOPE = {"planted": 0.15, "pad": 0.2}  # the same of acceptance gained on total variation spent
POWER = 0.02  # least total variation that must be measured for the strongest planted rule
ABOUT = {"planted": "the planted rule", "pad": "PAD"}


def none(number: str, statement: str, text: str, evidence: str) -> Rule:
    """Return a rule: no arm differs, at a family-wise level."""
    return Rule(
        claim="frontier 1",
        statement=statement,
        text=text,
        evidence=evidence,
        any_of=((Part(number=number, kind="below", bound=NONE),),),
    )


def lands(family: str) -> Rule:
    """Return a rule: the sampled total variation is the computed one."""
    power = (Part(number="planted, strongest", bound=POWER),) if family == "planted" else ()
    asked = f", and the strongest is seen to be above {POWER:g}" if power else ""
    told = " Strongest: {planted, strongest}." if power else ""
    return Rule(
        claim="frontier 1",
        statement=f"Over all settings of {ABOUT[family]} sampled total variation rises as the computed one does.",
        text=f"confirmed if the slope through 0 lies within {LANDS[family]:g} of 1{asked}; refuted if it lies outside",
        evidence=f"Slope less 1: {{{family}, sampled on computed}}.{told}",
        any_of=((Part(number=f"{family}, sampled on computed", kind="within", bound=LANDS[family]), *power),),
    )


def gain(family: str) -> Rule:
    """Return a rule: acceptance gained equals total variation spent (SPEC 4.4)."""
    return Rule(
        claim="frontier 2",
        statement=f"Where {ABOUT[family]} tests a draft, a point of acceptance gained is a point of total variation.",
        text=f"confirmed if the slope of acceptance beyond the overlap on computed total variation, both a tested "
        f"draft and through 0, lies within {SLOPE[family]:g} of 1; refuted if it lies outside",
        evidence=f"Slope less 1: {{{family}, gained on spent}}.",
        any_of=((Part(number=f"{family}, gained on spent", kind="within", bound=SLOPE[family]),),),
    )


def faster(batch: int, cheap: bool) -> Rule:
    """Return a rule: the fastest system is an inexact one."""
    which = "An inexact arm within .05 of plain's right answers" if cheap else "Some inexact arm"
    among = "cheap" if cheap else "inexact"
    return Rule(
        claim="frontier 4",
        statement=f"{which} is faster than every exact one at batch {batch}.",
        text="confirmed if the ratio of the fastest of both kinds lies above 1, refuted if below",
        evidence=f"Ratio less 1: {{{among} over exact, batch {batch}}}; {{fastest {among}, batch {batch}}} against "
        f"{{fastest exact, batch {batch}}}.",
        any_of=((Part(number=f"{among} over exact, batch {batch}"),),),
    )


RULES = (
    none(
        "exact arms that differ",
        "No exact system's tokens differ from the target's.",
        "confirmed if no exact arm's sampled total variation differs from 0 (Holm over the exact arms, level .05), "
        "refuted if one does",
        "{exact arms that differ, which} of {exact arms}; smallest p, corrected: {smallest p, exact}.",
    ),
    Rule(
        claim="frontier 1",
        statement="Every exact system's tokens are seen to be close to the target's.",
        text=f"confirmed if the sampled total variation of the arm that reaches farthest lies below {EXACT:g} either "
        "way, refuted if above",
        evidence="Farthest from 0: {farthest exact arm}, by {farthest exact}.",
        any_of=((Part(number="farthest exact", kind="below", bound=EXACT),),),
    ),
    none(
        "planted arms that miss",
        "The planted rule lands at its computed total variation at every epsilon.",
        "confirmed if at no epsilon sampled less computed total variation differs from 0 (Holm over epsilon, level "
        ".05), refuted if it does",
        "{planted arms that miss, which} of {planted arms}; sampled less computed: {planted misses}.",
    ),
    lands("planted"),
    none(
        "pad arms that miss",
        "PAD's sampled total variation is the bias that it computes, at every tau.",
        "confirmed if at no tau sampled less computed total variation differs from 0 (Holm over tau, level .05), "
        "refuted if it does",
        "{pad arms that miss, which} of {pad arms}; sampled less computed: {pad misses}.",
    ),
    lands("pad"),
    gain("planted"),
    gain("pad"),
    Rule(
        claim="frontier 3",
        statement="At equal total variation PAD's answers are right more often than with overrides at random.",
        text="confirmed if the share of right answers, the mean over tau, lies above that of the planted rule "
        "interpolated at the same computed total variation; refuted if below",
        evidence="Difference {pad over planted}; by tau {pad over planted, by tau}.",
        any_of=((Part(number="pad over planted"),),),
    ),
    *(faster(batch, cheap) for cheap in (False, True) for batch in BATCHES),
)

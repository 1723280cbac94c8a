"""The rules of README.md."""

from recipes.reproduce.verdicts import Part, Rule

CLOSE = 0.05  # accepted drafts; an estimator agrees with the counts if it is that close
SMALL = 0.02  # accepted drafts; a smaller bias counts as none
HEADS = ("hard_ce", "e2e_tv")
SOUND = ("drafted paths, unbiased", "text, unbiased, where cycles began")
SHORT = ("mean overlaps multiplied", "overlaps multiplied along drafted paths", "overlaps multiplied along text")
LARGER = "confirmed if the difference lies above 0 by more than the noise of the arms, refuted if below by as much"


def told(name: str) -> str:
    """Return the evidence text: the difference of an estimate from the counts, for each head."""
    return "Difference " + ", ".join(f"{head}: {{{head}, {name}}}" for head in HEADS) + "."


def agrees(name: str) -> Rule:
    """Return a rule: an estimate that should be right agrees with the counts."""
    return Rule(
        claim="beyond",
        statement=f"An estimate of E[A] agrees with the engine's counts: {name}.",
        text="confirmed if the difference lies within 0.05 drafts for every head, refuted if outside for one "
        "(corrected for two)",
        evidence=told(name),
        any_of=(tuple(Part(number=f"{head}, {name}", kind="within", bound=CLOSE) for head in HEADS),),
    )


def shortcut(name: str) -> Rule:
    """Return a rule: an estimate that should be wrong differs from the counts."""
    return Rule(
        claim="beyond",
        statement=f"A shortcut to E[A] is biased: {name}.",
        text="confirmed if the difference is not 0 for every head, refuted if it lies within 0.02 for one (corrected "
        "for two)",
        evidence=told(name),
        any_of=(tuple(Part(number=f"{head}, {name}", kind="differs", bound=SMALL) for head in HEADS),),
    )


def larger(statement: str, number: str, arms: tuple[str, ...], more: str = "", unit: str = "tokens") -> Rule:
    """Return a rule: one arm is better than another, by more than the noise of the arms."""
    return Rule(
        claim="beyond",
        statement=statement,
        text=LARGER,
        evidence=f"Difference {{{number}}} {unit}.{more}",
        any_of=((Part(number=number, arms=arms),),),
    )


def inside(head: str) -> Rule:
    """Return a rule: a draft temperature between 0 and 1 beats both ends."""
    return larger(
        f"A draft temperature between 0 (target-only) and 1 beats both, head {head}.",
        f"{head}, inside gain",
        tuple(f"{head}, at {t}" for t in ("0.0", "best", "1.0")),
        f" Best on text: {{{head}, best}}; counted by the engine {{{head}, inside gain counted}}.",
        "tokens of accept length",
    )


RULES = (
    *(agrees(name) for name in SOUND),
    *(shortcut(name) for name in SHORT),
    larger(
        "The corrected end-to-end loss trains a better head than the printed one at equal steps.",
        "corrected - printed, steps",
        ("printed, steps", "corrected, steps"),
        unit="tokens of accept length",
    ),
    larger(
        "It does so at equal compute time.",
        "corrected - printed, time",
        ("printed, time", "corrected, time"),
        " A step takes {cost} times as long: {corrected steps} steps against {printed steps}.",
        "tokens of accept length",
    ),
    *(inside(head) for head in HEADS),
    larger(
        "When rollouts use top_p = 0.9, a head trained on that law beats one trained on the full law.",
        "truncated - full, counted",
        ("truncated, counted", "full, counted"),
        " On text: {truncated - full, text}.",
        "tokens of accept length",
    ),
    larger(
        "From a fresh head, TV is slower than -log(overlap) (nla).",
        "cold: nla - tv",
        ("cold: end nla", "cold: end tv"),
        " For ce against tv: {cold: ce - tv}.",
        "tokens, mean over the curve",
    ),
    larger(
        "From a fresh head, cross-entropy first and then TV ends higher than TV throughout.",
        "cold: ce_then_tv - tv",
        ("cold: end ce_then_tv", "cold: end tv"),
        unit="tokens of accept length",
    ),
)

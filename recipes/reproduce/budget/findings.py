"""The rules of README.md."""

from recipes.reproduce.verdicts import Part, Rule

BAR = 0.2  # tokens
NOISE = "by more than the noise of the arms"


def over_hard(label: str, answers: int, more: str) -> Rule:
    """The project's own bar."""
    return Rule(
        claim="C3",
        statement="A full adaptation by end-to-end TV beats as much hard-label cross-entropy by 0.2 tokens, "
        f"{answers} answers.",
        text=f"confirmed if the gain lies above 0.2 {NOISE}, refuted if below by as much",
        evidence=f"Gain {{e2e_tv - hard_ce{label}}} tokens{more}.",
        any_of=(
            (
                Part(
                    number=f"e2e_tv - hard_ce{label}",
                    bound=BAR,
                    arms=(f"length e2e_tv{label}", f"length hard_ce{label}"),
                ),
            ),
        ),
    )


def over_soft(label: str, answers: int) -> Rule:
    """Against the honest baseline."""
    return Rule(
        claim="C3",
        statement=f"A full adaptation by end-to-end TV beats as much soft-label cross-entropy, {answers} answers.",
        text=f"confirmed if the gain lies above 0 {NOISE}, refuted if below by as much",
        evidence=f"Gain {{e2e_tv - ce{label}}} tokens; over NLA {{e2e_tv - nla{label}}}.",
        any_of=((Part(number=f"e2e_tv - ce{label}", arms=(f"length e2e_tv{label}", f"length ce{label}")),),),
    )


RULES = (
    over_hard("", 800, " (over the head as it came: {e2e_tv - start})"),
    over_hard(", few", 100, ""),
    over_soft("", 800),
    over_soft(", few", 100),
    Rule(
        claim="C3",
        statement="After a full adaptation greedy drafts have neither gained nor lost over hard labels.",
        text="confirmed if their change lies within .009 tokens of 0, which is .3 % of three drafts, refuted if "
        f"outside {NOISE}",
        evidence="Greedy drafts change by {greedy: e2e_tv - hard_ce} tokens, sampled ones by {e2e_tv - hard_ce}.",
        any_of=(
            (
                Part(
                    number="greedy: e2e_tv - hard_ce",
                    kind="within",
                    bound=0.009,
                    arms=("greedy e2e_tv", "greedy hard_ce"),
                ),
            ),
        ),
    ),
)

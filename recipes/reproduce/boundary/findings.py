"""The rules of README.md. Names of numbers: head, what."""

from recipes.reproduce.verdicts import Part, Rule

WORTH = 0.01  # acceptance that a choice by position must add to be worth having
HEADS = ("hard_ce", "ce", "e2e_tv")


def average(head: str) -> Rule:
    """C2 by acceptance."""
    return Rule(
        claim="C2",
        statement=f"Sampled drafts of the head {head} are accepted more often than greedy ones, on average.",
        text="confirmed if the difference of acceptance lies above 0 by more than the noise of the arms, refuted if "
        "below by as much",
        evidence=f"Difference {{{head}, advantage}}: {{{head}, sampled}} against {{{head}, greedy}}.",
        any_of=((Part(number=f"{head}, advantage", arms=(f"{head}, sampled", f"{head}, greedy")),),),
    )


def share(head: str) -> Rule:
    """C2 by positions."""
    return Rule(
        claim="C2",
        statement=f"They are so at most positions, head {head}.",
        text="confirmed if the share of positions with TV < 1 - p(argmax q) lies above one half, refuted if below",
        evidence=f"Share {{{head}, sampled_wins}}; by more than 0.01: sampled {{{head}, clear_sampled}}, greedy "
        f"{{{head}, clear_greedy}}.",
        any_of=((Part(number=f"{head}, sampled_wins", bound=0.5),),),
    )


RULES = (
    *(average(head) for head in HEADS),
    *(share(head) for head in HEADS),
    Rule(
        claim="beyond",
        statement="Choosing the better kind of draft at every position would be worth having, head e2e_tv.",
        text="confirmed if it adds more than 0.01 to the acceptance of the better fixed choice by more than the noise "
        "of the arms, refuted if less by as much",
        evidence="It adds {e2e_tv, worth_best}, knowing the target's law beforehand.",
        any_of=((Part(number="e2e_tv, worth_best", bound=WORTH, arms=("e2e_tv, best", "e2e_tv, sampled")),),),
    ),
    Rule(
        claim="beyond",
        statement="A switch on the draft's own entropy, which decoding can do, gains over one kind, head e2e_tv.",
        text="confirmed if it adds more than 0 to the acceptance of the better fixed choice by more than the noise of "
        "the arms, refuted if less by as much",
        evidence="It adds {e2e_tv, worth_switch}; threshold fitted on the other half of the answers.",
        any_of=((Part(number="e2e_tv, worth_switch", arms=("e2e_tv, switch", "e2e_tv, sampled")),),),
    ),
)

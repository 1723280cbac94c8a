"""The rules of README.md as functions of intervals."""

from collections.abc import Mapping

from bebop.intervals import Interval
from recipes.common.record import Finding, verdict

WORTH = 0.01  # acceptance that a choice by position must add to be worth having
Numbers = Mapping[tuple[str, str], Interval]  # (head, what) -> over seeds


def judge(numbers: Numbers) -> list[Finding]:
    """Every finding, in the order of README.md."""
    heads = ("hard_ce", "ce", "e2e_tv")
    found = [average(numbers, head) for head in heads] + [share(numbers, head) for head in heads]
    return [*found, oracle(numbers, "e2e_tv"), switch(numbers, "e2e_tv")]


def average(numbers: Numbers, head: str) -> Finding:
    """C2 by acceptance."""
    return Finding(
        claim="C2",
        statement=f"Sampled drafts of the head {head} are accepted more often than greedy ones, on average.",
        rule="confirmed if the difference of acceptance lies above 0, refuted if below",
        verdict=verdict(numbers[head, "advantage"]),
        evidence=f"Difference {numbers[head, 'advantage']}: {numbers[head, 'sampled'].value:.3f} against "
        f"{numbers[head, 'greedy'].value:.3f}.",
    )


def share(numbers: Numbers, head: str) -> Finding:
    """C2 by positions."""
    won, lost = numbers[head, "clear_sampled"].value, numbers[head, "clear_greedy"].value
    return Finding(
        claim="C2",
        statement=f"They are so at most positions, head {head}.",
        rule="confirmed if the share of positions with TV < 1 - p(argmax q) lies above one half, refuted if below",
        verdict=verdict(numbers[head, "sampled_wins"], 0.5),
        evidence=f"Share {numbers[head, 'sampled_wins']}; by more than 0.01: sampled {won:.3f}, greedy {lost:.3f}.",
    )


def oracle(numbers: Numbers, head: str) -> Finding:
    """What choosing by position could give at best."""
    return Finding(
        claim="beyond",
        statement=f"Choosing the better kind of draft at every position would be worth having, head {head}.",
        rule=f"confirmed if it adds more than {WORTH} to the acceptance of the better fixed choice, refuted if less",
        verdict=verdict(numbers[head, "worth_best"], WORTH),
        evidence=f"It adds {numbers[head, 'worth_best']}, knowing the target's law beforehand.",
    )


def switch(numbers: Numbers, head: str) -> Finding:
    """What choosing by the draft's entropy gives."""
    return Finding(
        claim="beyond",
        statement=f"A switch on the draft's own entropy, which decoding can do, gains over one kind, head {head}.",
        rule="confirmed if it adds more than 0 to the acceptance of the better fixed choice, refuted if less",
        verdict=verdict(numbers[head, "worth_switch"]),
        evidence=f"It adds {numbers[head, 'worth_switch']}; threshold fitted on the other half of the answers.",
    )

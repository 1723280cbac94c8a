"""Rules of README.md. Numbers are named "head, what"; "..., seeds" is the number over seeds alone, for the noise floor.

Every number is over seeds and prompts (``recipes.reproduce.real.effects``). The fact ``size of NAME`` is the number in
units of the difference of two seeds of one arm. ``curves of HEAD``: how many of its validation curves are flat.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

HEADS = ("hard_ce", "ce", "e2e_tv")
TEMPERATURES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)  # of target and draft
INSIDE = (0.2, 0.4, 0.6, 0.8)  # temperatures of the draft alone, between greedy and the target's
DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1
MOST = 0.5  # share of positions
NEARLY_ALL = 0.9  # share of kinds of prompts; the paper has 23 of 24
WORTH = 0.01  # acceptance that a choice by position must add to be worth having
NOISE = "by more than the noise of the arms, refuted if below by as much; tested if the accept length is above 1.2"


def drafting(head: str) -> tuple[Need, ...]:
    """Return the condition of claims about acceptance: the head drafts at all."""
    number = f"{head}, accept length"
    return (Need(number=number, kind="above", bound=DRAFTS, otherwise=f"the heads of {head} hardly draft"),)


def at(temperature: float) -> str:
    """Return the suffix of the numbers at a temperature."""
    return "" if temperature == 1 else f" at {temperature}"


def advantage(head: str, temperature: float = 1.0, way: str = "") -> Part:
    """Return the part of a rule about acceptance of sampled minus greedy drafts."""
    which = way or at(temperature)
    arms = tuple(f"{head}, {drafts}{which}, seeds" for drafts in ("sampled", "greedy"))
    return Part(number=f"{head}, advantage{which}", arms=arms)


def average(head: str) -> Rule:
    """Return the rule of C2 on mean acceptance."""
    return Rule(
        claim="C2",
        statement=f"On SmolLM2, sampled drafts of {head} heads are accepted more often than greedy ones, on average.",
        text=f"confirmed if the difference of acceptance lies above 0 {NOISE}",
        evidence=f"Difference {{{head}, advantage}}, {{size of {head}, advantage}}: {{{head}, sampled}} against "
        f"{{{head}, greedy}}; in accept length {{{head}, tokens}} tokens; {{curves of {head}}}.",
        any_of=((advantage(head),),),
        needs=drafting(head),
    )


def everywhere(head: str) -> Rule:
    """Return the rule of C2 at every temperature."""
    values = ", ".join(f"{{{head}, advantage{at(t)}}}" for t in TEMPERATURES)
    return Rule(
        claim="C2",
        statement=f"On SmolLM2, they are so at every temperature from 0.4 to 1.4, {head} heads.",
        text=f"confirmed if the difference of acceptance lies above 0 at all six temperatures {NOISE} at one of them "
        "(corrected for six)",
        evidence=f"Difference at {', '.join(map(str, TEMPERATURES))}: {values}.",
        any_of=(tuple(advantage(head, t) for t in TEMPERATURES),),
        needs=drafting(head),
    )


def positions(head: str) -> Rule:
    """Return the rule of C2 on the share of positions."""
    return Rule(
        claim="C2",
        statement=f"On SmolLM2, they are so at most positions, {head} heads.",
        text="confirmed if the share of positions with TV < 1 - p(argmax q) lies above one half, refuted if below; "
        "tested if the accept length is above 1.2",
        evidence=f"Share {{{head}, sampled wins}}; by more than 0.01: sampled {{{head}, clear sampled}}, greedy "
        f"{{{head}, clear greedy}}.",
        any_of=((Part(number=f"{head}, sampled wins", bound=MOST),),),
        needs=drafting(head),
    )


def kinds(head: str) -> Rule:
    """Return the rule of C2 on the share of kinds of prompts, Fig 13 of the paper."""
    return Rule(
        claim="C2",
        statement=f"On SmolLM2, they are so for nearly all kinds of prompts, {head} heads.",
        text="confirmed if the share of kinds whose mean lies on the side of sampled drafts is above 0.9 (the paper: "
        "23 of 24), refuted if below; tested if the accept length is above 1.2",
        evidence=f"Share {{{head}, kinds}} of {{kinds}}.",
        any_of=((Part(number=f"{head}, kinds", bound=NEARLY_ALL),),),
        needs=drafting(head),
    )


def choice(head: str, what: str, statement: str, bound: float, more: str) -> Rule:
    """Return the rule on the gain of choosing between both kinds of draft by position."""
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2, {statement}, {head} heads.",
        text=f"confirmed if it adds more than {bound:g} to the acceptance of the better fixed choice {NOISE}",
        evidence=f"It adds {{{head}, {what}}}, {{size of {head}, {what}}}{more}.",
        any_of=((Part(number=f"{head}, {what}", bound=bound, arms=(f"{head}, {what}, seeds",)),),),
        needs=drafting(head),
    )


def draft_temperature(head: str) -> Rule:
    """Return the rule on a draft temperature between greedy and the target's."""
    arms = [f"{head}, draft at {t}, seeds" for t in (0.0, 1.0)]
    groups = tuple(
        tuple(
            Part(number=f"{head}, draft at {t} - at {end}", arms=(f"{head}, draft at {t}, seeds", arm))
            for end, arm in zip((0.0, 1.0), arms, strict=True)
        )
        for t in INSIDE
    )
    told = "; ".join(f"{t}: {{{head}, draft at {t} - at 0.0}}, {{{head}, draft at {t} - at 1.0}}" for t in INSIDE)
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2, some draft temperature between 0 (greedy) and 1 (the target's) beats both, {head} "
        "heads.",
        text="confirmed if one of 0.2, 0.4, 0.6, 0.8 gains accept length over both ends by more than the noise of the "
        "arms (corrected for four), refuted if each loses to both by as much; tested if the accept length is above 1.2",
        evidence=f"Tokens over 0 and over 1: {told}.",
        any_of=groups,
        needs=drafting(head),
    )


def under_top_p(head: str) -> Rule:
    """Return the rule of C2's question for truncated rollouts."""
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2, sampled drafts beat greedy ones under top-p 0.9 as well, {head} heads.",
        text=f"confirmed if the difference of acceptance lies above 0 {NOISE}",
        evidence=f"Difference {{{head}, advantage under top-p}}: {{{head}, sampled under top-p}} against "
        f"{{{head}, greedy under top-p}}.",
        any_of=((advantage(head, way=" under top-p"),),),
        needs=drafting(head),
    )


def truncated(head: str, drafts: str) -> Rule:
    """Return the rule on the effect of truncating both distributions on acceptance."""
    number = f"{head}, {drafts}, top-p - full"
    arms = (f"{head}, {drafts} under top-p, seeds", f"{head}, {drafts}, seeds")
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2, truncating target and draft to top-p 0.9 raises acceptance of {drafts} drafts, {head} "
        "heads.",
        text=f"confirmed if the difference of acceptance lies above 0 {NOISE}",
        evidence=f"Difference {{{number}}}, {{size of {number}}}: {{{head}, {drafts} under top-p}} against "
        f"{{{head}, {drafts}}}.",
        any_of=((Part(number=number, arms=arms),),),
        needs=drafting(head),
    )


BETTER = "choosing the better kind of draft at every position would be worth having"
SWITCH = "a switch on the draft's own entropy, which decoding can do, gains over one kind of draft"

RULES = (
    *(average(head) for head in HEADS),
    *(positions(head) for head in HEADS),
    *(kinds(head) for head in HEADS),
    *(everywhere(head) for head in ("ce", "e2e_tv")),
    *(choice(head, "worth best", BETTER, WORTH, ", knowing the target beforehand") for head in ("ce", "e2e_tv")),
    *(choice(head, "worth switch", SWITCH, 0.0, ", its bound from the other prompts") for head in ("ce", "e2e_tv")),
    *(draft_temperature(head) for head in ("ce", "e2e_tv")),
    *(under_top_p(head) for head in ("ce", "e2e_tv")),
    *(truncated(head, drafts) for head in ("ce", "e2e_tv") for drafts in ("sampled", "greedy")),
)

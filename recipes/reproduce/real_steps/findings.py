"""Rules of README.md. Every interval is over pairs of jobs, each with its own prompts; there is one head."""

from recipes.reproduce.verdicts import Need, Part, Rule

DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1


def faster(what: str, number: str, times: str) -> Rule:
    """Return a rule of C5 as far as a processor can tell: a ratio of times above 1.

    The claim has two parts, rollouts and steps, with one rule each.
    """
    return Rule(
        claim="C5",
        statement=f"On SmolLM2 and a processor, sampled drafts make {what} of a synchronous job shorter.",
        text=f"confirmed if {times}, plain over with drafts, lies above 1, refuted if below; tested if the accept "
        "length is above 1.2",
        evidence=f"{{{number}}} times as fast; with accept length {{accept length}}, where rollouts take "
        "{share} of the time of a plain step.",
        any_of=((Part(number=number, bound=1.0),),),
        needs=(Need(number="accept length", kind="above", bound=DRAFTS, otherwise="the head hardly drafts"),),
    )


RULES = (
    faster("rollouts", "rollouts", "the time of rollouts per token of an answer"),
    faster("steps", "steps", "the time of a step"),
)

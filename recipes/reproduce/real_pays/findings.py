"""Rules of README.md. Numbers are named "batch N: what"; every interval is over rounds, each with its own prompts.

"accept length": of sampled drafts at K = 3 in the rounds of the largest batch, which have the most completions. It is a
property of the head, whatever the batch. There is one head, so no number is over training seeds, and there is no noise
floor of arms.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

BATCHES = (1, 8, 32)
DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1
TENTH = 0.1  # relative


# All claims here need a head that drafts.
DRAFTING = (Need(number="accept length", kind="above", bound=DRAFTS, otherwise="the head hardly drafts"),)


def faster(batch: int) -> Rule:
    """Return the rule of C5 as far as a processor can tell: drafts make decoding faster at all."""
    return Rule(
        claim="C5",
        statement=f"On SmolLM2 and a processor, decoding with a trained head gives more tokens per second than plain "
        f"decoding, batch {batch}.",
        text="confirmed if the ratio of tokens per processor second, at the number of drafts that was best in other "
        "rounds, lies above 1, refuted if below; tested if the accept length is above 1.2",
        evidence=f"{{batch {batch}: faster}} times; at K = {{batch {batch}: best K}} accept length "
        f"{{batch {batch}: accept length at best K}}, where a cycle costs {{batch {batch}: break-even}} plain steps.",
        any_of=((Part(number=f"batch {batch}: faster", bound=1.0),),),
        needs=DRAFTING,
    )


def sampled(batch: int) -> Rule:
    """Return the rule of C2 in tokens per second."""
    return Rule(
        claim="C2",
        statement=f"On SmolLM2 and a processor, sampled drafts decode more tokens per second than greedy ones of the "
        f"same head, batch {batch}.",
        text="confirmed if the relative gain, each at the number of drafts that was best in the other rounds, lies "
        "above 0, refuted if below; tested if the accept length is above 1.2",
        evidence=f"Gain {{batch {batch}: sampled / greedy - 1}}.",
        any_of=((Part(number=f"batch {batch}: sampled / greedy - 1"),),),
        needs=DRAFTING,
    )


def modelled(batch: int) -> Rule:
    """Return the rule that the cost model, the source of predictions elsewhere, gives the measured speed-up."""
    return Rule(
        claim="beyond",
        statement=f"On SmolLM2 and a processor, accept length over the costs of single passes gives the speed-up to a "
        f"tenth, batch {batch}.",
        text="confirmed if measured over modelled speed-up - 1, prefill left out, mean of all arms with drafts, lies "
        "within 0.1 of 0, refuted if outside; tested if the accept length is above 1.2",
        evidence=f"Measured over modelled - 1: {{batch {batch}: beside model}}.",
        any_of=((Part(number=f"batch {batch}: beside model", kind="within", bound=TENTH),),),
        needs=DRAFTING,
    )


RULES = tuple(rule(batch) for rule in (faster, sampled, modelled) for batch in BATCHES)

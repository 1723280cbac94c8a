"""Rules of README.md. Numbers are named "batch N: what"; every interval is over rounds, each with its own prompts.

"accept length": of sampled drafts at K = 3 in the rounds of the largest batch. There is one head and one GPU, so no
number is over training seeds or machines.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

BATCHES = (1, 8, 32, 256)
DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1
TENTH = 0.1  # relative


# All claims here need a head that drafts.
DRAFTING = (Need(number="accept length", kind="above", bound=DRAFTS, otherwise="the head hardly drafts"),)


def faster(batch: int) -> Rule:
    """Return the rule of C5 as far as one small model on one GPU can tell: drafts make decoding faster at all."""
    return Rule(
        claim="C5",
        statement=f"On SmolLM2 and a GPU, the embedded engine gives more tokens per second with a trained head than "
        f"with plain decoding, batch {batch}.",
        text="confirmed if the ratio of tokens per second, at the number of drafts that was best in other rounds, lies "
        "above 1, refuted if below; tested if the accept length is above 1.2",
        evidence=f"{{batch {batch}: faster}} times; at K = {{batch {batch}: best K}} accept length "
        f"{{batch {batch}: accept length at best K}}, where a cycle costs {{batch {batch}: break-even}} plain steps.",
        any_of=((Part(number=f"batch {batch}: faster", bound=1.0),),),
        needs=DRAFTING,
    )


def sampled(batch: int) -> Rule:
    """Return the rule of C2 in tokens per second."""
    return Rule(
        claim="C2",
        statement=f"On SmolLM2 and a GPU, sampled drafts decode more tokens per second than greedy ones of the same "
        f"head, batch {batch}.",
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
        statement=f"On SmolLM2 and a GPU, accept length over the costs of single passes gives the speed-up to a tenth, "
        f"batch {batch}.",
        text="confirmed if measured over modelled speed-up - 1, prefill left out, mean of all arms with drafts, lies "
        "within 0.1 of 0, refuted if outside; tested if the accept length is above 1.2",
        evidence=f"Measured over modelled - 1: {{batch {batch}: beside model}}.",
        any_of=((Part(number=f"batch {batch}: beside model", kind="within", bound=TENTH),),),
        needs=DRAFTING,
    )


def predicted(batch: int) -> Rule:
    """Return the rule on the roofline's costs, predicted before anything had run on a GPU."""
    return Rule(
        claim="beyond",
        statement=f"The roofline of an H100 predicts to a tenth what drafts bring SmolLM2 on a GPU, given their accept "
        f"length, batch {batch}.",
        text="confirmed if measured over predicted speed-up - 1, prefill left out, mean over K = 1, 2, 3 of sampled "
        "drafts, lies within 0.1 of 0, refuted if outside; tested if the accept length is above 1.2",
        evidence=f"Measured over predicted - 1: {{batch {batch}: beside prediction}}; a plain step takes "
        f"{{batch {batch}: plain step, ms}} ms, {{batch {batch}: predicted step, ms}} ms were predicted.",
        any_of=((Part(number=f"batch {batch}: beside prediction", kind="within", bound=TENTH),),),
        needs=DRAFTING,
    )


RULES = tuple(rule(batch) for rule in (faster, sampled, modelled, predicted) for batch in BATCHES)

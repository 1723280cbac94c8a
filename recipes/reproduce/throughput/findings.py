"""The rules of README.md. Numbers are named by batch, then quantity."""

from recipes.reproduce.verdicts import Part, Rule

NOISE = "by more than the noise of the arms, refuted if below by as much"
PLAIN, SAMPLED, GREEDY, HARD = "plain", "e2e_tv", "e2e_tv greedy", "hard_ce"


def compared(batch: int, number: str, bound: float, *arms: str) -> tuple[tuple[Part, ...], ...]:
    """Return the condition on a ratio or a relative gain of speeds."""
    names = tuple(f"batch {batch}: x plain {arm}" for arm in arms)
    return ((Part(number=f"batch {batch}: {number}", bound=bound, arms=names, relative=True),),)


def of_batch(batch: int) -> tuple[Rule, ...]:
    """Return the rules of one batch size."""
    at, name = f"at batch {batch}", f"batch {batch}: "
    return (
        Rule(
            claim="C5",
            statement=f"Decoding with the adapted head is faster than plain decoding {at}.",
            text=f"confirmed if the ratio of tokens/s lies above 1 {NOISE}",
            evidence=f"{{{name}faster}} times plain with K = 3; most at K = {{{name}best K}}: {{{name}at best K}}; the "
            "paper: 2.4.",
            any_of=compared(batch, "faster", 1.0, SAMPLED, PLAIN),
        ),
        Rule(
            claim="C5",
            statement=f"The adapted head decodes more tokens/s than the cross-entropy head {at}.",
            text=f"confirmed if the relative gain in tokens/s lies above 0 {NOISE}",
            evidence=f"Relative gain {{{name}e2e_tv / hard_ce - 1}}; the paper: up to 0.25.",
            any_of=compared(batch, "e2e_tv / hard_ce - 1", 0.0, SAMPLED, HARD),
        ),
        Rule(
            claim="C5",
            statement=f"Throughput rises with acceptance {at}.",
            text="confirmed if the slope of one relative gain on the other lies above 0, refuted if below",
            evidence=f"Slope {{{name}slope}} (1: a cycle costs the same whatever the head), r = {{{name}r}}; the "
            "paper: r = 0.81.",
            any_of=((Part(number=f"{name}slope"),),),
        ),
        Rule(
            claim="C2",
            statement=f"With the same head, sampled drafts decode more tokens/s than greedy ones {at}.",
            text=f"confirmed if the relative gain in tokens/s lies above 0 {NOISE}",
            evidence=f"Relative gain {{{name}sampled / greedy - 1}}.",
            any_of=compared(batch, "sampled / greedy - 1", 0.0, SAMPLED, GREEDY),
        ),
        Rule(
            claim="beyond",
            statement=f"The cost model gives the speed-up to a tenth {at}.",
            text="confirmed if measured over modelled - 1, mean of all arms, lies within 0.1 of 0, refuted if outside",
            evidence=f"Measured over modelled - 1: {{{name}beside model}}, with costs measured in the same run.",
            any_of=((Part(number=f"{name}beside model", kind="within", bound=0.1),),),
        ),
    )


RULES = (
    Rule(
        claim="C5",
        statement="End-to-end TV raises acceptance by about a tenth over hard-label cross-entropy.",
        text=f"confirmed if the relative gain in accepted drafts lies above 5 % {NOISE}",
        evidence="Relative gain {accepted: e2e_tv / hard_ce - 1} of accepted drafts in 3; the paper: about 0.1.",
        any_of=(
            (
                Part(
                    number="accepted: e2e_tv / hard_ce - 1",
                    bound=0.05,
                    arms=("accepted e2e_tv", "accepted hard_ce"),
                    relative=True,
                ),
            ),
        ),
    ),
    *of_batch(1),
    *of_batch(32),
)

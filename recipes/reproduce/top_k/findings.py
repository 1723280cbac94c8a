"""The rules of README.md. Names of numbers: the start of the head, the tokens in the loss."""

from recipes.reproduce.verdicts import Part, Rule

CUT = ("K = 4, full", "K = 4, renormalised", "K = 64, full", "K = 64, renormalised")
SPIKED = tuple((start, f"K = 4, {mode}") for start in ("built-in", "fresh") for mode in ("full", "renormalised"))


def whole(start: str) -> Rule:
    """All tokens against each smaller set."""
    return Rule(
        claim="Fig 14b",
        statement=f"From the {start} head, TV on the whole vocabulary beats TV on the K largest draft logits.",
        text="confirmed if all four gains lie above 0 by more than the noise of the arms, refuted if one lies below by "
        "as much (corrected for four)",
        evidence="Gain in accept length over "
        + "; ".join(f"{label} {{{start}: all - {label}}}" for label in CUT)
        + ".",
        any_of=(
            tuple(
                Part(number=f"{start}: all - {label}", arms=(f"{start}: length all", f"{start}: length {label}"))
                for label in CUT
            ),
        ),
    )


RULES = (
    whole("built-in"),
    whole("fresh"),
    Rule(
        claim="Fig 14b",
        statement="With few tokens the training curve has spikes, as the set of tokens changes between steps.",
        text="confirmed if with K = 4 all four added spreads of the loss lie above 0 by more than the noise of the "
        "arms, refuted if one lies below by as much (corrected for four)",
        evidence="Added spread of the step-to-step change of the log loss: "
        + "; ".join(
            f"{start} head, {label.partition(', ')[2]} {{{start}: spread {label} - all}}" for start, label in SPIKED
        )
        + ".",
        any_of=(
            tuple(
                Part(
                    number=f"{start}: spread {label} - all",
                    arms=(f"{start}: spread all", f"{start}: spread {label}"),
                )
                for start, label in SPIKED
            ),
        ),
    ),
)

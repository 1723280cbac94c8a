"""The rules of README.md. Names of numbers: nodes, temperature, what."""

from recipes.reproduce.verdicts import Part, Rule

BOUND = 0.0  # tokens a cycle that a tree must emit more than a chain
NODES = (7, 16, 32)
TEMPERATURES = (0, 1)


def better(nodes: int, temperature: int) -> Rule:
    """The calibrated tree against the chain, at equal verified positions."""
    name = f"{nodes} nodes, T = {temperature}"
    return Rule(
        claim="trees",
        statement=f"At temperature {temperature} a calibrated tree of {nodes} drafts beats a chain of {nodes}.",
        text="confirmed if the difference of accept length lies above 0 by more than the noise of the arms, refuted if "
        "below by as much",
        evidence=f"Difference {{{name}: tree - chain}}: {{{name}: tree}} against {{{name}: chain}}; a tree of the "
        f"default ranks {{{name}: ranks}}.",
        any_of=((Part(number=f"{name}: tree - chain", bound=BOUND, arms=(f"{name}: tree", f"{name}: chain")),),),
    )


RULES = tuple(better(nodes, temperature) for temperature in TEMPERATURES for nodes in NODES)

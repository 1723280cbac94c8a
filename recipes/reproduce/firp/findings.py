"""The rules of README.md. Numbers are named "quantity, arm"; "A - B" is the difference of two arms of one seed."""

from recipes.reproduce.verdicts import Part, Rule

LENGTH = 1.7  # the project's bars at 16 nodes, temperature 0
CONTROL = 1.3
FLAT = 0.33  # largest spread of layers up to the middle, as a share of the loss from the middle to high layers
NODES = (16, 32, 63)


def one(claim: str, statement: str, text: str, evidence: str, *parts: Part) -> Rule:
    """Return a rule whose parts must all hold."""
    return Rule(claim=claim, statement=statement, text=text, evidence=evidence, any_of=(parts,))


def longer(arm: str, rivals: str) -> Rule:
    """Return a rule: FIRP accepts more than another arm, with trees of three sizes."""
    return one(
        "FIRP 2",
        f"FIRP accepts more than {rivals} trained on the same answers with as many updates, at 16, 32 and 63 nodes.",
        "confirmed if all three differences of tokens a cycle lie above 0, refuted if one lies below",
        "Differences " + ", ".join(f"{{length {n}, FIRP - {arm}}}" for n in NODES) + "; at 16 nodes {length 16, FIRP} "
        f"against {{length 16, {arm}}}.",
        *(
            Part(number=f"length {n}, FIRP - {arm}", arms=(f"length {n}, FIRP", f"length {n}, {arm}"))
            for n in NODES
        ),
    )  # fmt: skip


def helps(arm: str, name: str) -> Rule:
    """Return a rule: another objective beats KL at temperature 1."""
    return one(
        "beyond FIRP",
        f"Trained on {name} instead of KL, more sampled drafts of a chain are accepted at temperature 1.",
        "confirmed if the difference of tokens a cycle lies above 0, refuted if below",
        f"{{chain, {arm} - FIRP}}: {{chain, {arm}}} against {{chain, FIRP}} tokens a cycle. At temperature 0 with 16 "
        f"nodes {{length 16, {arm} - FIRP}}.",
        Part(number=f"chain, {arm} - FIRP", arms=(f"chain, {arm}", "chain, FIRP")),
    )


RULES = (
    one(
        "FIRP 1",
        "With a tree of 16 nodes there are at least 1.7 tokens a cycle, temperature 0.",
        "confirmed if tokens a cycle lie above 1.7, refuted if below",
        "{length 16, FIRP} tokens a cycle; 32 nodes {length 32, FIRP}, 63 nodes {length 63, FIRP}, a chain of three "
        "{length 3, FIRP}.",
        Part(number="length 16, FIRP", bound=LENGTH),
    ),
    one(
        "FIRP 1",
        "It is the training: the identity or a random matrix gives at most 1.3 tokens a cycle with a tree of 16 nodes.",
        "confirmed if tokens a cycle of both lie below 1.3, refuted if one lies above",
        "Identity {length 16, identity}, random {length 16, random}; as a chain of three {length 3, identity} and "
        "{length 3, random}.",
        Part(number="length 16, identity", kind="below", bound=CONTROL),
        Part(number="length 16, random", kind="below", bound=CONTROL),
    ),
    longer("best Medusa", "Medusa heads, the better of those trained on labels and on KL,"),
    longer("early exits", "early exits"),
    one(
        "FIRP 3",
        "Step 1 may enter anywhere up to the middle and not at the top: at high layers accuracy falls steeply.",
        "confirmed if the spread of accuracy over layers 1, 3 and 5 lies below a third of what is lost from layer 5 to "
        "layer 11, refuted if above",
        "Spread over layers 1 to 5 {spread, step 1}, lost from 5 to 11 {fall, step 1}, the former over the latter "
        "{spread over fall, step 1}.",
        Part(number="spread over fall, step 1", kind="below", bound=FLAT),
    ),
    one(
        "FIRP 3",
        "The same holds for step 2 with step 1 fixed: it loses at high layers.",
        "confirmed if accuracy at layer 6, less that at layer 10, lies above 0, refuted if below",
        "Layer 6, less layer 10: {fall, step 2}; layer 6, less layer 5 (where step 1 enters) {rise, step 2}.",
        Part(number="fall, step 2", arms=("accuracy, step 2 at 6", "accuracy, step 2 at 10")),
    ),
    one(
        "FIRP 4",
        "Seeing the pseudo states of earlier steps makes later steps better.",
        "confirmed if the differences in accuracy of steps 2 and 3 lie above 0, refuted if one lies below",
        "Step 2 {accuracy 2, FIRP - FIRP, masked}, step 3 {accuracy 3, FIRP - FIRP, masked}; tokens a cycle with 16 "
        "nodes {length 16, FIRP - FIRP, masked}.",
        *(
            Part(
                number=f"accuracy {k}, FIRP - FIRP, masked",
                arms=(f"accuracy {k}, FIRP", f"accuracy {k}, FIRP, masked"),
            )
            for k in (2, 3)
        ),
    ),
    one(
        "FIRP 5",
        "A pseudo state comes closer to the real state of its token from layer to layer.",
        "confirmed if for all steps the cosine after the last layer, less that where the step enters, lies above 0, "
        "refuted if one lies below",
        "Growth {cosine growth 1}, {cosine growth 2}, {cosine growth 3}; without the mean of all states "
        "{centred growth 1}, {centred growth 2}, {centred growth 3}; beyond that with states of other places "
        "{own growth 1}, {own growth 2}, {own growth 3}.",
        *(Part(number=f"cosine growth {k}") for k in (1, 2, 3)),
    ),
    helps("FIRP, TV", "total variation"),
    helps("FIRP, e2e TV", "total variation end to end"),
    one(
        "beyond FIRP",
        "End to end is better than step by step: e2e TV against TV, sampled drafts of a chain at temperature 1.",
        "confirmed if the difference of tokens a cycle lies above 0, refuted if below",
        "{chain, FIRP, e2e TV - FIRP, TV}.",
        Part(number="chain, FIRP, e2e TV - FIRP, TV", arms=("chain, FIRP, e2e TV", "chain, FIRP, TV")),
    ),
    one(
        "beyond FIRP",
        "For each trained parameter FIRP has more accepted drafts than Medusa heads, 16 nodes.",
        "confirmed if the ratio lies above 1, refuted if below",
        "{per parameter, 16} times as many.",
        Part(number="per parameter, 16", bound=1.0),
    ),
)

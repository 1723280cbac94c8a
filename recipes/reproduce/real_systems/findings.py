"""Rules of README.md, for four papers on SmolLM2. Numbers are named "setting, arm: what", or as in a part's report.

Intervals are over rounds with questions of their own (Student's t), or bootstraps over held-out prompts. Each part is
trained once, so no interval covers other training seeds, and there is no noise floor of arms.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

LENGTH = 1.7  # tokens a cycle with 16 nodes; our own threshold, as on the built-in model
LOSS = 0.05  # of reward; our own threshold
FLAT = 0.33  # largest spread of layers up to the middle, relative to the loss at high ones; our own threshold
PROMPTS = 500  # needed to train a choice of block sizes
APART = 0.1  # pad ratios that differ by more are not compared
NODES = (16, 32, 63)
GATES = ("all kept", "part", "none kept")


def one(claim: str, statement: str, text: str, evidence: str, *parts: Part, needs: tuple[Need, ...] = ()) -> Rule:
    """Return a rule that requires all of its parts."""
    return Rule(claim=claim, statement=statement, text=text, evidence=evidence, any_of=(parts,), needs=needs)


def longer(rival: str) -> Rule:
    """Return the rule of FIRP against another method with heads, with trees of three sizes."""
    return one(
        "FIRP 2",
        f"On SmolLM2 FIRP accepts more than {rival} trained on the same answers with as many updates, at 16, 32 and 63 "
        "nodes.",
        "confirmed if all three differences of tokens a cycle at temperature 0 lie above 0, refuted if one lies below",
        "Differences " + ", ".join(f"{{length {n}, FIRP - {rival}}}" for n in NODES) + f"; at 16 nodes "
        f"{{length 16, FIRP}} against {{length 16, {rival}}}.",
        *(Part(number=f"length {n}, FIRP - {rival}") for n in NODES),
    )


def distilled(base: str, gate: str) -> Rule:
    """Return the rule of distillation against SFT at a gate, if the teacher is better than the student."""
    return one(
        "PIPO 1",
        f"On SmolLM2 distillation from a better teacher gives more reward than {base}, gate: {gate}.",
        "confirmed if the difference in reward lies above 0, refuted if below; tested if the teacher's reward is above "
        "that of the student after SFT",
        f"Difference {{word, OPD, {gate} - {base}}}; teacher less student {{word, teacher - SFT}}.",
        Part(number=f"word, OPD, {gate} - {base}"),
        needs=(
            Need(number="word, teacher - SFT", kind="above", otherwise="the teacher is not better than the student"),
        ),
    )


RULES = (
    one(
        "FIRP 1",
        "On SmolLM2 a tree of 16 nodes gives at least 1.7 tokens a cycle, temperature 0.",
        "confirmed if tokens a cycle lie above 1.7, refuted if below",
        "{open, greedy, FIRP, tree: length} tokens a cycle; a chain of three {open, greedy, FIRP, chain: length}, the "
        "MTP head with a tree of 16 {open, greedy, MTP, tree: length}.",
        Part(number="open, greedy, FIRP, tree: length", bound=LENGTH),
    ),
    longer("Medusa heads"),
    longer("early exits"),
    one(
        "FIRP 3",
        "On SmolLM2 step 1 is flat up to the middle and falls at high layers.",
        "confirmed if the spread of accuracy over layers up to the middle lies below a third of what is lost from the "
        "middle to the highest layer, refuted if above",
        "Spread over loss {layers, spread over loss}.",
        Part(number="layers, spread over loss", kind="below", bound=FLAT),
    ),
    one(
        "beyond FIRP",
        "On SmolLM2 a tree of 16 drafts of FIRP gives more tokens a cycle than one of the MTP head, temperature 0.",
        "confirmed if the difference lies above 0, refuted if below",
        "{open, greedy, FIRP, tree - MTP, tree: length} tokens a cycle.",
        Part(number="open, greedy, FIRP, tree - MTP, tree: length"),
    ),
    one(
        "PAD 1",
        "On SmolLM2 the classifier tells pivots from other rejected tokens, where most are harmless.",
        "confirmed if the AUC on prompts of the test lies above 0.5, refuted if below",
        "AUC {AUC}; {share of pivots} of the candidates are pivots.",
        Part(number="AUC", bound=0.5),
    ),
    one(
        "PAD 2",
        "On SmolLM2 more drafts are accepted at tau .3 and reward falls by less than .05.",
        "confirmed if tokens a cycle less those of rejection sampling lie above 0 and the change in reward lies above "
        "-0.05, refuted if one of them lies below its bound",
        "Tokens a cycle {words, PAD 0.3 - MTP: length}, reward {words, PAD 0.3 - MTP: reward}; rejection sampling has "
        "{words, MTP: reward}.",
        Part(number="words, PAD 0.3 - MTP: length"),
        Part(number="words, PAD 0.3 - MTP: reward", bound=-LOSS),
    ),
    one(
        "PAD 3",
        "On SmolLM2 the quarter of the rejected drafts that the classifier keeps loses less than a random quarter.",
        "confirmed if the chance of success with its choice less that with a random one lies above 0, refuted if below",
        "{classifier - random}; the choice alone changes the chance by {classifier, change}.",
        Part(number="classifier - random"),
    ),
    one(
        "BlockPilot 2",
        "On SmolLM2 sizes that are best in one answer beat the best fixed size in another one, temperature .6.",
        "confirmed if the relative gain in tokens a cycle lies above 0, refuted if below",
        "Gain {transferred gain}; in the answers that they were chosen on it seems to be {apparent gain}.",
        Part(number="transferred gain"),
    ),
    one(
        "BlockPilot 3",
        "On SmolLM2 a choice from the logits gains over the best fixed size on held-out prompts, temperature 0.",
        "confirmed if its share of the oracle's gain lies above 0, refuted if below; tested if 500 prompts train it",
        "Share {share}; trained on {training prompts} prompts.",
        Part(number="share"),
        needs=(
            Need(number="training prompts", kind="not below", bound=PROMPTS, otherwise="too few prompts to train on"),
        ),
    ),
    one(
        "beyond BlockPilot",
        "On SmolLM2 and a processor block drafts decode more tokens a second than plain decoding, temperature 0.",
        "confirmed if the ratio lies above 1, refuted if below",
        "{blocks, greedy, block: x plain} times plain decoding, at {blocks, greedy, block: length} tokens a cycle; "
        "blocks of half the size {blocks, greedy, block, half: x plain}.",
        Part(number="blocks, greedy, block: x plain", bound=1.0),
    ),
    *(distilled("SFT", gate) for gate in GATES),
    distilled("more SFT", "part"),
    one(
        "PIPO 2",
        "On SmolLM2 a gate by confidence gives more reward than a random one that keeps as many drafts.",
        "confirmed if the difference lies above 0, refuted if below; tested if the pad ratios differ by at most 0.1",
        "{word, OPD, confidence - random}; pad ratios differ by {word, OPD, pad ratios apart}.",
        Part(number="word, OPD, confidence - random"),
        needs=(
            Need(
                number="word, OPD, pad ratios apart", kind="not above", bound=APART,
                otherwise="the gates kept different shares of the drafts",
            ),
        ),
    ),
)  # fmt: skip

"""The rules of README.md. Numbers are named "quantity, score"."""

from recipes.reproduce.verdicts import Need, Part, Rule

SPEEDUP = 1.1  # the project's bars for blocks at batch 1, temperature 0
LENGTH = 2.2
WORTH = 0.01  # relative gain that the best choice must exceed: the cost that a prediction may have
ACCURACY = 0.9  # the project's bars for a planted signal
SHARE = 0.8
NOTHING = 0.2  # a share below this counts as about 0
OVERHEAD = 0.01
SCORES = {"tau": "tokens a cycle", "speed": "tokens per processor time"}
CHOICE = (Need(number="oracle gain, tau", kind="above", otherwise="no choice would gain anything"),)


def one(claim: str, statement: str, text: str, evidence: str, *parts: Part, needs: tuple[Need, ...] = ()) -> Rule:
    """Return a rule whose parts must all hold."""
    return Rule(claim=claim, statement=statement, text=text, evidence=evidence, any_of=(parts,), needs=needs)


def worth(score: str) -> Rule:
    """Return a rule: the oracle gains over the best fixed size."""
    return one(
        "BlockPilot 2",
        f"The best size of each prompt gives more than 1 % over the best fixed size, in {SCORES[score]}.",
        "confirmed if the relative gain of the oracle lies above 0.01, refuted if below",
        f"Oracle gain {{oracle gain, {score}}}; pure noise of the same size would give {{noise gain, {score}}}.",
        Part(number=f"oracle gain, {score}", bound=WORTH),
    )


def captured(score: str) -> Rule:
    """Return a rule: the predictor gains on the original tasks."""
    return one(
        "BlockPilot 3",
        f"A choice from the logits gains over the best fixed size on held-out prompts, in {SCORES[score]}.",
        "confirmed if its share of the oracle's gain lies above 0, refuted if below",
        f"Share {{share, {score}}} of the oracle's gain. Permuted features {{permuted share, {score}}}, the best "
        f"of the task {{task share, {score}}}, the best variant on validation {{validation share, {score}}}, the "
        f"shipped predictor {{shipped share, {score}}}.",
        Part(number=f"share, {score}"),
        needs=CHOICE,
    )


RULES = (
    one(
        "BlockPilot 1",
        "Block drafts make decoding at least 1.1 times as fast as plain decoding, one request, temperature 0.",
        "confirmed if the ratio of tokens per processor time lies above 1.1, refuted if below",
        "{speedup, block} times plain decoding; greedy drafts accepted with p(argmax q) {speedup, block_target_only}.",
        Part(number="speedup, block", bound=SPEEDUP),
    ),
    one(
        "BlockPilot 1",
        "They give at least 2.2 tokens a cycle.",
        "confirmed if tokens a cycle lie above 2.2, refuted if below",
        "{tau, block} tokens a cycle; the MTP head with three drafts {tau, bebop}.",
        Part(number="tau, block", bound=LENGTH),
    ),
    one(
        "beyond BlockPilot",
        "Block drafts are faster than the MTP head with three drafts, one request, temperature 0.",
        "confirmed if the ratio of tokens per processor time lies above 1, refuted if below",
        "{block over bebop} times as fast; over plain decoding {speedup, block} and {speedup, bebop}.",
        Part(number="block over bebop", bound=1.0),
    ),
    worth("tau"),
    worth("speed"),
    one(
        "BlockPilot 2",
        "What is best for the first half of an answer is better than the best fixed size in its second half.",
        "confirmed if the relative gain in the second half lies above 0, refuted if below",
        "Gain {second half gain}; in the half that it was chosen on it seems to be {first half gain}.",
        Part(number="second half gain"),
    ),
    one(
        "BlockPilot 2",
        "At temperature 1, sizes that are best in four answers are better than the best fixed size in four others.",
        "confirmed if the relative gain lies above 0, refuted if below",
        "Gain {transferred gain}; in the answers they were chosen on it seems to be {apparent gain}. The same size is "
        "best in both sets for {label agreement} of the prompts.",
        Part(number="transferred gain"),
    ),
    captured("tau"),
    captured("speed"),
    one(
        "BlockPilot 3",
        "A planted marker that decides which sizes are any good is found on held-out prompts.",
        "confirmed if accuracy lies above 0.9 and the share, as decoded, above 0.8; refuted if one lies below",
        "Accuracy {planted accuracy}, share {planted share}.",
        Part(number="planted accuracy", bound=ACCURACY),
        Part(number="planted share", bound=SHARE),
    ),
    one(
        "BlockPilot 3",
        "From the features of other prompts the planted marker cannot be found.",
        "confirmed if the share of the oracle's gain lies below 0.2, refuted if above",
        "Share {planted permuted share}.",
        Part(number="planted permuted share", kind="below", bound=NOTHING),
    ),
    one(
        "BlockPilot 4",
        "A prediction takes less than 1 % of the time of an answer.",
        "confirmed if the share of processor time lies below 0.01, refuted if above",
        "{overhead} of an answer's processor time.",
        Part(number="overhead", kind="below", bound=OVERHEAD),
    ),
    one(
        "beyond BlockPilot",
        "A size chosen for each cycle from recent acceptance beats one chosen for each prompt, in tokens per time.",
        "confirmed if the relative gain over the predictor lies above 0, refuted if below",
        "Gain {ema over predictor, speed}; over the best fixed size {ema over fixed, speed}. In tokens a cycle, which "
        "are not what it maximises, {ema over predictor, tau}.",
        Part(number="ema over predictor, speed"),
    ),
    one(
        "beyond BlockPilot",
        "The best of all sizes lies within two of the size of the training, for most prompts.",
        "confirmed if the share of prompts lies above one half, refuted if below",
        "Share {local}.",
        Part(number="local", bound=0.5),
    ),
)

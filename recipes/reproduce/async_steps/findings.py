"""The rules of README.md. Every interval is over three seeds, each with jobs of all arms on the same prompts.

Numbers are named "quantity, arm". A ratio is plain over the arm: above 1 the arm is faster.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

PLAIN, GREEDY, SAMPLED = "plain", "TO + CE", "RS + TV"
DRAFTS = 1.2  # tokens of accept length; a head counts as drafting above it; without drafts it is 1
HALF = 0.5  # share of rollouts in rollouts and updates; above it a step waits for rollouts
TENTH = 0.1  # relative
NOISE = "by more than the noise of the arms, refuted if below by as much"

ROLLOUTS_LONGER = Need(
    number="rollout share, plain",
    kind="above",
    bound=HALF,
    otherwise="plain rollouts are not longer than updates, so that a step does not wait for them (share of both)",
)


def drafting(arm: str) -> Need:
    """Return the precondition that the arm's head drafts: its accept length is above 1.2."""
    return Need(number=f"accept length, {arm}", kind="above", bound=DRAFTS, otherwise="the head hardly drafts")


def faster(what: str, arm: str) -> Rule:
    """Return a rule of C5 as in Fig 7: the latency of a step without drafts over that with drafts."""
    return Rule(
        claim="C5",
        statement=f"On the built-in model and a processor, {what} make steps of an asynchronous job shorter.",
        text=f"confirmed if the latency of a step, plain over with drafts, lies above 1 {NOISE}; tested if the accept "
        "length is above 1.2 and plain rollouts take longer than updates",
        evidence=f"{{steps, {arm}}} times as fast, rollouts {{rollouts, {arm}}} times, accept length "
        f"{{accept length, {arm}}}; with free rollouts a step would be {{ceiling}} times as fast. The paper: up to 1.8 "
        "and 2.4.",
        any_of=(
            (Part(number=f"steps, {arm}", bound=1.0, arms=(f"step s, {PLAIN}", f"step s, {arm}"), relative=True),),
        ),
        needs=(drafting(arm), ROLLOUTS_LONGER),
    )


RULES = (
    faster("sampled drafts of a head of end-to-end TV", SAMPLED),
    faster("greedy drafts of a head of cross-entropy", GREEDY),
    Rule(
        claim="C5",
        statement="On the built-in model and a processor, steps of an asynchronous job are shorter with sampled drafts "
        "of a head of end-to-end TV than with greedy drafts of one of cross-entropy.",
        text=f"confirmed if the latency of a step, greedy over sampled, lies above 1 {NOISE}; tested as above",
        evidence="{greedy over sampled} times as fast.",
        any_of=(
            (
                Part(
                    number="greedy over sampled",
                    bound=1.0,
                    arms=(f"step s, {GREEDY}", f"step s, {SAMPLED}"),
                    relative=True,
                ),
            ),
        ),
        needs=(drafting(GREEDY), drafting(SAMPLED), ROLLOUTS_LONGER),
    ),
    Rule(
        claim="C5",
        statement="On the built-in model and a processor, an asynchronous job with sampled drafts of a head of "
        "end-to-end TV reaches a reward of .65 sooner.",
        text="confirmed if the seconds until the mean reward of five steps reaches .65, plain over with drafts, lie "
        "above 1, refuted if below; tested if the jobs of both arms reach it, and as above",
        evidence=f"{{seconds to the reward, {SAMPLED}}} times as fast; with greedy drafts "
        f"{{seconds to the reward, {GREEDY}}} times.",
        any_of=((Part(number=f"seconds to the reward, {SAMPLED}", bound=1.0),),),
        needs=(
            Need(number=f"reached, {PLAIN}", kind="above", bound=0.99, otherwise="not every plain job reaches it"),
            Need(number=f"reached, {SAMPLED}", kind="above", bound=0.99, otherwise="not every job with drafts does"),
            drafting(SAMPLED),
            ROLLOUTS_LONGER,
        ),
    ),
    Rule(
        claim="beyond",
        statement="The longer of rollouts and updates gives the latency of an asynchronous step to a tenth, given the "
        "plain job and how much faster rollouts are.",
        text="confirmed if measured over computed ratio - 1, mean of both arms with drafts, lies within 0.1 of 0, "
        "refuted if outside; tested if plain rollouts take longer than updates",
        evidence="Measured over computed - 1: {beside formula}.",
        any_of=((Part(number="beside formula", kind="within", bound=TENTH),),),
        needs=(ROLLOUTS_LONGER,),
    ),
)

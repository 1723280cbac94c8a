"""The rules of README.md. Differences are in held-out reward after training, on the same questions."""

from recipes.reproduce.verdicts import Need, Part, Rule

KEPT = 0.05  # reward that counts as the same
LEARNED = Need(
    number="gain", kind="above", otherwise="the job with rejection sampling learned nothing (held-out reward)"
)
MOVED = "overrides did not move the distribution that tokens are drawn from (R_N)"


def kept(arm: str, statement: str, biased: str) -> Rule:
    """Return the rule that an arm of PAD ends where rejection sampling does."""
    return Rule(
        claim="PAD 4",
        statement=statement,
        text="confirmed if held-out reward after training, less that of rejection sampling, lies within +-0.05, "
        "refuted if outside; tested if rejection sampling learned something and R_N lies above 0",
        evidence=f"Difference {{{arm} - plain}}; rejection sampling {{reward rejection sampling}}, before {{start}}; "
        f"R_N {{bias {biased}}} a draft.",
        any_of=((Part(number=f"{arm} - plain", kind="within", bound=KEPT),),),
        needs=(LEARNED, Need(number=f"bias {biased}", kind="above", otherwise=MOVED)),
    )


RULES = (
    kept(
        "small tau",
        "Weighted by log P, RL on PAD's answers ends where rejection sampling does, small tau.",
        "small tau",
    ),
    kept("large tau", "So it does at a large tau.", "large tau"),
    kept("large tau, whole answers", "So it does with weights of whole answers, at a large tau.", "large tau"),
    Rule(
        claim="PAD 4",
        statement="Without weights it ends lower than with them, at a large tau.",
        text="confirmed if held-out reward with weights of tokens, less that without, lies above 0 by more than the "
        "noise of the arms, refuted if below by as much; tested if rejection sampling learned something",
        evidence="Difference {weights - no weights}: without weights {reward large tau, no weights}.",
        any_of=((Part(number="weights - no weights", arms=("reward large tau", "reward large tau, no weights")),),),
        needs=(LEARNED,),
    ),
    Rule(
        claim="PAD 4",
        statement="Weighted by log P of whole answers, PAD's answers have the mean reward of the target's, small tau.",
        text="confirmed if the weighted mean reward of one policy's answers under PAD, less that under plain decoding, "
        "lies within +-0.05, refuted if outside; tested if R_N lies above 0",
        evidence="Difference {weighted small tau}, without weights {drawn small tau}; at the large tau {weighted large "
        "tau} and {drawn large tau}.",
        any_of=((Part(number="weighted small tau", kind="within", bound=KEPT),),),
        needs=(Need(number="bias small tau", kind="above", otherwise=MOVED),),
    ),
    Rule(
        claim="beyond",
        statement="PAD decodes more tokens per second of the processor than rejection sampling, small tau.",
        text="confirmed if the ratio lies above 1 by more than the noise of the arms, refuted if below by as much",
        evidence="Ratio {speed small tau}, at the large tau {speed large tau}.",
        any_of=(
            (
                Part(
                    number="speed small tau",
                    bound=1.0,
                    arms=("relative speed rejection sampling", "relative speed small tau"),
                ),
            ),
        ),
    ),
    Rule(
        claim="beyond",
        statement="Weights of whole answers train better than those of tokens, at a large tau of PAD.",
        text="confirmed if held-out reward with the former, less that with the latter, lies above 0 by more than the "
        "noise of the arms, refuted if below by as much; tested if rejection sampling learned something",
        evidence="Difference {whole answers - tokens}; effective sample size {sample size large tau, whole answers} "
        "against {sample size large tau} of the tokens.",
        any_of=(
            (Part(number="whole answers - tokens", arms=("reward large tau, whole answers", "reward large tau")),),
        ),
        needs=(LEARNED,),
    ),
)

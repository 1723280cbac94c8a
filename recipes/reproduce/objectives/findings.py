"""The rules of README.md."""

from recipes.reproduce.verdicts import Part, Rule

ABOVE = "confirmed if the gain lies above 0 by more than the noise of the arms, refuted if below by as much"

RULES = (
    Rule(
        claim="C3",
        statement="End-to-end TV raises the accept length over hard-label cross-entropy of equal compute.",
        text=ABOVE,
        evidence="Gain {e2e_tv - hard_ce} tokens with 800 sequences, {e2e_tv - hard_ce, few} with 100.",
        any_of=((Part(number="e2e_tv - hard_ce", arms=("length e2e_tv", "length hard_ce")),),),
    ),
    Rule(
        claim="C3",
        statement="It does so over soft-label cross-entropy, the honest baseline.",
        text=ABOVE,
        evidence="Gain {e2e_tv - ce} tokens; two runs of one gradient (ce, kl) differ by {kl - ce}.",
        any_of=((Part(number="e2e_tv - ce", arms=("length e2e_tv", "length ce", "length kl")),),),
    ),
    Rule(
        claim="C3",
        statement="The end-to-end form is better than TV of single steps.",
        text=ABOVE,
        evidence="Gain {e2e_tv - tv} tokens.",
        any_of=((Part(number="e2e_tv - tv", arms=("length e2e_tv", "length tv")),),),
    ),
    Rule(
        claim="C3",
        statement="Greedy drafts neither gain nor lose by it (the paper: acceptance moves by less than 0.3 %).",
        text="confirmed if what greedy drafts gain or lose over ce lies within .009 tokens of 0, which is .3 % of "
        "three drafts, refuted if outside by more than the noise of the arms",
        evidence="Greedy drafts change by {greedy: e2e_tv - ce} tokens, sampled ones by {e2e_tv - ce}.",
        any_of=(
            (
                Part(
                    number="greedy: e2e_tv - ce",
                    kind="within",
                    bound=0.009,
                    arms=("greedy e2e_tv", "greedy ce", "greedy kl"),
                ),
            ),
        ),
    ),
    Rule(
        claim="C2",
        statement="With the head so trained, sampled drafts are accepted for longer than greedy ones.",
        text="confirmed if the difference lies above 0 by more than the noise of the arms, refuted if below by as much",
        evidence="Difference {sampled - greedy} tokens.",
        any_of=((Part(number="sampled - greedy", arms=("length e2e_tv", "greedy e2e_tv")),),),
    ),
    Rule(
        claim="C3",
        statement="The gain carries over to a task that neither head nor backbone was trained on.",
        text="confirmed if the gain in overlap on lcm over ce lies above 0 by more than the noise of the arms, refuted "
        "if below by as much",
        evidence="Gain {lcm: e2e_tv - ce}.",
        any_of=((Part(number="lcm: e2e_tv - ce", arms=("lcm e2e_tv", "lcm ce", "lcm kl")),),),
    ),
)

"""Rules of README.md. Numbers are named "head, drafts, over what"; "..., seeds" is over seeds alone, for the noise
floor.

Every number is over seeds and prompts (``recipes.reproduce.real.effects``). The fact ``size of NAME`` is the number in
units of the difference of two seeds of one arm. ``curves of HEAD``: how many of its validation curves are flat.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

STRAIGHT = 0.9  # R squared above which a relation is called linear
DRAFTS = 1.2  # accept length, tokens, above which a head counts as drafting; one that drafts nothing has 1
FOLLOWS = 0.5  # correlation above which the draft's entropy is said to follow the target's
CONVERGED = 0.99  # share of seeds whose validation curve is flat
WHERE = {
    "temperatures": "over temperatures",
    "prompts": "from prompt to prompt of one kind at temperature 1",
    "tokens": "from token to token at temperature 1",
}


def drafting(head: str) -> Need:
    """Return the condition of claims about acceptance: the head drafts at all."""
    return Need(
        number=f"{head}, accept length", kind="above", bound=DRAFTS, otherwise=f"the heads of {head} hardly draft"
    )


def converged(head: str) -> Need:
    """Return the condition of claims about a loss's result: the validation curves of its heads are flat."""
    return Need(
        number=f"{head}, flat", kind="above", bound=CONVERGED, otherwise=f"not all validation curves of {head} are flat"
    )


def falls(drafts: str, way: str, head: str = "ce", claim: str = "C1") -> Rule:
    """Return the rule that acceptance of a kind of draft falls with entropy."""
    number = f"{head}, {drafts}, {way}"
    other = f" ({{hard_ce, {drafts}, {way}}} with hard_ce)" if head == "ce" else ""
    return Rule(
        claim=claim,
        statement=f"On SmolLM2, acceptance of {drafts} drafts of {head} heads falls with the target's entropy, "
        f"{WHERE[way]}.",
        text="confirmed if the slope lies below 0, refuted if above; tested if the accept length is above 1.2",
        evidence=f"Slope {{{number}}} per nat{other}, {{size of {number}}}; {{curves of {head}}}.",
        any_of=((Part(number=number, kind="below"),),),
        needs=(drafting(head),),
    )


def linear(drafts: str, way: str) -> Rule:
    """Return the rule of C1 that acceptance falls linearly."""
    points = "six temperatures" if way == "temperatures" else "tenths of all tokens by their entropy"
    return Rule(
        claim="C1",
        statement=f"On SmolLM2, with {drafts} drafts of ce heads it does so linearly, {WHERE[way]}.",
        text="confirmed if R squared lies above 0.9, refuted if below; tested if the accept length is above 1.2",
        evidence=f"R squared {{R squared, {drafts}, {way}}} over the {points}; the slope of the upper half of them "
        f"minus that of the lower half is {{bend, {drafts}, {way}}} per nat.",
        any_of=((Part(number=f"R squared, {drafts}, {way}", bound=STRAIGHT),),),
        needs=(drafting("ce"),),
    )


RULES = (
    *(falls(drafts, way) for drafts in ("greedy", "sampled") for way in WHERE),
    *(linear(drafts, way) for drafts in ("greedy", "sampled") for way in ("temperatures", "tokens")),
    *(falls("sampled", way, head="e2e_tv", claim="beyond") for way in WHERE),
    Rule(
        claim="beyond",
        statement="On SmolLM2, heads of soft cross-entropy draft with more entropy than the target has.",
        text="confirmed if the mean difference lies above 0 by more than the noise of the arm, refuted if below by as "
        "much; tested if the validation curves are flat",
        evidence="Difference {ce, draft - target entropy} nats, {size of ce, draft - target entropy}.",
        any_of=((Part(number="ce, draft - target entropy", arms=("ce, draft entropy, seeds",)),),),
        needs=(converged("ce"),),
    ),
    Rule(
        claim="beyond",
        statement="On SmolLM2, heads of end-to-end TV draft with less entropy than those of soft cross-entropy.",
        text="confirmed if the mean difference lies below 0 by more than the noise of the arms, refuted if above by as "
        "much; tested if the validation curves of both are flat",
        evidence="Difference {e2e_tv - ce, draft entropy} nats, {size of e2e_tv - ce, draft entropy}; to the target's "
        "{e2e_tv, draft - target entropy}.",
        any_of=(
            (
                Part(
                    number="e2e_tv - ce, draft entropy",
                    kind="below",
                    arms=("e2e_tv, draft entropy, seeds", "ce, draft entropy, seeds"),
                ),
            ),
        ),
        needs=(converged("ce"), converged("e2e_tv")),
    ),
    Rule(
        claim="beyond",
        statement="On SmolLM2, the draft's entropy follows the target's from token to token, heads ce.",
        text="confirmed if their correlation lies above 0.5, refuted if below; tested if the accept length is above "
        "1.2",
        evidence="Correlation {ce, correlation of entropies}; with e2e_tv {e2e_tv, correlation of entropies}.",
        any_of=((Part(number="ce, correlation of entropies", bound=FOLLOWS),),),
        needs=(drafting("ce"),),
    ),
    Rule(
        claim="beyond",
        statement="On SmolLM2, the draft's own entropy, which is known beforehand, tells more of the acceptance of a "
        "sampled draft than the target's does, heads ce.",
        text="confirmed if the difference of R squared between tokens lies above 0 by more than the noise of the arms, "
        "refuted if below by as much; tested if the accept length is above 1.2",
        evidence="R squared {ce, told by draft} against {ce, told by target}: difference {ce, told by draft - target}, "
        "{size of ce, told by draft - target}.",
        any_of=(
            (
                Part(
                    number="ce, told by draft - target",
                    arms=("ce, told by draft, seeds", "ce, told by target, seeds"),
                ),
            ),
        ),
        needs=(drafting("ce"),),
    ),
)

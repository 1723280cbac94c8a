"""The rules of README.md, the same for both forms. Names of numbers: form, head, what; "..., seeds": for noise.

Every number is over seeds and prompts (``recipes.reproduce.real.effects``). ``acceptance`` is the share of three
drafts that is accepted, accept length - 1 over 3, as in the paper's tables. Slopes are of the accept length, in tokens
per nat, as in its figures.
Bars that the paper does not give say so in their statement, and count beside the claim (``scope.py``).
"""

from recipes.reproduce.verdicts import Kind, Need, Part, Rule

FORMS = {"cpu": "a million tokens, on a CPU", "gpu": "ten million tokens, on a GPU"}
LEAST = 0.1  # nats of the paper's policies
MOST = 0.5  # likewise; "entropy - 0.5" is how far the mean lies above it
DRAFTS = 1.2  # tokens of accept length from which on a head counts as one that drafts; one that does not has 1
STRAIGHT = 0.9  # R squared above which a relation is called linear: a bar of ours
NEARLY_ALL = 0.9  # share of kinds of prompts; the paper has 23 of 24
UNMOVED = 0.3  # points of acceptance: the paper's greedy drafts move by less between objectives
WAYS = {"temperatures": "over temperatures of .2 to .45", "prompts": "from prompt to prompt of one kind"}
NOISE = "by more than the noise of the arms, refuted if below by as much"


def needs(form: str, *heads: str) -> tuple[Need, ...]:
    """Return what makes it the paper's regime: mean entropy in its range, and heads that draft."""
    return (
        Need(
            number=f"{form}, entropy", kind="above", bound=LEAST, otherwise="the mean entropy is not above .1 nats"
        ),
        Need(
            number=f"{form}, entropy - {MOST:g}", kind="below", otherwise="the mean entropy is not below .5 nats"
        ),
        *(
            Need(
                number=f"{form}, {head}, accept length", kind="above", bound=DRAFTS,
                otherwise=f"the heads of {head} hardly draft",
            )
            for head in heads
        ),
    )  # fmt: skip


def where(form: str) -> str:
    """Return how statements of a form begin."""
    return f"On SmolLM2 at .1 to .5 nats ({FORMS[form]})"


def falls(form: str, drafts: str, way: str, claim: str = "C1") -> Rule:
    """Return C1's fall: the accept length with the target's entropy."""
    number = f"{form}, ce, {drafts}, slope over {way}"
    return Rule(
        claim=claim,
        statement=f"{where(form)}, the accept length of {drafts} drafts of ce heads falls with the target's entropy, "
        f"{WAYS[way]}.",
        text="confirmed if the slope lies below 0, refuted if above; tested in the paper's range of entropy",
        evidence=f"Slope {{{number}}} tokens per nat at a mean of {{{form}, entropy}} nats, {{{form}, trained on}}.",
        any_of=((Part(number=number, kind="below"),),),
        needs=needs(form, "ce"),
    )


def linear(form: str) -> Rule:
    """Return C1's line, by a bar of ours."""
    number = f"{form}, ce, greedy, R squared over temperatures"
    return Rule(
        claim="C1",
        statement=f"{where(form)}, the accept length of greedy drafts of ce heads falls on a straight line over four "
        "temperatures (an R squared of .9, a bar of ours).",
        text="confirmed if R squared lies above 0.9, refuted if below; tested in the paper's range of entropy",
        evidence=f"R squared {{{number}}}, {{{form}, trained on}}.",
        any_of=((Part(number=number, bound=STRAIGHT),),),
        needs=needs(form, "ce"),
    )


def advantage(form: str, head: str) -> Rule:
    """Return C2 by means."""
    number = f"{form}, {head}, sampled - greedy"
    arms = tuple(f"{form}, {head}, acceptance{words}, seeds" for words in ("", " greedy"))
    return Rule(
        claim="C2",
        statement=f"{where(form)}, sampled drafts of {head} heads are accepted more often than greedy ones.",
        text=f"confirmed if the difference of acceptance lies above 0 {NOISE}; tested in the paper's range of entropy",
        evidence=f"Difference {{{number}}}: {{{form}, {head}, acceptance}} against "
        f"{{{form}, {head}, acceptance greedy}} of three drafts, {{{form}, trained on}}.",
        any_of=((Part(number=number, arms=arms),),),
        needs=needs(form, head),
    )


def kinds(form: str, head: str) -> Rule:
    """Return C2 by kinds of prompts, Fig 13 of the paper."""
    number = f"{form}, {head}, kinds"
    return Rule(
        claim="C2",
        statement=f"{where(form)}, they are so for nearly all kinds of prompts, {head} heads.",
        text="confirmed if the share of kinds whose mean lies on the side of sampled drafts is above 0.9 (the paper: "
        "23 of 24), refuted if below; tested in the paper's range of entropy",
        evidence=f"Share {{{number}}}, {{{form}, trained on}}.",
        any_of=((Part(number=number, bound=NEARLY_ALL),),),
        needs=needs(form, head),
    )


def ahead(form: str, head: str, base: str, statement: str, paper: str, words: str = "", kind: Kind = "above") -> Rule:
    """Return C3 by Table 2: acceptance of three sampled drafts over that of another objective."""
    number = f"{form}, {head} - {base}, acceptance{words}"
    arms = tuple(f"{form}, {arm}, acceptance{words}, seeds" for arm in (head, base))
    return Rule(
        claim="C3",
        statement=f"{where(form)}, {statement}.",
        text=f"confirmed if the difference of acceptance lies above 0 {NOISE}; tested in the paper's range of entropy",
        evidence=f"Difference {{{number}}} ({paper}): {{{form}, {head}, acceptance{words}}} against "
        f"{{{form}, {base}, acceptance{words}}}, {{{form}, trained on}}.",
        any_of=((Part(number=number, kind=kind, arms=arms),),),
        needs=needs(form, head, base),
    )


def unmoved(form: str) -> Rule:
    """Return C3's other half: greedy drafts do not care, on either side."""
    number = f"{form}, e2e_tv - ce, greedy points"
    return Rule(
        claim="C3",
        statement=f"{where(form)}, acceptance of greedy drafts moves by less than .3 points between end-to-end TV and "
        "ce.",
        text="confirmed if the difference lies within 0.3 points of 0, refuted if outside by more than the noise of "
        "the arms; tested in the paper's range of entropy",
        evidence=f"Difference {{{number}}} points; of sampled drafts, as a share, {{{form}, e2e_tv - ce, acceptance}}, "
        f"{{{form}, trained on}}.",
        any_of=((
            Part(
                number=number, kind="within", bound=UNMOVED,
                arms=tuple(f"{form}, {head}, greedy points, seeds" for head in ("e2e_tv", "ce")),
            ),
        ),),
        needs=needs(form, "e2e_tv", "ce"),
    )  # fmt: skip


def mostly(form: str) -> Rule:
    """Return C3's removal of the slope; the paper: from -1.68 tokens per nat to -.06."""
    number = f"{form}, e2e_tv - half of ce, slope over prompts"
    base = f"{form}, ce, sampled, slope over prompts"
    arms = tuple(f"{form}, {head}, sampled, slope over prompts, seeds" for head in ("e2e_tv", "ce"))
    return Rule(
        claim="C3",
        statement=f"{where(form)}, end-to-end TV removes more than half of the dependence of sampled drafts on "
        f"entropy, {WAYS['prompts']}.",
        text=f"confirmed if its slope minus half of that of ce lies above 0 {NOISE}; tested in the paper's range of "
        "entropy, and if the accept length of ce falls at all",
        evidence=f"Slope {{{form}, e2e_tv, sampled, slope over prompts}} tokens per nat against {{{base}}}: "
        f"{{{number}}} above half of it, {{{form}, trained on}}.",
        any_of=((Part(number=number, arms=arms),),),
        needs=(
            *needs(form, "e2e_tv", "ce"),
            Need(number=base, kind="below", otherwise="the accept length of ce does not fall"),
        ),
    )


def rules(form: str) -> tuple[Rule, ...]:
    """Return the rules of a form."""
    return (
        falls(form, "greedy", "temperatures"),
        falls(form, "greedy", "prompts"),
        falls(form, "sampled", "prompts"),
        linear(form),
        falls(form, "sampled", "temperatures", claim="beyond"),
        advantage(form, "ce"),
        advantage(form, "e2e_tv"),
        kinds(form, "ce"),
        kinds(form, "e2e_tv"),
        ahead(form, "e2e_tv", "ce", "three drafts of end-to-end TV are accepted more often than those of ce",
             "the paper: .023 to .080"),
        ahead(form, "tv", "ce", "those of TV of single steps are so as well", "the paper: .014 to .052"),
        ahead(form, "e2e_tv", "tv", "those of end-to-end TV are accepted more often than those of TV of single steps",
             "the paper: .006 to .047"),
        ahead(form, "e2e_tv", "rkl", "they are accepted more often than those of reverse KL",
             "the paper: .017 to .082"),
        ahead(form, "e2e_tv", "ce", "the gain over ce carries over to kinds of prompts that no head was trained on",
             "the paper: .023", words=" on unseen kinds"),
        unmoved(form),
        mostly(form),
    )  # fmt: skip


RULES = tuple(rule for form in FORMS for rule in rules(form))

"""Rules of the RL study: what counts as confirmed, refuted, not told apart or void. They are older than the runs.

README.md calls a rule *void* that was "not tested" because an arm did not do what its name says. It calls "undecided"
*not told apart*.
"""

from recipes.reproduce.verdicts import Need, Part, Rule

MISMATCH = 0.01  # acceptance of the first draft that C4 may be off by (SPEC 1.2)
MOVED = 0.3  # nats by which entropy has to move, in every seed
WAYS = ("falling", "rising")
HIT = 0.8  # share of planted streams that the monitor has to name rightly

ROSE = Need(
    number="least entropy change, rising", kind="above", bound=MOVED,
    otherwise="entropy was to rise by .3 nats in every seed and did not (least change in nats)",
)  # fmt: skip
FELL = Need(
    number="greatest entropy change, falling", kind="below", bound=-MOVED,
    otherwise="entropy was to fall by .3 nats in every seed and did not (greatest change in nats)",
)  # fmt: skip
LEARNED = {
    direction: Need(
        number=f"least reward change, {direction}", kind="above",
        otherwise=f"reward did not rise in every seed while entropy was {direction} (least change)",
    )
    for direction in WAYS
}  # fmt: skip
CONVERGED = Need(
    number="flat curves", kind="above", bound=0.99,
    otherwise="not all validation curves of the heads were flat before RL (share that was)",
)  # fmt: skip
LITTLE = 0.05  # tokens a cycle that a head trained before RL may lack at the end


def still(direction: str, measure: str, need: Need) -> Rule:
    """Return the rule that weight drift costs nothing in one direction of entropy; ``measure``: direct or residual."""
    how = {
        "direct": "direct mismatch on fixed texts, each context against itself at the temperature of its new entropy",
        "residual": "residual of Eq. 16 on the run's own answers, slope over temperatures of the first weights",
    }[measure]
    number = f"{measure} mismatch, {direction}"
    return Rule(
        claim="C4",
        statement=f"Drift of the weights costs almost nothing while entropy is {direction}: {how} is 0.",
        text=f"confirmed if the interval over seeds lies within +-{MISMATCH}, refuted if outside; void unless entropy "
        f"is {direction} by {MOVED} nats and reward rises",
        evidence=f"{{{number}}} (first draft, frozen soft-CE head).",
        any_of=((Part(number=number, kind="within", bound=MISMATCH),),),
        needs=(need, LEARNED[direction]),
    )


def mostly(direction: str, need: Need) -> Rule:
    """Return the rule that entropy moves acceptance by more than mismatch does."""
    number = f"entropy part - mismatch part, {direction}"
    return Rule(
        claim="C4",
        statement=f"While entropy is {direction}, acceptance moves mostly because entropy does.",
        text="confirmed if the size of the entropy part minus that of the mismatch part, on fixed texts, lies above 0, "
        "refuted if below; void as above",
        evidence=f"{{{number}}} of overlap; entropy part {{entropy part, {direction}}}.",
        any_of=((Part(number=number, kind="above"),),),
        needs=(need, LEARNED[direction]),
    )


def named(truth: str, cases: str) -> Rule:
    """Return the rule about the monitor's verdict on planted streams."""
    number = f"monitor right, {truth}"
    return Rule(
        claim="beyond",
        statement=f"The monitor calls {cases} {truth}.",
        text=f"confirmed if the share of streams named rightly lies above {HIT}, refuted if below",
        evidence=f"{{{number}}} of the streams.",
        any_of=((Part(number=number, kind="above", bound=HIT),),),
    )


RULES = (
    still("falling", "direct", FELL),
    still("falling", "residual", FELL),
    mostly("falling", FELL),
    still("rising", "direct", ROSE),
    still("rising", "residual", ROSE),
    mostly("rising", ROSE),
    Rule(
        claim="C4",
        statement="One training before RL is enough: a TV head that goes on with it at every step is hardly better.",
        text=f"confirmed if what it gains over the frozen head at the end lies below {LITTLE} tokens a cycle, refuted "
        "if above; void unless validation curves were flat before RL, and rewards rise in it",
        evidence="{tv updates - frozen} tokens, mean of both directions.",
        any_of=((Part(number="tv updates - frozen", kind="below", bound=LITTLE),),),
        needs=(CONVERGED, *LEARNED.values()),
    ),
    Rule(
        claim="C4",
        statement="Updating a TV head by cross-entropy during RL makes it worse than leaving it alone.",
        text="confirmed if the change against the frozen head lies below 0 at the end by more than the noise of the "
        "arms, refuted if above by as much; void unless its validation curve was flat before RL",
        evidence="{ce updates - frozen} tokens; by KL, whose gradient is the same, {kl updates - frozen}; with TV "
        "updates instead {tv updates - frozen}.",
        any_of=(
            (
                Part(
                    number="ce updates - frozen", kind="below",
                    arms=tuple(f"end {arm}, {way}" for arm in ("tv", "tv, ce updates") for way in WAYS),
                ),
            ),
        ),
        needs=(CONVERGED,),
    ),
    named("steady", "streams in which nothing changed"),
    named("entropy-driven", "a change of temperature alone"),
    named("mismatch-driven", "a change of the head alone, at equal entropy,"),
)  # fmt: skip

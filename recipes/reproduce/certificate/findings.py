"""The rules of README.md, and the planted faults that they test. Numbers are counts of runs and have no interval."""

from dataclasses import dataclass
from typing import Literal

from recipes.reproduce.verdicts import Part, Rule

NEEDED = 3.5  # four of five runs must find the fault
NAMED = 0.799  # 80 % of the runs that found a fault must name its cause
RARE = 0.05  # share of runs without a fault that may ever reach E = 20 (Ville's inequality)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A planted fault, and the budget of tokens within which it must be found; ``size``: see ``Planted``."""

    kind: str
    size: float
    heat: float
    box: Literal["black", "white"]
    budget: int
    causes: tuple[str, ...]  # names that count as the right cause

    @property
    def name(self) -> str:
        """Return the name of the case in numbers and on pages."""
        size = {1e-4: "1e-4"}.get(self.size, f"{100 * self.size:g} %" if self.size != 1 else "always")
        return f"{self.kind}, {size}, T = {self.heat:g}, {self.box} box"


def case(box: Literal["black", "white"], budget: int, heat: float, kind: str, size: float, *causes: str) -> Case:
    """Return one row of the table ``CASES``."""
    return Case(kind=kind, size=size, heat=heat, box=box, budget=budget, causes=causes)


CASES = (
    case("black", 5_000, 1, "bonus row", 0.1, "wrong_row"),
    case("black", 5_000, 1, "residual not normalised", 1, "draws", "draft_leak", "override"),
    case("black", 5_000, 1, "row shift", 0.01, "wrong_row"),
    case("black", 5_000, 1, "stale cache", 0.1, "context"),
    case("black", 5_000, 1, "override", 0.001, "override"),
    case("black", 5_000, 1, "shared seeds", 1, "shared_randomness"),
    case("black", 5_000, 1, "wrong log-probs", 0.01, "reported_logprobs"),
    case("black", 5_000, 1, "temperature off", 0.01, "sharpness"),
    case("black", 5_000, 1, "weights off", 1e-4, "weights"),
    case("black", 15_000, 1, "shared seeds", 0.1, "shared_randomness"),
    case("black", 15_000, 1, "stops filtered", 1, "stop_token"),
    case("black", 10_000, 2, "q before temperature", 1, "sharpness", "draft_leak"),
    case("black", 10_000, 2, "u reused", 1, "draws"),
    case("black", 10_000, 2, "drafts hotter", 0.1, "draft_leak", "sharpness"),
    case("black", 10_000, 2, "residual = p", 1, "draft_leak"),
    case("white", 2_000, 1, "residual = p", 0.1, "recovered"),
    case("white", 2_000, 1, "q of the row before", 1, "recovered"),
    case("white", 2_000, 1, "unlikely drafts dropped", 0.02, "acceptance"),
    case("white", 10_000, 1, "over-acceptance", 0.1, "acceptance"),
    case("white", 10_000, 1, "argmax as sampled", 0.1, "draft_draw"),
    case("white", 60_000, 2, "power of acceptance", 0.05, "acceptance"),
)
HARMLESS = ("zeroed head", "stale head")  # the distribution stays right, drafts are rejected more often


def found(one: Case) -> Rule:
    """Return a rule: the fault is found within its budget in four runs of five."""
    within = f"within {one.budget:,} tokens"
    return Rule(
        claim="certificate 1" if one.box == "black" else "certificate 2",
        statement=f"Found {within}: {one.name}.",
        text=f"confirmed if ln E reaches ln 10,000 {within} in at least four of five runs, else refuted",
        evidence=f"In {{runs, {one.name}}} runs; tokens at the median, where not found the budget: "
        f"{{tokens, {one.name}}}; causes named: {{causes, {one.name}}} (right: {', '.join(one.causes)}).",
        any_of=((Part(number=f"found, {one.name}", bound=NEEDED),),),
    )


def none(number: str, statement: str, evidence: str) -> Rule:
    """Return a rule: no run raises a false alarm."""
    return Rule(
        claim="certificate 3",
        statement=statement,
        text="confirmed if no run has an alarm, refuted if one has",
        evidence=evidence,
        any_of=((Part(number=number, kind="below", bound=0.5),),),
    )


RULES = (
    *map(found, CASES),
    none(
        "alarms, simulated",
        "Not one of at least 200 simulated runs without a fault raises an alarm.",
        "{runs, simulated} runs have one; the highest ln E was {highest, simulated}.",
    ),
    Rule(
        claim="certificate 3",
        statement="At most 5 % of runs without a fault ever reach E = 20.",
        text="confirmed if the share of simulated runs lies below .05, refuted if above",
        evidence="{share beyond 20, simulated} of simulated runs (Wilson's interval).",
        any_of=((Part(number="share beyond 20, simulated", kind="below", bound=RARE),),),
    ),
    none(
        "alarms, live",
        "Not one of at least ten live runs without a fault raises an alarm, in the black box or the white one.",
        "{runs, none} runs have one; the highest ln E was {highest, live}.",
    ),
    *(
        none(
            f"alarms, {kind}",
            f"A {kind} raises no alarm: the distribution is right.",
            f"{{runs, {kind}}} runs have one, in the black box or the white one; share of drafts accepted "
            f"{{acceptance, {kind}}}, by the intact engine {{acceptance, none}}.",
        )
        for kind in HARMLESS
    ),
    Rule(
        claim="certificate 4",
        statement="Of the runs that find a fault, at least 80 % name its cause.",
        text="confirmed if the share of all runs that found a fault lies at .8 or above, else refuted",
        evidence="A share of {named in, all}; black box {named in, black}, white box {named in, white}.",
        any_of=((Part(number="named, all", bound=NAMED),),),
    ),
)

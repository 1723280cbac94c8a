"""The fixed family of directions and its weights: what is merged is settled before the first token is looked at."""

from collections.abc import Container, Mapping

from bebop.certify.directions import BY_PLACE, CONTAMINATION, DRAFT, PLACES
from bebop.certify.evidence import Array
from bebop.certify.marginals import BINS, EVENTS

COPIES = ("copies", "shared_uniform", "repeated_uniform")
BETS: Mapping[str, tuple[str, ...]] = {
    "contamination": tuple(name for name in CONTAMINATION if name != "copies"),
    "by_cycle": tuple(f"{name}@{place}" for name in BY_PLACE for place in range(PLACES)),
    "draft": (*DRAFT, *(f"{name}@0" for name in DRAFT)),
    "copies": COPIES,
}
PIT_NAMES, EVENT_NAMES = tuple(BINS), tuple(EVENTS)
OTHERS = {"ids": ("ids",), "learned_tilt": ("learned_tilt",), "pit": PIT_NAMES, "reported": EVENT_NAMES}
OTHER_NAMES = tuple(name for names in OTHERS.values() for name in names)
GROUPS = {"contamination": 0.32, "by_cycle": 0.14, "draft": 0.16, "ids": 0.05, "learned_tilt": 0.10, "pit": 0.06,
          "copies": 0.09, "reported": 0.08}  # fmt: skip
FAMILY: Mapping[str, tuple[str, float]] = {
    name: (group, GROUPS[group] / len(names)) for group, names in {**BETS, **OTHERS}.items() for name in names
}
"""Direction -> its group and weight. One that a run cannot test keeps its weight: it counts as e = 1."""
assert sum(weight for _, weight in FAMILY.values()) <= 1 + 1e-9

CYCLES, DRAFTS = "places in the decoding cycle are not known", "the draft's distribution is not known"
WHY: Mapping[str, str] = {
    **dict.fromkeys(DRAFT, DRAFTS),
    **dict.fromkeys(EVENT_NAMES, "no log-probs are reported, or it is not known what they should be"),
    **dict.fromkeys(("stop", "no_stop"), "no token ends an answer"),
    **dict.fromkeys(("seen", "unseen"), "the prompts are not known"),
    **dict.fromkeys(("shared_uniform", "repeated_uniform"), "no neighbouring tokens"),
    "row_before": "the rows before are not known",
    "neighbour": "rows have columns of their own",
    "bigram": "nothing had been learned yet",
    "unprocessed": "the claim is the raw softmax",
    "copies": "no two answers had the same context",
    "ids": "columns were drawn, not tokens",
}
"""Direction -> why no cohort allowed it."""


def split(name: str, masks: Array) -> tuple[list[str], Array]:
    """A direction with those of its places in the cycle: names and masks [names, n]."""
    places = PLACES if name in BY_PLACE else 1 if name in DRAFT else 0
    return [name, *(f"{name}@{place}" for place in range(places))], masks[: 1 + places]


def why_not(name: str, tested: Container[str]) -> str:
    """Why a direction was not tested, given those that were."""
    base, at_place, _ = name.partition("@")
    if at_place and (base in tested or base not in WHY):
        return CYCLES
    if base == "draft_no_stop" and "draft" in tested:
        return WHY["no_stop"]
    return WHY.get(base, "there were no tokens")

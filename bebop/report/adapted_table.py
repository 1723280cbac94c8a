"""Before and after as rows of a table, for the card and for the page."""

from collections.abc import Iterator
from dataclasses import dataclass

from bebop import systems
from bebop.adaptation.evaluation import change
from bebop.adaptation.results import Results
from bebop.intervals import Interval

SYSTEMS = {"bebop": "sampled drafts", "target_only": "greedy drafts"}  # decoding system -> as readers know it
DISTRIBUTIONS = {  # sums that describe the distributions of head and model rather than what was accepted
    "overlap": "overlap Σ min(p, q)",
    "target_only": "p(argmax q)",
    "draft_entropy": "draft entropy, nats",
    "target_entropy": "target entropy, nats",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One number of both heads on the same held-out prompts."""

    system: str  # "sampled drafts" or "greedy drafts"
    label: str
    before: Interval
    after: Interval
    change: Interval


def rows(results: Results) -> Iterator[Row]:
    """Every row: accept length (over all and by task), acceptance per position, and the distributions at those
    positions."""
    for system in results.after.decoded:
        yield _row(results, system, "accept length", "accept_length")
        for task in tasks(results) if len(tasks(results)) > 1 else ():
            yield _row(results, system, f"accept length, {task}", "accept_length", task=task)
        yield _row(results, system, "acceptance per draft", "accepted")
        for k in range(1, drafts(results) + 1):
            yield _row(results, system, f"acceptance, draft {k}", "accepted", k)
        # Greedy drafts have a one-hot distribution, of which overlap and entropy say nothing new.
        for name, label in DISTRIBUTIONS.items() if systems.SYSTEMS[system].sampled else ():
            yield _row(results, system, label, name)


def drafts(results: Results) -> int:
    """K, the drafts of a cycle."""
    return int(results.after.decoded["bebop"].reached.shape[1])


def tasks(results: Results) -> list[str]:
    """The tasks of the held-out prompts, in the order of their appearance."""
    return list(dict.fromkeys(results.after.decoded["bebop"].tasks))


def _row(
    results: Results, system: str, label: str, name: str, position: int | None = None, task: str | None = None
) -> Row:
    before, after = (
        s.decoded[system] if task is None else s.decoded[system].of(task) for s in (results.before, results.after)
    )
    return Row(
        system=SYSTEMS[system],
        label=label,
        before=before.interval(name, position),
        after=after.interval(name, position),
        change=change(after, before, name, position),
    )

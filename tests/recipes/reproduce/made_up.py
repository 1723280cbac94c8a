"""Results of studies on the real model that nobody ran: numbers on the side that confirms each rule."""

from pathlib import Path

from recipes.reproduce import record, rule_hash
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.pages import within
from recipes.reproduce.verdicts import Need, Part, Rule


def number(value: float, half: float = 0.002) -> Number:
    return Number(value=value, low=value - half, high=value + half, seeds=40)


def confirming(rules: tuple[Rule, ...]) -> dict[str, Number]:
    """A number for all that rules ask for, such that each is confirmed."""
    found: dict[str, Number] = {}
    for part in (part for rule in rules for group in rule.any_of for part in group):
        found |= {arm: over_seeds([0.5, 0.501, 0.499]) for arm in part.arms if arm not in found}
        found[part.number] = number(_value(part))
    for need in (need for rule in rules for need in rule.needs):
        found.setdefault(need.number, number(_fulfilled(need)))
    return found


def _value(part: Part) -> float:
    return {"above": part.bound + 0.4, "below": part.bound - 0.4, "within": 0.0, "differs": 1.0}[part.kind]


def _fulfilled(need: Need) -> float:
    return need.bound + (0.4 if need.kind in ("above", "not below") else -0.4)


def keep(root: Path, study: str) -> Path:
    """Results of a study below ``root``, judged by its rules as they stand."""
    folder, rules = within(root, study), record.rules_of(study)
    figure = folder / "figures" / "a.svg"
    figure.parent.mkdir(parents=True)
    figure.write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    place = {"device": "some <processor>", "torch": "2.13", "commit": "abc1234def", "dirty": False, "command": "c"}
    started = record.Started(name=study, origin={}, code=rule_hash.of_study(study), rules=rules, at=0.0)
    record.keep(folder, started, confirming(rules), {}, {figure.name: "A <figure>."}, {})
    content = record.read(folder / "results.json")
    assert content is not None
    record.write(folder / "results.json", content | {"seconds": 90, "processor_seconds": 60, "place": place})
    return folder

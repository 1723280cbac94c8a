"""The cards on drift: why acceptance moved, from a run's ``drift.jsonl`` or from another trainer's log, replayed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config import DecodingConfig, MonitorConfig, from_dict
from bebop.errors import UserError
from bebop.monitor.controller import Kind
from bebop.monitor.drift import Decomposition, Key
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.logs import read_log
from bebop.monitor.probe_set import TokenProbs
from bebop.monitor.watch import settings
from bebop.report import figures, token_probs
from bebop.report.document import Card, table
from bebop.report.figures import INK, MUTED, Panel, Trace, layout
from bebop.report.runs import DASH, Run

SHADES = {"entropy": "#8fb4d9", "mismatch": "#e39a80"}  # bars, under a dark line
BAND = "rgba(31,41,51,0.13)"
FITS = {"temperature": ("dash", "over temperatures"), "frozen": ("dot", "between answers"), "early": ("solid", "early")}
KEYS: tuple[tuple[Key, str], ...] = (
    ("task", "Task"),
    ("lag", "Updates behind"),
    ("position", "Tokens into the answer"),
)

LENGTH = (
    "Change of the accept length against the first steps, split into what the change of entropy explains and the rest: "
    "the draft head not fitting the policy any more. Bars add up to the line; the band and the whiskers are 95 % "
    "intervals. The split is as good as the slope it rests on (next figure); without one there are no bars."
)
BANK = (
    "The same question without a slope: a fixed set of texts, read by the policy and the head of the moment. Each "
    "context is held against itself at the temperature that gave it the same entropy at the start. Change of the "
    "acceptance rate of the first draft, 95 % intervals."
)
HEAT = (
    "One point a step (darker is later). Lines are the slopes that the split may rest on, drawn through the first "
    "steps: over temperatures (same weights, only the entropy changes), between answers of one step, and over the "
    "early steps. Points that leave the lines have moved for another reason than entropy."
)
LOG = "States the controller entered and what it proposed, with the evidence it had. No line: nothing happened."
BREAKDOWN = (
    "The change of the accept length at the end of the run, in parts. A task and a stretch of the answer are held "
    "against themselves in the first steps; answers that lag behind against all of them."
)
ACTIONS: dict[Kind, str] = {
    "none": DASH,
    "resync": "send the weights again",
    "cotrain_start": "start co-training",
    "cotrain_stop": "stop co-training",
    "set_system": "decoding system",
    "set_length": "drafts",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Story:
    """What the monitor says about one run."""

    name: str
    told: list[Explanation]
    breakdown: dict[Key, dict[str, Decomposition]]
    looks: list[tuple[TokenProbs, TokenProbs]]  # at the first and at the last reading of the bank, the same contexts


def load_story(
    path: Path, name: str, rules: MonitorSettings | None = None, names: Mapping[str, str] | None = None
) -> Story:
    """Replay a log; ``names`` as in ``logs.read_log``."""
    monitor = DriftMonitor(rules)
    steps = list(read_log(path, names))
    told = [one for step in steps if (one := step.tell(monitor)) is not None]
    read = [{look.text: look for look in step.bank.looks} for step in steps if step.bank is not None]
    looks = [(look, read[-1][text]) for text, look in read[0].items() if text in read[-1]] if len(read) > 1 else []
    return Story(name=name, told=told, breakdown={key: monitor.breakdown(key) for key, _ in KEYS}, looks=looks)


def stories(folders: Sequence[Path], runs: Sequence[Run]) -> list[Story]:
    """Those runs that have something to tell."""
    pairs = [(f / "drift.jsonl", run) for f, run in zip(folders, runs, strict=True)]
    return [
        load_story(path, run.name, _rules(run.config)) for path, run in pairs if path.is_file() and path.stat().st_size
    ]


def cards(told: Sequence[Story]) -> list[Card]:
    """All cards for which there is data."""
    found = [
        _parts(told, "length", "Why the accept length moved", "tokens per pass", LENGTH),
        _heat(told),
        _parts(told, "bank", "The same texts, then and now", "acceptance rate", BANK),
        token_probs.card([(story.name, story.looks) for story in told]),
        _controller(told),
        _breakdown(told),
    ]
    return [card for card in found if card is not None]


def _rules(config: Mapping[str, Any]) -> MonitorSettings | None:
    """As the job itself was watched; None if config.yaml does not say."""
    try:
        sections = {name: config.get(name, {}) for name in ("decoding", "monitor")}
        decoding, monitor = (
            from_dict(DecodingConfig, sections["decoding"]),
            from_dict(MonitorConfig, sections["monitor"]),
        )
        return settings(decoding, monitor, (config.get("trainer") or {}).get("steps"))
    except (UserError, TypeError, AttributeError):
        return None


def _parts(told: Sequence[Story], name: str, title: str, unit: str, text: str) -> Card | None:
    """Stacked parts of a change, a panel a run."""
    panels = []
    for story in told:
        steps = [(one.step, one.parts[name]) for one in story.told if name in one.parts]
        steps = [(step, part) for step, part in steps if part.change.known]
        if steps:
            caption = f"{story.name}, {unit}" if len(told) > 1 else unit
            panels.append(Panel(caption=caption, traces=_stacked(steps), layout=_over_steps(len(steps))))
    keys = [figures.Key(label=k, color=c, style="block", group=f"{name} {k}") for k, c in SHADES.items()]
    keys.append(figures.Key(label="whole change", color=INK, group=f"{name} change"))
    return (
        Card(title=title, text=text, panels=figures.same_scale(panels, False), keys=keys, wide=True) if panels else None
    )


def _stacked(steps: Sequence[tuple[int, Decomposition]]) -> list[Trace]:
    """Bars of both parts with whiskers; the whole as a line in its band."""
    x, name = [step for step, _ in steps], steps[0][1].name
    traces: list[Trace] = []
    for part, shade in SHADES.items():
        found: list[Estimate] = [getattr(one, part) for _, one in steps]
        away = [_short(e.high - e.point) or 0.0 for e in found]
        whiskers = {"type": "data", "array": away, "color": MUTED, "thickness": 0.8, "width": 0}
        traces.append(
            {
                "type": "bar", "x": x, "y": [_short(e.point) for e in found], "name": part, "error_y": whiskers,
                "marker": {"color": shade, "line": {"width": 0}}, "legendgroup": f"{name} {part}",
                "hovertemplate": "%{y:.3~g} ± %{error_y.array:.2~g}",
            }
        )  # fmt: skip
    change = [one.change for _, one in steps]
    group = f"{name} change"
    edge = {"type": "scatter", "x": x, "mode": "lines", "line": {"width": 0}, "legendgroup": group, "hoverinfo": "skip"}
    traces.append({**edge, "y": [_short(e.low) for e in change], "name": "low"})
    traces.append({**edge, "y": [_short(e.high) for e in change], "name": "high", "fill": "tonexty", "fillcolor": BAND})
    traces.append(
        {
            "type": "scatter", "x": x, "y": [_short(e.point) for e in change], "name": "whole change",
            "mode": "lines" if len(x) > 20 else "lines+markers", "line": {"color": INK, "width": 2},
            "marker": {"color": INK, "size": 5}, "legendgroup": group, "hovertemplate": "%{y:.3~g}",
        }
    )  # fmt: skip
    return traces


def _over_steps(count: int) -> dict[str, Any]:
    found = layout("step")
    found["xaxis"] |= {"tickformat": "d"} | ({"dtick": 1} if count < 8 else {})
    found["yaxis"] |= {"zeroline": True, "zerolinecolor": "#9aa5b1"}
    return found | {"barmode": "relative", "bargap": 0.15 if count <= 80 else 0}


def _heat(told: Sequence[Story]) -> Card | None:
    """Accept length against entropy, with the slopes through the first steps; a panel a run."""
    panels = []
    for story in told:
        seen = [one for one in story.told if math.isfinite(one.entropy.point) and math.isfinite(one.length.point)]
        if len(seen) > 1:
            caption = f"{story.name}, tokens per pass" if len(told) > 1 else "accept length, tokens per pass"
            frame = layout("entropy, nats") | {"hovermode": "closest"}
            panels.append(Panel(caption=caption, traces=_cloud(seen), layout=frame))
    keys = [
        figures.Key(label=label, color=figures.color(i), style="dashed" if dash != "solid" else "solid", group=source)
        for i, (source, (dash, label)) in enumerate(FITS.items())
    ]
    title = "Accept length against entropy"
    return (
        Card(title=title, text=HEAT, panels=figures.same_scale(panels, False), keys=keys, wide=True) if panels else None
    )


def _cloud(seen: Sequence[Explanation]) -> list[Trace]:
    """The steps, and a line a slope."""
    x, y = ([_short(getattr(one, name).point) for one in seen] for name in ("entropy", "length"))
    points = {
        "type": "scatter", "mode": "markers", "x": x, "y": y, "name": "steps", "text": [str(e.step) for e in seen],
        "marker": {"size": 6, "color": [e.step for e in seen], "colorscale": [[0, "#c3cad3"], [1, INK]]},
        "hovertemplate": "step %{text}: %{y:.3~g} at %{x:.3~g} nats",
    }  # fmt: skip
    traces: list[Trace] = [points]
    first = seen[: min(5, len(seen))]
    middle = [sum(getattr(e, name).point for e in first) / len(first) for name in ("entropy", "length")]
    ends = [min(e.entropy.point for e in seen), max(e.entropy.point for e in seen)]
    for i, (source, (dash, label)) in enumerate(FITS.items()):
        slope = seen[-1].slopes.get(source)  # type: ignore[call-overload]
        if slope is None or not slope.value.known:
            continue
        line = [_short(middle[1] + slope.value.point * (end - middle[0])) for end in ends]
        traces.append(
            {
                "type": "scatter", "mode": "lines", "x": [_short(end) for end in ends], "y": line, "name": label,
                "line": {"color": figures.color(i), "dash": dash, "width": 1.6}, "legendgroup": source,
                "hovertemplate": f"{label}: {slope.value.text()} per nat",
            }
        )  # fmt: skip
    return traces


def _controller(told: Sequence[Story]) -> Card | None:
    """The controller's log as a table."""
    rows = [
        (
            f"{story.name}, step {one.step}" if len(told) > 1 else f"step {one.step}",
            one.state,
            one.action.why if one.action.kind in ("set_system", "set_length") else one.verdict.evidence,
            _action(one),
        )
        for story in told
        for one in story.told
        if one.verdict.changed or one.action.kind != "none"
    ]
    heads = ("When", "State", "Evidence", "Proposed")
    return Card(title="The controller's log", text=LOG, table=table(heads, rows), wide=True) if told else None


def _action(one: Explanation) -> str:
    value = "" if one.action.value is None else f": {one.action.value}"
    return f"{ACTIONS[one.action.kind]}{value}"


def _breakdown(told: Sequence[Story]) -> Card | None:
    """The change at the end by task, lag and position in the answer."""
    rows = []
    for story in told:
        for key, title in KEYS:
            for label, part in story.breakdown[key].items():
                if len(story.breakdown[key]) < 2 or label == "-1":
                    continue
                where = f"{title} {label}" if len(told) == 1 else f"{story.name}: {title} {label}"
                rows.append((where, part.change.text(), *(_known(e, part) for e in (part.entropy, part.mismatch))))
    heads = ("Of what", "Change", "Entropy", "Mismatch")
    return Card(title="Where it moved", text=BREAKDOWN, table=table(heads, rows), wide=True) if rows else None


def _known(part: Estimate, of: Decomposition) -> str:
    return part.text() if not of.unidentified else DASH


def _short(value: float) -> float | None:
    """Six significant digits; None where there is no number."""
    return float(f"{value:.6g}") if math.isfinite(value) else None

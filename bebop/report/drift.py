"""Drift cards of the report: why acceptance moved, from the replayed ``drift.jsonl`` of a run or another trainer's log.

One card shows both distributions, token by token, at the contexts of the probe set with the largest change of overlap.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, MonitorConfig
from bebop.errors import UserError
from bebop.monitor.controller import Kind
from bebop.monitor.drift import Decomposition, Key
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.logs import LoggedStep, OutOfOrderError, iter_log, read_log
from bebop.monitor.probe_set import ProbeReading, TokenProbs
from bebop.monitor.records import AFTER
from bebop.monitor.watch import settings
from bebop.report import figures
from bebop.report.document import Card, table
from bebop.report.figures import INK, MUTED, Panel, Trace, layout, rounded, visible
from bebop.report.runs import DASH, Run

SHADES = {"entropy": "#8fb4d9", "mismatch": "#e39a80"}  # bars, under a dark line
BAND = "rgba(31,41,51,0.13)"
FITS = {
    "temperature": ("dash", "over temperatures"),
    "frozen": ("dot", "between completions"),
    "early": ("solid", "early"),
}
KEYS: tuple[tuple[Key, str], ...] = (
    ("task", "Task"),
    ("lag", "Updates behind"),
    ("position", "Tokens into the completion"),
)

LENGTH = (
    "Change of the accept length against the first steps, split into what the change of entropy explains and the rest: "
    "the draft head not fitting the policy any more. Bars add up to the line; the band and the whiskers are 95 % "
    "intervals. The split is as good as the slope it rests on (next figure); without one there are no bars."
)
PROBE_SET = (
    "The same question without a slope: a fixed set of texts, read by the policy and the head of the moment. Each "
    "context is held against itself at the temperature that gave it the same entropy at the start. Change of the "
    "acceptance rate of the first draft, 95 % intervals."
)
ENTROPY = (
    "One point a step (darker is later). Lines are the slopes that the split may rest on, drawn through the first "
    "steps: over temperatures (same weights, only the entropy changes), between completions of one step, and over the "
    "early steps. Points that leave the lines have moved for another reason than entropy."
)
LOG = "States the controller entered and what it proposed, with the evidence it had. No line: nothing happened."
BREAKDOWN = (
    "The change of the accept length at the end of the run, in parts. A task and a stretch of the completion are held "
    "against themselves in the first steps; completions that lag behind against all of them."
)
BY_TURN = (
    "The change of the acceptance rate of the first draft at the end of the run by turn, each kind of turn against "
    "itself in the first steps: accept lengths of turns of different length cannot be compared. The last row, where "
    "there is one, is the first cycle after each observation, which drafts on what the policy has not written; those "
    "cycles are in the rows of their turns, too."
)
ACTIONS: dict[Kind, str] = {
    "none": DASH,
    "resync": "send the weights again",
    "cotrain_start": "start co-training",
    "cotrain_stop": "stop co-training",
    "set_system": "decoding system",
    "set_length": "drafts",
}
MAX_CONTEXTS = 6  # contexts, of all runs together
MAX_TOKENS = 6  # tokens of one context
CONTEXT_LENGTH = 22  # characters of the context in the caption
LABEL_LENGTH = 10  # characters of a token's label
LINES = (
    ("policy, first", "#b9c1cb", 0, "target"),
    ("head, first", "#a9c8ea", 0, "draft"),
    ("policy, last", "#1f2933", 1, "target"),
    ("head, last", "#2563a8", 1, "draft"),
)
DISTRIBUTIONS_TEXT = (
    "What the policy (p) and its head (q) think of the next token, at the first and the last reading of the fixed "
    "texts, where their overlap changed most. A draft is accepted with the overlap of both distributions. Where both "
    "have moved together, the head has kept up with the policy; where only p has moved, it has not."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Log replayed through the monitor."""

    name: str
    explanations: list[Explanation]  # a step each, as ``Explanation.to_show`` has it
    breakdown: dict[Key, dict[str, Decomposition]]
    token_probs: list[tuple[TokenProbs, TokenProbs]]  # at the first and the last reading of the probe set


def replay_log(
    path: Path, name: str, rules: MonitorSettings | None = None, names: Mapping[str, str] | None = None
) -> Replay:
    """Replay a log through a new monitor; ``names`` as in ``logs.read_log``.

    Only a log whose steps are out of order is read into memory as a whole.
    """
    try:
        return _replay(iter_log(path, names), name, rules)
    except OutOfOrderError:
        return _replay(read_log(path, names), name, rules)


def _replay(steps: Iterable[LoggedStep], name: str, rules: MonitorSettings | None) -> Replay:
    monitor = DriftMonitor(rules)
    explanations: list[Explanation] = []
    readings: list[ProbeReading] = []  # the first and the last one
    for step in steps:
        if (explanation := step.feed(monitor)) is not None:
            explanations.append(explanation.to_show())
        if step.reading is not None:
            readings = [*readings[:1], step.reading]
    texts = [{probs.text: probs for probs in reading.token_probs} for reading in readings]
    first, last = texts if len(texts) > 1 else ({}, {})
    pairs = [(first[text], last[text]) for text in first if text in last]
    keys: list[Key] = [*(key for key, _ in KEYS), "turn"]
    breakdown = {key: monitor.breakdown(key) for key in keys}
    return Replay(name=name, explanations=explanations, breakdown=breakdown, token_probs=pairs)


def replay_runs(folders: Sequence[Path], runs: Sequence[Run]) -> list[Replay]:
    """Replay the logs of the monitored runs."""
    pairs = [(f / "drift.jsonl", run) for f, run in zip(folders, runs, strict=True)]
    return [
        replay_log(path, run.name, _rules(run.config)) for path, run in pairs if path.is_file() and path.stat().st_size
    ]


def cards(replays: Sequence[Replay]) -> list[Card]:
    """Return all cards that have data."""
    return [
        *_parts(replays, "length", "Why the accept length moved", "tokens per pass", LENGTH),
        *_entropy(replays),
        *_parts(replays, "bank", "The same texts, then and now", "acceptance rate", PROBE_SET),
        *_distributions([(replay.name, replay.token_probs) for replay in replays]),
        *_controller(replays),
        *_breakdown(replays),
        *_by_turn(replays),
    ]


def _rules(config: Mapping[str, Any]) -> MonitorSettings | None:
    """Return the monitor settings that the job itself used; None if config.yaml does not give them."""
    try:
        decoding = from_dict(DecodingConfig, config.get("decoding", {}))
        monitor = from_dict(MonitorConfig, config.get("monitor", {}))
        steps, cotrain = (config.get("trainer") or {}).get("steps"), (config.get("cotrain") or {}).get("mode", "off")
        return settings(decoding, monitor, steps, cotrain)
    except (UserError, TypeError, AttributeError):
        return None


def _parts(replays: Sequence[Replay], name: str, title: str, unit: str, text: str) -> list[Card]:
    """Return a card of stacked parts of a change, with a panel per run."""
    panels = []
    for replay in replays:
        steps = [(e.step, e.parts[name]) for e in replay.explanations if name in e.parts and e.parts[name].change.known]
        if steps:
            frame = figures.over_steps([step for step, _ in steps])
            frame["yaxis"] |= {"zeroline": True, "zerolinecolor": "#9aa5b1"}
            caption = f"{replay.name}, {unit}" if len(replays) > 1 else unit
            panels.append(Panel(caption=caption, traces=_stacked(steps), layout=frame))
    keys = [figures.Key(label=k, color=c, style="block", group=f"{name} {k}") for k, c in SHADES.items()]
    keys.append(figures.Key(label="whole change", color=INK, group=f"{name} change"))
    return _plots(title, text, panels, keys)


def _plots(title: str, text: str, panels: list[Panel], keys: list[figures.Key]) -> list[Card]:
    """Return a card of panels in one unit; empty without panels."""
    drawn = figures.same_scale(panels, False)
    return [Card(title=title, text=text, panels=drawn, keys=keys)] if panels else []


def _stacked(steps: Sequence[tuple[int, Decomposition]]) -> list[Trace]:
    """Return traces: bars of both parts with whiskers, and the whole change as a line in its band."""
    x, name = [step for step, _ in steps], steps[0][1].name
    traces: list[Trace] = []
    for part, shade in SHADES.items():
        estimates: list[Estimate] = [getattr(parts, part) for _, parts in steps]
        away = [rounded(e.high - e.point) or 0.0 for e in estimates]
        bars = figures.bar_trace(x, [e.point for e in estimates], part, shade, f"{name} {part}")
        bars["error_y"] = {"type": "data", "array": away, "color": MUTED, "thickness": 0.8, "width": 0}
        traces.append(bars | {"hovertemplate": "%{y:.3~g} ± %{error_y.array:.2~g}"})
    change, group = [parts.change for _, parts in steps], f"{name} change"
    edge = {"type": "scatter", "x": x, "mode": "lines", "line": {"width": 0}, "legendgroup": group, "hoverinfo": "skip"}
    traces.append({**edge, "y": [rounded(e.low) for e in change], "name": "low"})
    high = [rounded(e.high) for e in change]
    traces.append({**edge, "y": high, "name": "high", "fill": "tonexty", "fillcolor": BAND})
    whole = figures.line_trace(x, [e.point for e in change], "whole change", INK, group)
    return [*traces, whole | {"hovertemplate": "%{y:.3~g}"}]


def _entropy(replays: Sequence[Replay]) -> list[Card]:
    """Return a card of the accept length against entropy, with slopes through the first steps and a panel per run."""
    panels = []
    for replay in replays:
        seen = [e for e in replay.explanations if math.isfinite(e.entropy.point) and math.isfinite(e.length.point)]
        seen = [e for e in seen if e.slopes]  # none for the head beside history, whose cycles begin at changing places
        if len(seen) > 1:
            caption = f"{replay.name if len(replays) > 1 else 'accept length'}, tokens per pass"
            frame = layout("entropy, nats") | {"hovermode": "closest"}
            panels.append(Panel(caption=caption, traces=_cloud(seen), layout=frame))
    keys = [
        figures.Key(label=label, color=figures.color(i), style="dashed" if dash != "solid" else "solid", group=source)
        for i, (source, (dash, label)) in enumerate(FITS.items())
    ]
    return _plots("Accept length against entropy", ENTROPY, panels, keys)


def _cloud(seen: Sequence[Explanation]) -> list[Trace]:
    """Return a trace of the steps and one trace per slope."""
    x, y = ([rounded(getattr(e, name).point) for e in seen] for name in ("entropy", "length"))
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
        line = [rounded(middle[1] + slope.value.point * (end - middle[0])) for end in ends]
        traces.append(
            {
                "type": "scatter", "mode": "lines", "x": [rounded(end) for end in ends], "y": line, "name": label,
                "line": {"color": figures.color(i), "dash": dash, "width": 1.6}, "legendgroup": source,
                "hovertemplate": f"{label}: {slope.value.text()} per nat",
            }
        )  # fmt: skip
    return traces


def _controller(replays: Sequence[Replay]) -> list[Card]:
    """Return the controller's log as a table."""
    rows = [
        (
            f"{replay.name}, step {e.step}" if len(replays) > 1 else f"step {e.step}",
            e.state,
            e.action.why if e.action.kind in ("set_system", "set_length") else e.verdict.evidence,
            _action(e),
        )
        for replay in replays
        for e in replay.explanations
        if e.verdict.changed or e.action.kind != "none"
    ]
    heads = ("When", "State", "Evidence", "Proposed")
    return [Card(title="The controller's log", text=LOG, table=table(heads, rows), wide=True)] if replays else []


def _action(e: Explanation) -> str:
    value = "" if e.action.value is None else f": {e.action.value}"
    return f"{ACTIONS[e.action.kind]}{value}"


def _breakdown(replays: Sequence[Replay]) -> list[Card]:
    """Return a table of the final change by task, lag and position in the completion."""
    rows = []
    for replay in replays:
        for key, title in KEYS:
            kinds = {label: part for label, part in replay.breakdown[key].items() if label != "-1"}
            if len(replay.breakdown[key]) > 1:
                rows += [_row(replay, len(replays), f"{title} {label}", part) for label, part in kinds.items()]
    return [_parts_table("Where it moved", BREAKDOWN, rows)] if rows else []


def _by_turn(replays: Sequence[Replay]) -> list[Card]:
    """Return a table of the final change by turn, for runs with several kinds of turns."""
    rows = []
    for replay in replays:
        kinds = replay.breakdown["turn"]
        for label, part in kinds.items() if len(kinds) > 1 else ():
            which = "First cycle after an observation" if label == AFTER else f"Turn {label}"
            rows.append(_row(replay, len(replays), which, part))
    return [_parts_table("Drift by turn", BY_TURN, rows)] if rows else []


def _row(replay: Replay, replays: int, which: str, part: Decomposition) -> tuple[str, ...]:
    shown = (DASH if part.unidentified else estimate.text() for estimate in (part.entropy, part.mismatch))
    return (which if replays == 1 else f"{replay.name}: {which}", part.change.text(), *shown)


def _parts_table(title: str, text: str, rows: Sequence[tuple[str, ...]]) -> Card:
    return Card(title=title, text=text, table=table(("Of what", "Change", "Entropy", "Mismatch"), rows), wide=True)


def _distributions(runs: Sequence[tuple[str, Sequence[tuple[TokenProbs, TokenProbs]]]]) -> list[Card]:
    """Return a card with a panel per context; ``runs``: names with their contexts at the first and the last reading."""
    pairs = [(name, *pair) for name, contexts in runs for pair in contexts]
    pairs.sort(key=lambda pair: abs(pair[2].overlap - pair[1].overlap))
    apart = {(name, last.context): (name, first, last) for name, first, last in pairs}  # many completions begin alike
    pairs = sorted(apart.values(), key=lambda pair: -abs(pair[2].overlap - pair[1].overlap))
    many = len({name for name, *_ in pairs}) > 1
    panels = [_context(first, last, f"{name}: " if many else "") for name, first, last in pairs[:MAX_CONTEXTS]]
    keys = [figures.Key(label=label, color=shade, style="block", group=f"probs {label}") for label, shade, *_ in LINES]
    title = "Where the distributions moved"
    return [Card(title=title, text=DISTRIBUTIONS_TEXT, panels=panels, keys=keys, wide=True)] if panels else []


def _context(first: TokenProbs, last: TokenProbs, prefix: str) -> Panel:
    both, weight, text = (first, last), dict[int, float](), dict[int, str]()
    for reading in both:
        for token, name, p, q in zip(reading.ids, reading.tokens, reading.target, reading.draft, strict=True):
            weight[token] = max(weight.get(token, 0.0), p, q)
            text[token] = _short(visible(name))
    tokens = sorted(weight, key=lambda token: -weight[token])[:MAX_TOKENS]
    names = [text[token] for token in tokens]
    names = [f"{name} #{token}" if names.count(name) > 1 else name for name, token in zip(names, tokens, strict=True)]
    traces: list[Trace] = []
    for label, shade, when, distribution in LINES:
        known = dict(zip(both[when].ids, getattr(both[when], distribution), strict=True))
        traces.append(
            {
                "type": "bar", "x": names, "y": [known.get(token, 0.0) for token in tokens], "name": label,
                "marker": {"color": shade, "line": {"width": 0}}, "legendgroup": f"probs {label}",
                "hovertemplate": "%{y:.3f}",
            }
        )  # fmt: skip
    context = visible(last.context)
    context = context if len(context) <= CONTEXT_LENGTH else "…" + context[-CONTEXT_LENGTH:]
    frame = layout("next token") | {"barmode": "group", "bargap": 0.25}
    frame["xaxis"] |= {"type": "category"}
    frame["yaxis"] |= {"range": [0, 1]}
    caption = f"{prefix}after “{context}”: overlap {first.overlap:.2f} → {last.overlap:.2f}"
    return Panel(caption=caption, traces=traces, layout=frame)


def _short(name: str) -> str:
    """Shorten a token to fit below its bars: plotly would rotate or overlap longer labels."""
    return name if len(name) <= LABEL_LENGTH else f"{name[: LABEL_LENGTH - 1]}…"

"""The figures of an adaptation: what is drawn, and the words that explain it. ``page`` puts them on a page."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from bebop.adaptation.evaluation import Measured
from bebop.adaptation.probe import Array, Probe
from bebop.adaptation.results import Results, Snapshot, boundary_share
from bebop.config_adapt import AdaptConfig
from bebop.intervals import Interval
from bebop.report.adapted_table import SYSTEMS, drafts, tasks
from bebop.report.document import Card, table
from bebop.report.figures import PALETTE, Key, Panel, Trace, layout, line_trace, rounded, same_scale

BEFORE, AFTER = "#9aa5b1", PALETTE[0]
SHADES = {"before": BEFORE, "after": AFTER}
KEYS = [Key(label=when, color=shade, group=when) for when, shade in SHADES.items()]
ENTROPIES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, np.inf)  # edges of bins, nats
PLACES = (0, 1, 4, 8, 16, 32, 64, 128, 256, 1 << 40)
FEWEST = 20  # tokens in a bin that is drawn
MARGIN = 0.01  # differences of acceptance below it are no advantage


def length_card(results: Results) -> Card:
    """Accept length over all and by task."""
    names = tasks(results)
    labels = ["all", *names] if len(names) > 1 else ["all"]

    def lengths(decoded: Measured) -> list[Interval]:
        return [(decoded if name == "all" else decoded.of(name)).interval("accept_length") for name in labels]

    rise = results.change("bebop", "accept_length")
    text = (
        "Tokens per verification pass while decoding held-out prompts: accepted drafts plus the one token that a pass "
        f"always yields. With sampled drafts it changed by {rise}, with greedy drafts by "
        f"{results.change('target_only', 'accept_length')}. Bars are 95 % bootstrap intervals over answers; the "
        "changes are taken prompt by prompt."
    )
    panels = _by_system(results, lengths, labels, "tokens per pass", "task")
    return Card(title="Accept length", text=text, panels=panels, keys=KEYS)


def position_card(results: Results) -> Card:
    """Acceptance at each draft position."""
    positions = range(1, drafts(results) + 1)

    def rates(decoded: Measured) -> list[Interval]:
        return [decoded.interval("accepted", k) for k in positions]

    text = (
        "Share of drafts accepted at each position, among the cycles whose earlier drafts were all accepted. Sampled "
        "drafts are accepted with the overlap of head and model, greedy ones with the model's probability of the "
        "head's first choice. A line that falls steeply means that the head loses its way when it feeds on its own "
        "states; training over several recursive steps is meant to flatten it."
    )
    panels = _by_system(results, rates, [str(k) for k in positions], "accepted / reached", "draft")
    return Card(title="Acceptance per draft position", text=text, panels=panels, keys=KEYS)


def _by_system(
    results: Results, numbers: Callable[[Measured], list[Interval]], labels: Sequence[str], unit: str, x_title: str
) -> list[Panel]:
    """What decoding gave with sampled and with greedy drafts, before and after."""
    panels = [
        _dots(results, lambda s, system=system: numbers(s.decoded[system]), labels, f"{name}, {unit}", x_title)  # type: ignore[misc]
        for system, name in SYSTEMS.items()
    ]
    return same_scale(panels, False)


def training_cards(config: AdaptConfig, results: Results, steps: Sequence[dict[str, Any]]) -> list[Card]:
    """Loss and gradient over training, and the held-out numbers on the way; nothing for what was not recorded."""
    warm, objective = config.train.warm(results.fresh), config.head.objective
    phases = [(config.train.warm_objective, steps[:warm]), (objective, steps[warm:])] if warm else [(objective, steps)]
    shades = [PALETTE[4], AFTER] if warm else [AFTER]
    panels = []
    for metric, caption in (("head/loss", "loss"), ("head/grad_norm", "gradient norm, before clipping")):
        drawn = [
            _line(part, metric, f"{name} {caption}", shade) for (name, part), shade in zip(phases, shades, strict=True)
        ]
        panels.append(Panel(caption=caption, traces=drawn, layout=layout("step", zero=True)))
    names = [name if warm == 0 or i else f"{name} (warm-up)" for i, (name, _) in enumerate(phases)]
    keys = [Key(label=name, color=shade) for name, shade in zip(names, shades, strict=True)] if warm else []
    after = f", after {warm} steps of {config.train.warm_objective}: their losses must not be compared" if warm else ""
    text = (
        f"The objective is {objective}{after}. Single steps swing with their sequences. "
        "The gradient norm belongs to the head alone: the backbone is frozen."
    )
    cards = [Card(title="Training", text=text, panels=panels, keys=keys)]
    return cards + _held_out(steps, drafts(results))


def _held_out(steps: Sequence[dict[str, Any]], count: int) -> list[Card]:
    """The evaluations during training."""
    seen = [step for step in steps if "eval/accept_length" in step]
    if not seen:
        return []
    lines = {
        "accept length": [("eval/accept_length", "sampled drafts"), ("eval/accept_length_greedy", "greedy drafts")],
        "overlap of head and model": [(f"eval/overlap/{k}", f"draft {k}") for k in range(1, count + 1)],
        "entropy of the head's distribution, draft 1, nats": [("eval/draft_entropy", "draft entropy")],
    }
    panels, keys = [], []
    for caption, drawn in lines.items():
        first = 2 if caption.startswith("overlap") else 0
        shades = [PALETTE[first + i] for i in range(len(drawn))]
        traces = [_line(seen, metric, name, shade) for (metric, name), shade in zip(drawn, shades, strict=True)]
        panels.append(Panel(caption=caption, traces=traces, layout=layout("step")))
        keys += [Key(label=n, color=s) for (_, n), s in zip(drawn, shades, strict=True)] if len(drawn) > 1 else []
    text = (
        "Estimated without decoding, on up to 64 held-out answers of the model, the same ones each time. The accept "
        "length is the mean over all places of the answers at which a cycle could begin; decoding begins its cycles "
        "elsewhere, so that the figures above differ a little. Still rising at the end: more steps would help."
    )
    return [Card(title="On the way", text=text, panels=panels, keys=keys)]


def entropy_card(results: Results) -> Card:
    """First drafts by the entropy of the model's distribution at their place."""
    labels = [_span(a, b) for a, b in pairwise(ENTROPIES)]
    probe = results.before.probe
    bins = _bins(probe.numbers["target_entropy"][:, 0], ENTROPIES)
    text = (
        "The first draft at every token of the held-out answers, by the entropy of the model's own distribution there "
        "(the same text for both heads). Greedy drafts must fall where the model is uncertain, since they are accepted "
        f"with a single probability; sampled drafts need not. Bins of fewer than {FEWEST} tokens are left out; the "
        "last panel shows how many tokens each holds."
    )
    panels = [
        *_by_bin(results, bins, labels, "target entropy, nats"),
        _share(probe, bins, labels, "target entropy, nats"),
    ]
    return Card(title="Acceptance against entropy", text=text, panels=panels, keys=KEYS)


def place_card(results: Results) -> Card:
    """First drafts by their place in the answer."""
    labels = [f"{a}" if b == a + 1 else f"{a}+" if b == PLACES[-1] else f"{a}-{b - 1}" for a, b in pairwise(PLACES)]
    bins = _bins(results.before.probe.place.astype(float), PLACES)
    text = (
        "The first draft by its place in the answer: 0 is the answer's first token, drafted from the prompt alone. A "
        "fall towards the end would mean that the head was trained on shorter answers than it drafts."
    )
    panels = _by_bin(results, bins, labels, "place in the answer")
    return Card(title="Acceptance by place in the answer", text=text, panels=panels, keys=KEYS)


def boundary_card(results: Results) -> Card:
    """Token by token: overlap against the probability of the greedy draft, and who wins where."""
    panels = [_density(s.probe, when) for when, s in (("before", results.before), ("after", results.after))]
    share = boundary_share(results.after.probe)
    text = (
        "Every first draft by what a greedy draft would be accepted with (across) and a sampled one (up). Above the "
        "diagonal sampling is the better choice, below it greedy is; darker cells hold more tokens, by powers of ten. "
        f"After adaptation the sampled draft is ahead at a share of {share} of the tokens; where the model is "
        f"certain such leads are tiny, so the table also counts those above {MARGIN:g}."
    )
    by = f"by > {MARGIN:g}"
    heads = ("Tokens", "Count", "Sampled ahead", f"Sampled {by}", f"Greedy {by}", "Mean difference")
    names = tasks(results)
    lines = [
        _sides(s.probe, task, f"{when}, {task or 'all'}")
        for task in (None, *(names if len(names) > 1 else ()))
        for when, s in (("before", results.before), ("after", results.after))
    ]
    return Card(title="Decision boundary", text=text, panels=panels, table=table(heads, lines))


def _sides(probe: Probe, task: str | None, label: str) -> tuple[str, ...]:
    """Shares on each side of the boundary, of one task or of all."""
    chosen = np.isfinite(probe.numbers["overlap"][:, 0]) & (True if task is None else probe.task == task)
    lead = np.where(chosen, probe.numbers["overlap"][:, 0] - probe.numbers["target_only"][:, 0], np.nan)

    def share(hit: Any) -> str:
        return _percent(probe.mean(np.where(chosen, hit, np.nan)))

    sides = (share(lead > 0), share(lead > MARGIN), share(lead < -MARGIN))
    return (label, f"{int(chosen.sum()):,}", *sides, str(probe.mean(lead)))


def _percent(interval: Interval) -> str:
    low, value, high = (100 * x for x in (interval.low, interval.value, interval.high))
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def _density(probe: Probe, when: str) -> Panel:
    """Tokens in cells of a twentieth each, on a logarithmic scale of colours."""
    edges = np.linspace(0, 1, 21)
    across, up = probe.numbers["target_only"][:, 0], probe.numbers["overlap"][:, 0]
    known = np.isfinite(across) & np.isfinite(up)
    counts = np.histogram2d(up[known].clip(0, 1), across[known].clip(0, 1), edges)[0]
    middle = [round(float(x), 3) for x in (edges[:-1] + edges[1:]) / 2]
    colour = [[None if n == 0 else round(float(np.log10(n)), 3) for n in row] for row in counts]
    cells: Trace = {
        "type": "heatmap", "x": middle, "y": middle, "z": colour, "customdata": counts.astype(int).tolist(),
        "colorscale": [[0, "#cfe0f2"], [1, "#123b66"]], "showscale": False, "xgap": 1, "ygap": 1, "hoverongaps": False,
        "hovertemplate": "greedy %{x:.2f}, sampled %{y:.2f}: %{customdata} tokens<extra></extra>",
    }  # fmt: skip
    diagonal: Trace = {
        "type": "scatter", "x": [0, 1], "y": [0, 1], "mode": "lines", "hoverinfo": "skip",
        "line": {"color": PALETTE[1], "width": 1.5, "dash": "dash"},
    }  # fmt: skip
    frame = layout("p(argmax q): greedy draft accepted")
    frame["xaxis"] |= {"range": [0, 1], "fixedrange": True}
    frame["yaxis"] |= {"range": [0, 1]}
    return Panel(
        caption=f"{when}: overlap, sampled draft accepted", traces=[cells, diagonal],
        layout=frame | {"hovermode": "closest"},
    )  # fmt: skip


def _bins(values: Array, edges: Sequence[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The bin of each value; -1 where there is none."""
    bins = np.searchsorted(np.asarray(edges, float), values, side="right") - 1
    return np.where(np.isfinite(values), bins, -1)


def _by_bin(results: Results, bins: Any, labels: Sequence[str], x_title: str) -> list[Panel]:
    """First drafts of both kinds, averaged in bins, before and after."""
    shown = [i for i in range(len(labels)) if (bins == i).sum() >= FEWEST]
    kinds = {"overlap": "sampled drafts: overlap", "target_only": "greedy drafts: p(argmax q)"}

    def means(name: str) -> Callable[[Snapshot], list[Interval]]:
        return lambda s: [s.probe.mean(np.where(bins == i, s.probe.numbers[name][:, 0], np.nan)) for i in shown]

    names = [labels[i] for i in shown]
    return same_scale([_dots(results, means(name), names, caption, x_title) for name, caption in kinds.items()], False)


def _share(probe: Probe, bins: Any, labels: Sequence[str], x_title: str) -> Panel:
    """How many tokens each bin holds."""
    total = max(1, int((bins >= 0).sum()))
    heights = [round(float((bins == i).sum()) / total, 4) for i in range(len(labels))]
    bar: Trace = {
        "type": "bar", "x": list(labels), "y": heights, "marker": {"color": "#cbd2d9"}, "hovertemplate": "%{y:.1%}",
        "name": "tokens",
    }  # fmt: skip
    frame = layout(x_title, zero=True)
    frame["xaxis"] |= {"type": "category", "fixedrange": True}
    return Panel(caption="share of tokens", traces=[bar], layout=frame)


def _dots(
    results: Results, numbers: Callable[[Snapshot], list[Interval]], labels: Sequence[str], caption: str, x_title: str
) -> Panel:
    """Intervals before and after side by side over labelled places."""
    traces = []
    for shift, (when, shade) in zip((-0.08, 0.08), SHADES.items(), strict=True):
        intervals = numbers(getattr(results, when))
        traces.append(_errors([i + shift for i in range(len(labels))], intervals, when, shade))
    frame = layout(x_title)
    places = list(range(len(labels)))
    frame["xaxis"] |= {"tickvals": places, "ticktext": list(labels), "range": [-0.5, len(labels) - 0.5]}
    frame["xaxis"] |= {"fixedrange": True}
    return Panel(caption=caption, traces=traces, layout=frame | {"hovermode": "closest"})


def _errors(places: Sequence[float], intervals: Sequence[Interval], name: str, shade: str) -> Trace:
    """Points with error bars."""
    up = [rounded(i.high - i.value) for i in intervals]
    down = [rounded(i.value - i.low) for i in intervals]
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": shade, "width": 4}
    return {
        "type": "scatter", "x": [round(x, 3) for x in places], "y": [rounded(i.value) for i in intervals],
        "mode": "markers", "marker": {"color": shade, "size": 8}, "error_y": bars, "name": name, "legendgroup": name,
        "text": [str(i) for i in intervals], "hovertemplate": "%{text}",
    }  # fmt: skip


def _line(steps: Sequence[dict[str, Any]], metric: str, name: str, shade: str) -> Trace:
    """A number over the steps at which it was recorded."""
    recorded = [step for step in steps if step.get(metric) is not None]
    return line_trace([step["step"] for step in recorded], [step[metric] for step in recorded], name, shade)


def _span(low: float, high: float) -> str:
    """A bin of entropies as text."""
    short = [f"{x:g}".removeprefix("0") or "0" for x in (low, high)]
    return f"<{short[1]}" if low == 0 else f">{short[0]}" if np.isinf(high) else "-".join(short)

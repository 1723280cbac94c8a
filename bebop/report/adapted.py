"""Results of an adaptation: the page ``report.html`` with before and after, and the checkpoint's model card.

Both take their numbers from ``rows``, so they agree.
"""

import dataclasses
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
import transformers
import yaml

from bebop import __version__
from bebop.adaptation.evaluation import Measured, change
from bebop.adaptation.probe import Array, Probe
from bebop.adaptation.results import Results, Snapshot, boundary_share
from bebop.command import shown_command, shown_path
from bebop.config.adapt import AdaptConfig
from bebop.config.job import BUILT_IN
from bebop.metrics.intervals import Interval
from bebop.metrics.sinks import read_jsonl
from bebop.report import made
from bebop.report.document import Card, document, opened, table
from bebop.report.figures import PALETTE, Key, Panel, Trace, layout, line_trace, rounded, same_scale
from bebop.report.runs import Run, origin
from bebop.report.verdict import Said
from bebop.run_dir.checkpoints import MODEL
from bebop.systems import SYSTEMS as ALL_SYSTEMS

SYSTEMS = {"bebop": "sampled drafts", "target_only": "greedy drafts"}  # decoding system -> name for readers
DISTRIBUTIONS = {  # sums that describe the distributions of head and model rather than acceptance counts
    "overlap": "overlap Σ min(p, q)",
    "target_only": "p(argmax q)",
    "draft_entropy": "draft entropy, nats",
    "target_entropy": "target entropy, nats",
}
HEADS = ("Number", "Before", "After", "Change")
BEFORE, AFTER = "#9aa5b1", PALETTE[0]
SHADES = {"before": BEFORE, "after": AFTER}
KEYS = [Key(label=when, color=shade, group=when) for when, shade in SHADES.items()]
ENTROPIES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, np.inf)  # edges of bins, nats
PLACES = (0, 1, 4, 8, 16, 32, 64, 128, 256, 1 << 40)
FEWEST = 20  # tokens in a bin, below which it is not drawn
MARGIN = 0.01  # smaller differences of acceptance count as no advantage
TAGS = ["speculative-decoding", "mtp", "multi-token-prediction", "rejection-sampling", "bebop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One quantity of the head before and after training, on the same held-out prompts."""

    system: str  # "sampled drafts" or "greedy drafts"
    label: str
    before: Interval
    after: Interval
    change: Interval


def rows(results: Results) -> Iterator[Row]:
    """Yield every row: accept length (overall and by task), acceptance per position, and statistics of the
    distributions at those positions.
    """
    for system in results.after.decoded:
        yield _row(results, system, "accept length", "accept_length")
        for task in tasks(results) if len(tasks(results)) > 1 else ():
            yield _row(results, system, f"accept length, {task}", "accept_length", task=task)
        yield _row(results, system, "acceptance per draft", "accepted")
        for k in range(1, drafts(results) + 1):
            yield _row(results, system, f"acceptance, draft {k}", "accepted", k)
        # Greedy drafts have a one-hot distribution, so its overlap and entropy add nothing.
        for name, label in DISTRIBUTIONS.items() if ALL_SYSTEMS[system].sampled else ():
            yield _row(results, system, label, name)


def drafts(results: Results) -> int:
    """Return K, the number of drafts in a cycle."""
    return int(results.after.decoded["bebop"].reached.shape[1])


def tasks(results: Results) -> list[str]:
    """Return the tasks of the held-out prompts, in the order of their appearance."""
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


def written(folder: Path, config: AdaptConfig) -> Path:
    """Return the folder to which an adaptation writes its checkpoint."""
    return Path(config.out or folder / MODEL)


def judge(folder: Path, config: AdaptConfig, results: Results) -> Said:
    """Return verdict and advice on a finished adaptation."""
    change, after = results.change("bebop", "accept_length"), results.after.decoded["bebop"].interval("accept_length")
    where = f"on {results.held_out()}, with {drafts(results)} drafts a cycle"
    if change.low <= 0 <= change.high:
        verdict = f"The accept length did not move clearly ({change}): it is {after} {where}."
        return Said(
            verdict=verdict,
            advice="Train on more text (data.sequences), for more steps (train.steps), or try another head.lr.",
        )
    if change.high < 0:
        verdict = f"The accept length fell by {-change.value:.3f} to {after} {where}."
        return Said(verdict=verdict, advice="Keep the head that the model came with; try a lower head.lr.")
    verdict = f"The accept length rose by {change} to {after} {where}."
    tasks = [one for one in origin(folder)["given"] or () if one.startswith("task")]
    # Results without decoding come from a model that needs an external engine.
    engine = ["rollout=sglang"] if results.estimated else []
    command = shown_command("run", f"model.path={shown_path(written(folder, config))}", *engine, *tasks)
    return Said(verdict=verdict, advice="Train the policy with this head.", command=command)


# ---- the page


def write_page(folder: Path, config: AdaptConfig, results: Results) -> None:
    """Write ``report.html`` from the results and from the ``metrics.jsonl`` in the same folder."""
    (folder / "report.html").write_text(render_page(folder, config, results), encoding="utf-8")


def render_page(folder: Path, config: AdaptConfig, results: Results) -> str:
    """Return the adaptation's report as HTML."""
    cards = [
        _summary(config, results),
        length_card(results),
        position_card(results),
        *training_cards(config, results, read_jsonl(folder / "metrics.jsonl")),
        entropy_card(results),
        boundary_card(results),
        place_card(results),
        *made.cards([Run(name=model_name(config), steps=[], columns={}, **origin(folder))]),
    ]
    title, said = f"{model_name(config)}, {config.head.objective}", judge(folder, config, results)
    return document("Bebop · adaptation of an MTP head", title, cards, opened([("", said.verdict, said.shown)]))


def _summary(config: AdaptConfig, results: Results) -> Card:
    """Return the card with the before-and-after table and a description of the training."""
    lines = [(f"{r.system}: {r.label}", str(r.before), str(r.after), str(r.change)) for r in rows(results)]
    minutes = sum(results.seconds.values()) / 60
    text = (
        f"{results.steps} steps of {config.head.objective} over {config.head.depth} recursive steps on "
        f"{data_text(config, results)}; {minutes:.1f} minutes in all. {_how(results)} "
        f"{results.held_out()} with {drafts(results)} drafts a cycle; in "
        "brackets 95 % bootstrap intervals over completions, those of the change prompt by prompt. Overlap estimates "
        "the same acceptance as the counts above it, with less noise."
    )
    return Card(title="Before and after", text=text, table=table(HEADS, lines), wide=True)


def _how(results: Results) -> str:
    """Return the words that say how acceptance was measured, which precede the prompts."""
    if results.estimated:
        return "Estimated at every place of the model's completions, without decoding, for"
    return "Measured by decoding"


def length_card(results: Results) -> Card:
    """Return the card of the accept length, overall and by task."""
    names = tasks(results)
    labels = ["all", *names] if len(names) > 1 else ["all"]

    def lengths(decoded: Measured) -> list[Interval]:
        return [(decoded if name == "all" else decoded.of(name)).interval("accept_length") for name in labels]

    rise = results.change("bebop", "accept_length")
    place = ", estimated on completions of" if results.estimated else " while decoding"
    text = (
        f"Tokens per verification pass{place} held-out prompts: accepted drafts plus the one token that a pass "
        f"always yields. With sampled drafts it changed by {rise}, with greedy drafts by "
        f"{results.change('target_only', 'accept_length')}. Bars are 95 % bootstrap intervals over completions; the "
        "changes are taken prompt by prompt."
    )
    panels = _by_system(results, lengths, labels, "tokens per pass", "task")
    return Card(title="Accept length", text=text, panels=panels, keys=KEYS)


def position_card(results: Results) -> Card:
    """Return the card of the acceptance at each draft position."""
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
    """Return one panel each for sampled and greedy drafts, with values before and after."""
    panels = [
        _dots(results, lambda s, system=system: numbers(s.decoded[system]), labels, f"{name}, {unit}", x_title)  # type: ignore[misc]
        for system, name in SYSTEMS.items()
    ]
    return same_scale(panels, False)


def training_cards(config: AdaptConfig, results: Results, steps: Sequence[dict[str, Any]]) -> list[Card]:
    """Return the cards of loss, gradient norm and held-out evaluations; unrecorded quantities are left out."""
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
    """Return the card of the evaluations during training; empty if there were none."""
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
        "Estimated without decoding, on up to 64 held-out completions of the model, the same ones each time. The "
        "accept length is the mean over all places of the completions at which a cycle could begin; decoding begins "
        "its cycles elsewhere, so that the figures above differ a little. Still rising at the end: more steps would "
        "help."
    )
    return [Card(title="On the way", text=text, panels=panels, keys=keys)]


def entropy_card(results: Results) -> Card:
    """Return the card of first drafts by the entropy of the model's distribution at their place."""
    labels = [_span(a, b) for a, b in pairwise(ENTROPIES)]
    probe = results.before.probe
    bins = _bins(probe.numbers["target_entropy"][:, 0], ENTROPIES)
    text = (
        "The first draft at every token of the held-out completions, by the entropy of the model's own distribution "
        "there (the same text for both heads). Greedy drafts must fall where the model is uncertain, since they are "
        f"accepted with a single probability; sampled drafts need not. Bins of fewer than {FEWEST} tokens are left "
        "out; the last panel shows how many tokens each holds."
    )
    panels = [
        *_by_bin(results, bins, labels, "target entropy, nats"),
        _share(probe, bins, labels, "target entropy, nats"),
    ]
    return Card(title="Acceptance against entropy", text=text, panels=panels, keys=KEYS)


def place_card(results: Results) -> Card:
    """Return the card of first drafts by their place in the completion."""
    labels = [f"{a}" if b == a + 1 else f"{a}+" if b == PLACES[-1] else f"{a}-{b - 1}" for a, b in pairwise(PLACES)]
    bins = _bins(results.before.probe.place.astype(float), PLACES)
    text = (
        "The first draft by its place in the completion: 0 is the completion's first token, drafted from the prompt "
        "alone. A fall towards the end would mean that the head was trained on shorter completions than it drafts."
    )
    panels = _by_bin(results, bins, labels, "place in the completion")
    return Card(title="Acceptance by place in the completion", text=text, panels=panels, keys=KEYS)


def boundary_card(results: Results) -> Card:
    """Return the card of overlap against the probability of the greedy draft, token by token, and which one leads."""
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
    """Return a table row with the shares on each side of the boundary, for one task or all."""
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
    """Return a panel of token counts in cells of a twentieth each, on a logarithmic colour scale."""
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
    """Return the bin of each value; -1 for a value that is not finite."""
    bins = np.searchsorted(np.asarray(edges, float), values, side="right") - 1
    return np.where(np.isfinite(values), bins, -1)


def _by_bin(results: Results, bins: Any, labels: Sequence[str], x_title: str) -> list[Panel]:
    """Return panels of sampled and greedy first drafts, averaged in bins, before and after."""
    shown = [i for i in range(len(labels)) if (bins == i).sum() >= FEWEST]
    kinds = {"overlap": "sampled drafts: overlap", "target_only": "greedy drafts: p(argmax q)"}

    def means(name: str) -> Callable[[Snapshot], list[Interval]]:
        return lambda s: [s.probe.mean(np.where(bins == i, s.probe.numbers[name][:, 0], np.nan)) for i in shown]

    names = [labels[i] for i in shown]
    return same_scale([_dots(results, means(name), names, caption, x_title) for name, caption in kinds.items()], False)


def _share(probe: Probe, bins: Any, labels: Sequence[str], x_title: str) -> Panel:
    """Return a panel of the share of tokens in each bin."""
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
    """Return a panel of intervals before and after, side by side over labels."""
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
    """Return a trace of points with error bars."""
    up = [rounded(i.high - i.value) for i in intervals]
    down = [rounded(i.value - i.low) for i in intervals]
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "color": shade, "width": 4}
    return {
        "type": "scatter", "x": [round(x, 3) for x in places], "y": [rounded(i.value) for i in intervals],
        "mode": "markers", "marker": {"color": shade, "size": 8}, "error_y": bars, "name": name, "legendgroup": name,
        "text": [str(i) for i in intervals], "hovertemplate": "%{text}",
    }  # fmt: skip


def _line(steps: Sequence[dict[str, Any]], metric: str, name: str, shade: str) -> Trace:
    """Return a line of a metric over the steps at which it was recorded."""
    recorded = [step for step in steps if step.get(metric) is not None]
    return line_trace([step["step"] for step in recorded], [step[metric] for step in recorded], name, shade)


def _span(low: float, high: float) -> str:
    """Return a bin of entropies as text."""
    short = [f"{x:g}".removeprefix("0") or "0" for x in (low, high)]
    return f"<{short[1]}" if low == 0 else f">{short[0]}" if np.isinf(high) else "-".join(short)


# ---- the model card


def write_card(out: Path, config: AdaptConfig, results: Results) -> None:
    """Write ``README.md`` into the folder of the adapted checkpoint; it names no folder of this machine."""
    (out / "README.md").write_text(render_card(config, results), encoding="utf-8")


def render_card(config: AdaptConfig, results: Results) -> str:
    """Return the model card as Markdown."""
    parts = (_front(), _trained(config, results), _acceptance(results), _serving(drafts(results)), _made_with(config))
    return "\n".join(parts)


def model_name(config: AdaptConfig) -> str:
    """Return the name of the adapted model: the built-in name, or the last part of its folder."""
    return config.model.path if config.model.path in BUILT_IN else Path(config.model.path).resolve().name


def data_text(config: AdaptConfig, results: Results) -> str:
    """Return a phrase that describes the training data."""
    data, sampling = config.data, sampling_words(config)
    size = f"{results.rows:,} sequences with {results.tokens:,} completion tokens"
    if data.source == "file":
        return f"{size} from {PurePath(str(data.path)).name}; target distributions at {sampling}"
    return f"{size}, completions that the model itself sampled at {sampling}"


def sampling_words(config: AdaptConfig) -> str:
    """Return the sampling settings that differ from the defaults, after the temperature, as text."""
    sampling = config.data.sampling
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    extra = [f"{name} {getattr(sampling, name):g}" for name, value in plain.items() if getattr(sampling, name) != value]
    return ", ".join([f"temperature {sampling.temperature:g}", *extra])


def _front() -> str:
    """Return the YAML front matter that model hubs read."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n"


def _trained(config: AdaptConfig, results: Results) -> str:
    head, train = config.head, config.train
    warm = min(train.warm(results.fresh), results.steps)
    began = "a fresh one, made from the last layer" if results.fresh else "the one that came with the checkpoint"
    warmed = f", after {warm} steps of `{train.warm_objective}`" if warm else ""
    lines = {
        "Objective": f"`{head.objective}`{warmed}",
        "Depth": f"{head.depth} recursive steps",
        "Head": began,
        "Data": data_text(config, results),
        "Tasks": ", ".join(tasks(results)),
        "Steps": f"{results.steps}, {train.rows_per_step} sequences each",
        "Optimiser": f"AdamW, learning rate {head.lr:g} after {head.lr_warmup_steps} steps of warm-up, "
        f"weight decay {head.weight_decay:g}, gradients clipped at {head.max_grad_norm:g}",
        "Seed": str(config.seed),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in lines.items())
    return (
        f"# {model_name(config)} with an adapted MTP head\n\n"
        "The multi-token-prediction head of this checkpoint was trained on the acceptance of its own drafts.\n"
        "Backbone, embedding and language-model head are those of the original, bit for bit: what the model says\n"
        "is unchanged, how fast it can be decoded is what changed.\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _acceptance(results: Results) -> str:
    """Return the acceptance tables of both systems as Markdown."""
    k = drafts(results)
    text = (
        f"## Acceptance\n\n{results.held_out()}, {k} drafts a cycle, 95 % bootstrap intervals over completions. Accept "
        "length is tokens per\nverification pass (1 is plain decoding); acceptance of draft k is among the cycles that "
        "reached it.\n"
    )
    for system, group in groupby(rows(results), lambda row: row.system):
        body = "\n".join(f"| {r.label} | {r.before} | {r.after} | {r.change} |" for r in group)
        text += f"\n**{system.capitalize()}**\n\n| | before | after | change |\n|---|---|---|---|\n{body}\n"
    return text


def _serving(k: int) -> str:
    return f"""## Serving

SGLang 0.5.14 or later, which drafts with the head and accepts by rejection sampling, so that completions keep the
distribution of the model:

    python -m sglang.launch_server --model-path DIR --speculative-algorithm NEXTN \\
        --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1} \\
        --speculative-use-rejection-sampling

Reinforcement learning with Bebop, whose rollouts draft with the head:

    python -m bebop.run model=folder model.path=DIR decoding.draft_tokens={k}
"""


def _made_with(config: AdaptConfig) -> str:
    """Return the section with versions and configuration."""
    versions = {"bebop-rl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"Python": platform.python_version()}
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"## Made with\n\n{made}; `python -m bebop.adapt` with:\n\n```yaml\n{_public(config)}```\n"


def _public(config: AdaptConfig) -> str:
    """Return the configuration as YAML, with only the last part of paths and without this run's output folders."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    values["model"]["path"] = model_name(config)
    for section in ("data", "task"):
        path = values[section]["path"]
        values[section]["path"] = path and PurePath(path).name
    given = values["task"]["reward"]
    values["task"]["reward"] = PurePath(given).name if isinstance(given, str) else [PurePath(one).name for one in given]
    for name in ("dir", "out", "resume", "progress", "tensorboard"):
        del values[name]
    return yaml.safe_dump(values, sort_keys=False)

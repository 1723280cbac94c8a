"""HTML page of a simulation: where the time goes, the best split of GPUs, where speculation pays."""

from collections.abc import Sequence
from typing import Any

from bebop.config.simulate import SimulateConfig
from bebop.report.document import Card, document, opened, table
from bebop.report.figures import GRID, INK, Panel, color
from bebop.simulation.run import Simulated
from bebop.simulation.search import Speculation, Split

MARK = "Predicted by python -m bebop.simulate, not measured."


def summary(result: Simulated) -> list[tuple[str, str]]:
    """Return names and values of one job's main results, as printed."""
    return [
        ("step", f"{result.step_seconds:.3g} s"),
        ("trajectories", f"{result.trajectories_per_second:.3g} /s"),
        ("tokens", f"{result.tokens_per_second:.3g} /s"),
        ("accept length", f"{result.accept_length:.3g}"),
        ("trainer idle", f"{100 * result.trainer_idle:.1f} %"),
        ("rollouts idle", f"{100 * result.rollout_idle:.1f} %"),
        ("staleness, mean and most", f"{result.staleness_mean:.3g}, {result.staleness_max:.0f}"),
    ]


def write(config: SimulateConfig, result: Simulated, shared: Sequence[Split], gains: Sequence[Speculation]) -> str:
    """Return the page as HTML."""
    cards = [
        Card(title="The job", text=MARK, table=table(("number", "predicted"), [list(row) for row in summary(result)])),
        _steps(result),
    ]
    if shared:
        cards.append(_split(config, shared))
    if gains:
        cards.append(_gains(gains))
    fleet = config.fleet
    title = f"{fleet.workers} workers of {fleet.slots} slots, staleness {fleet.staleness}"
    best = max(shared, key=lambda split: split.result.trajectories_per_second, default=None)
    advice = MARK if best is None else f"{MARK} The most trajectories a second: {_named(best)}."
    verdict = f"{result.trajectories_per_second:.3g} trajectories a second, a step in {result.step_seconds:.3g} s."
    return document("simulation", title, cards, opened([("", verdict, advice)]))


def _named(split: Split) -> str:
    return f"{split.trainer_gpus} GPUs for the trainer, {split.workers} rollout workers"


def _panel(caption: str, traces: list[dict[str, Any]], x: str, y: str, **layout: Any) -> Panel:
    axis = {"gridcolor": GRID, "zerolinecolor": GRID}
    return Panel(
        caption=caption,
        traces=traces,
        layout={
            "xaxis": {"title": {"text": x}, **axis, **layout.pop("xaxis", {})},
            "yaxis": {"title": {"text": y}, "rangemode": "tozero", **axis},
            "legend": {"orientation": "h", "y": -0.35},
            "margin": {"l": 60, "r": 10, "t": 10, "b": 40},
            "font": {"color": INK, "size": 12},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            **layout,
        },
    )


def _steps(result: Simulated) -> Card:
    steps = list(range(1, len(result.rows) + 1))
    parts = ("update", "sync", "idle", "monitor")
    traces: list[dict[str, Any]] = [
        {"type": "bar", "name": part, "x": steps, "y": [row[f"time/{part}"] for row in result.rows],
         "marker": {"color": color(i)}}
        for i, part in enumerate(parts)
    ]  # fmt: skip
    rollout = [row["time/rollout"] for row in result.rows]
    traces.append({"type": "scatter", "name": "rollout", "x": steps, "y": rollout, "line": {"color": INK}})
    return Card(
        title="Where the time goes",
        text="Bars: the trainer's step. Line: seconds of decoding, on average over workers; below the bars they wait.",
        panels=[_panel("seconds of each step", traces, "step", "seconds", barmode="stack", showlegend=True)],
    )


def _split(config: SimulateConfig, shared: Sequence[Split]) -> Card:
    gpus = [split.trainer_gpus for split in shared]
    rate = [split.result.trajectories_per_second for split in shared]
    idle = [("trainer", [100 * s.result.trainer_idle for s in shared]),
            ("rollouts", [100 * s.result.rollout_idle for s in shared])]  # fmt: skip
    lines = [{"type": "scatter", "name": name, "x": gpus, "y": y, "line": {"color": color(i + 1)}}
             for i, (name, y) in enumerate(idle)]  # fmt: skip
    first = [{"type": "scatter", "x": gpus, "y": rate, "name": "trajectories", "line": {"color": color(0)}}]
    return Card(
        title="How to share the GPUs",
        text="All splits of the same number of GPUs. An update is taken to be as much faster as there are GPUs for it.",
        panels=[
            _panel("trajectories a second", first, "GPUs of the trainer", "1/s", showlegend=False),
            _panel("share of the time that is waited", lines, "GPUs of the trainer", "%", showlegend=True),
        ],
    )


def _gains(gains: Sequence[Speculation]) -> Card:
    traces = []
    for i, drafts in enumerate(dict.fromkeys(one.draft_tokens for one in gains)):
        mine = [one for one in gains if one.draft_tokens == drafts]
        x, y = [one.batch for one in mine], [one.gain for one in mine]
        traces.append({"type": "scatter", "name": f"K = {drafts}", "x": x, "y": y, "line": {"color": color(i)}})
    return Card(
        title="Does speculation pay",
        text="Tokens a second against plain decoding at the same batch, while the batch is full; below 1 it costs.",
        panels=[
            _panel("gain", traces, "rows of a batch", "times plain decoding", xaxis={"type": "log"}, showlegend=True)
        ],
        wide=True,
    )

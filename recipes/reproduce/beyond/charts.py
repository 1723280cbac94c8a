"""Figures of the study ``beyond``; each function writes one file and returns its caption."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.beyond.cold import WAYS, Curve
from recipes.reproduce.beyond.heads import ENGINE, GRID, WATCHED, HeadResult
from recipes.reproduce.figures import band, color, errors, figure
from recipes.reproduce.study import SEEDS

Heads = Mapping[tuple[str, int], HeadResult]


def draft_temperature(heads: Heads, path: Path) -> str:
    """Draw the accept length over the draft's temperature."""
    with figure(path, len(WATCHED), 5.0, 3.4, sharey=True) as axes:
        for panel, name in zip(axes, WATCHED, strict=True):
            on_text = [across_seeds([heads[name, s].on_text[t] for s in SEEDS]) for t in GRID]
            band(panel, GRID, on_text, name, "on text, unbiased", marker="o", markersize=3)
            counted = [across_seeds([heads[name, s].engine[t] for s in SEEDS]) for t in ENGINE]
            style = {"ms": 4, "capsize": 3, "color": "#6b7280", "label": "counted by the engine"}
            panel.errorbar(ENGINE, [i.value for i in counted], errors(counted), fmt="s", **style)
            panel.axvline(1, color="#9aa3ad", linewidth=1)
            panel.set(title=name, xlabel="temperature of the draft (0: target-only)")
        axes[0].set(ylabel="accept length (accepted + 1)")
        axes[0].legend(fontsize=8)
    return (
        "Accept length over the draft's temperature, target at 1: mean of three seeds, 95 % intervals; text is taken "
        "at every token, the engine starts its cycles elsewhere."
    )


def biases(estimates: Mapping[tuple[str, str], Interval], names: Sequence[str], path: Path) -> str:
    """Draw the difference of every estimator from the counts."""
    with figure(path, 1, 7.4, 3.4) as axes:
        for i, head in enumerate(WATCHED):
            for j, name in enumerate(names):
                interval = estimates[head, name]
                style = {"capsize": 3, "color": color(head), "label": head if j == 0 else None}
                axes.errorbar([interval.value], [j + 0.2 * i - 0.1], xerr=errors([interval]), fmt="o", **style)
        axes.axvline(0, color="#9aa3ad", linewidth=1)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(xlabel="estimate of E[A] minus the engine's counts, drafts a cycle")
        axes.legend(fontsize=8)
    return "Estimates of the accepted drafts of a cycle against what the engine counted: bootstrap over answers."


def cold_start(curves: Mapping[tuple[str, int], Curve], path: Path) -> str:
    """Draw the accept length over training steps from a fresh head."""
    colors = {"ce_then_tv": "start"}
    with figure(path, 1, 5.6, 3.6) as axes:
        for way in WAYS:
            steps = list(curves[way, SEEDS[0]])
            intervals = [across_seeds([curves[way, seed][step] for seed in SEEDS]) for step in steps]
            band(axes, steps, intervals, colors.get(way, way), way.replace("_", " "), marker="o", markersize=3)
        axes.set(xlabel="training steps from a fresh head", ylabel="accept length (accepted + 1)")
        axes.legend(fontsize=8)
    return "Accept length on held-out text while a fresh head is trained: mean of three seeds and its 95 % interval."

"""Figures of the study, shaped like Table 1 and Figs 1 and 3 of the paper."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import Interval
from recipes.reproduce.figures import errors, figure
from recipes.reproduce.pad.analysis import Runs, accept_length, arm, every, mean
from recipes.reproduce.pad.classifiers import HeldOut
from recipes.reproduce.pad.controls import CONTROLS
from recipes.reproduce.pad.decoding import DRAFTERS, TAUS
from recipes.reproduce.study import SEEDS

SHADES = {"plain": "#16407a", "classifier": "#2563a8", "random": "#6b7280", "inverted": "#d1603d",
          "probability": "#3a8f6d", "entropy": "#c79a1e"}  # fmt: skip
TITLES = {"head": "the head's drafts", "skewed": "sharpened drafts (temperature 0.5)"}


def draw(runs: Runs, tests: Mapping[str, HeldOut], folder: Path) -> dict[str, str]:
    """Draw all figures; return their captions by file name."""
    over_tau(runs, folder / "tau.svg")
    trade(runs, folder / "trade.svg")
    roc(tests, folder / "roc.svg")
    return {
        "tau.svg": "Utility (left) and accept length (right) over tau, tau = 0 being plain rejection sampling; bars: "
        "95 %, bootstrap over the prompts of three seeds.",
        "trade.svg": "Utility against accept length: the classifier at five tau (line, from plain rejection sampling "
        "on), and the controls at the rate that it has at the tau they are compared at.",
        "roc.svg": "Pivots found against others taken for pivots, test prompts of three seeds (thin: each seed).",
    }


def points(runs: Runs, drafter: str, names: tuple[str, ...]) -> tuple[list[Interval], list[Interval]]:
    """Return utility and accept length of the named arms."""
    arms = [arm(runs, drafter, name) for name in names]
    return [mean(every(a, "success")) for a in arms], [accept_length(a) for a in arms]


def over_tau(runs: Runs, path: Path) -> None:
    """Draw utility and accept length over tau in two panels, with one line per drafter."""
    with figure(path, 2, 4.8, 3.4) as panels:
        for drafter, shade in zip(DRAFTERS, ("#16407a", "#d1603d"), strict=True):
            found = points(runs, drafter, ("plain", *(f"tau {tau}" for tau in TAUS)))
            for panel, values in zip(panels, found, strict=True):
                panel.errorbar(
                    [0, *TAUS], [v.value for v in values], errors(values), fmt="o-", capsize=3, ms=4, color=shade,
                    label=TITLES[drafter],
                )  # fmt: skip
        for panel, label in zip(panels, ("utility: share that succeeds", "accept length, tokens"), strict=True):
            panel.set(xlabel="tau", ylabel=label)
        panels[0].set_ylim(0, 1)
        panels[1].legend(fontsize=8)


def trade(runs: Runs, path: Path) -> None:
    """Draw utility against accept length, with one panel per drafter."""
    with figure(path, 2, 4.8, 3.6, sharey=True) as panels:
        for panel, drafter in zip(panels, DRAFTERS, strict=True):
            utility, length = points(runs, drafter, ("plain", *(f"tau {tau}" for tau in TAUS)))
            panel.plot([v.value for v in length], [v.value for v in utility], "-", color=SHADES["classifier"], lw=1.2)
            marked = {"plain": ("plain",), "classifier": tuple(f"tau {tau}" for tau in TAUS)}
            marked |= {name: (name,) for name in CONTROLS}
            for label, names in marked.items():
                utility, length = points(runs, drafter, names)
                panel.errorbar(
                    [v.value for v in length], [v.value for v in utility], errors(utility), errors(length),
                    fmt="s" if label == "plain" else "o", ms=5, capsize=2, color=SHADES[label], label=label,
                )  # fmt: skip
            panel.set(title=TITLES[drafter], xlabel="accept length, tokens", ylim=(0, 1))
        panels[0].set(ylabel="utility: share that succeeds")
        panels[0].legend(fontsize=8, loc="lower left")


def roc(tests: Mapping[str, HeldOut], path: Path) -> None:
    """Draw the ROC curves of all seeds together and of each seed."""
    with figure(path, 1, 4.4, 4.0) as panel:
        shown = {
            "head": ("head, all features", "#16407a"),
            "head, scalars": ("head, p and entropy alone", "#7a8794"),
            "skewed": ("sharpened", "#d1603d"),
        }
        for name, (label, shade) in shown.items():
            one = tests[name]
            for seed in SEEDS:
                panel.plot(*_curve(one.scores[seed], one.labels[seed]), color=shade, lw=0.6, alpha=0.5)
            whole = [np.concatenate([d[s] for s in SEEDS]) for d in (one.scores, one.labels)]
            panel.plot(*_curve(*whole), color=shade, lw=1.8, label=f"{label}: AUC {one.area()}")
        panel.plot([0, 1], [0, 1], ":", color="#9aa3ad")
        panel.set(xlabel="others above the threshold", ylabel="pivots above the threshold", aspect="equal")
        panel.legend(fontsize=7, loc="lower right")


def _curve(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-scores, kind="stable")
    hits = labels[order]
    return tuple(np.concatenate([[0], np.cumsum(h) / max(1, h.sum())]) for h in (~hits, hits))  # type: ignore[return-value]

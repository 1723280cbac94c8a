"""Figures of the study of the certificate."""

import math
from pathlib import Path

import numpy as np

from recipes.reproduce.certificate.findings import CASES, Case
from recipes.reproduce.certificate.jobs import Everything
from recipes.reproduce.certificate.runs import ALPHA, Look
from recipes.reproduce.figures import color, figure

INKS = {"black": "e2e_tv", "white": "hard_ce"}


def draw(results: Everything, folder: Path) -> dict[str, str]:
    """Draw all figures; return the caption of each file."""
    tokens(results, folder / "tokens.svg")
    evidence(results, folder / "evidence.svg")
    return {
        "tokens.svg": "Tokens until a planted fault is proved (a point a run; a cross at the budget where it was not), "
        "and the budget (bar). The black box looks after each cohort of 16 answers, about 1,100 tokens, the white box "
        "after every cycle.",
        "evidence.svg": "ln E over tokens: of live runs without a fault under both boxes (left), and the highest that "
        "each simulated run ever reached (right, share of runs beyond it) with the bound 1/E of Ville's inequality. "
        "The dashed line is where a fault counts as proved.",
    }


def tokens(results: Everything, path: Path) -> None:
    """Draw the tokens until each planted fault is proved, one row per case."""
    with figure(path, 1, 7.0, 6.2) as axes:
        for row, one in enumerate(reversed(CASES)):
            axes.plot([one.budget] * 2, [row - 0.35, row + 0.35], color="#9ca3af", lw=2)
            for look in results.faults[one.name]:
                axes.plot(look.found or one.budget, row, _mark(look), color=color(INKS[one.box]), ms=4, alpha=0.7)
        axes.set(xscale="log", xlabel="tokens", yticks=range(len(CASES)))
        axes.set_yticklabels([_label(one) for one in reversed(CASES)], fontsize=8)


def evidence(results: Everything, path: Path) -> None:
    """Draw the evidence in runs without a fault."""
    with figure(path, 2, 4.4, 3.4) as (left, right):
        for pair in results.live["none"]:
            for look, box in zip(pair, INKS, strict=True):
                at, log_e = zip((0, 0.0), *look.history, strict=True)
                left.plot(at, log_e, color=color(INKS[box]), lw=0.8, alpha=0.8)
        left.axhline(math.log(1 / ALPHA), color="#6b7280", ls="--")
        left.set(xlabel="tokens", ylabel="ln E")
        for one in results.simulated:
            reached = np.sort(one.highest)[::-1]
            shares = np.arange(1, len(reached) + 1) / len(reached)
            right.step(reached, shares, where="post", label=f"T = {one.heat:g}", color=color(f"heat {one.heat:g}"))
        levels = np.linspace(0, math.log(1 / ALPHA), 50)
        right.plot(levels, np.exp(-levels), color="#6b7280", ls=":", label="bound")
        right.axvline(math.log(1 / ALPHA), color="#6b7280", ls="--")
        right.set(xlabel="highest ln E", ylabel="share of runs", yscale="log")
        right.legend()


def _mark(look: Look) -> str:
    return "x" if look.found is None else "o"


def _label(one: Case) -> str:
    size = "" if one.size == 1 else f" {one.size:g}"
    return f"{one.kind}{size}, T = {one.heat:g} ({one.box})"

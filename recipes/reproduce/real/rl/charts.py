"""Figures of the RL study: curves over the steps, accept length over entropy, and Eq. 16 with the drafts' entropies."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from recipes.reproduce.figures import color, figure
from recipes.reproduce.real.rl.analysis import FIGURED, Run, accept, means, slope, split_by_entropy
from recipes.reproduce.real.rl.plan import ARMS

FILE = "steps.svg"
STYLES = {"ce": ":", "tv": "--"}  # of an updated head, by its initial head


def draw(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Draw all figures; return the caption of each file."""
    return draw_steps(runs, folder) | draw_entropy(runs, folder) | draw_parts(runs, folder)


def draw_steps(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Draw reward, entropy and accept lengths over the steps of RL."""
    directions = list(dict.fromkeys(run.direction for run in runs))
    with figure(folder / FILE, 3, rows=len(directions), squeeze=False) as panels:
        for row, direction in zip(panels, directions, strict=True):
            for run in (run for run in runs if run.direction == direction):
                steps = [line["step"] for line in run.metrics]
                for axes, name in zip(row, ("reward/mean", "policy/entropy"), strict=False):
                    axes.plot(steps, [line[name] for line in run.metrics], label=f"seed {run.seed}")
                    axes.set(title=f"{name}, entropy {direction}", xlabel="step")
                for arm, (origin, during) in ARMS.items():
                    looked = [look["step"] for look in run.looks]
                    style = "-" if during is None else STYLES[origin]
                    label = arm if run.seed == runs[0].seed else None
                    values = [accept(look, arm) for look in run.looks]
                    row[2].plot(looked, values, style, color=color(during or origin), label=label)
            row[0].legend()
            row[2].set(title="accept length", xlabel="step")
            row[2].legend(loc="upper left", bbox_to_anchor=(1, 1))
    caption = "Reward, entropy of the policy, accept length of heads beside it; dashed, dotted: updated at each step."
    return {FILE: caption}


def draw_entropy(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Draw accept length against entropy: figures 1a and 8 of the paper, on SmolLM2 and at its entropies."""
    directions = list(dict.fromkeys(run.direction for run in runs))
    with figure(folder / "entropy.svg", len(FIGURED), width=3.6, sharey=True) as panels:
        for axes, (name, (arm, kind)) in zip(panels, FIGURED.items(), strict=True):
            for direction in directions:
                own = [run for run in runs if run.direction == direction]
                looks = [look for run in own for look in run.looks]
                x = np.array([means(look, arm)["entropy"] for look in looks])
                y = np.array([accept(look, arm, kind) for look in looks])
                told = np.mean([slope(run, arm, kind) for run in own])
                dots = axes.plot(x, y, ".", label=f"entropy {direction}: {told:.2f} a nat")[0]
                ends = np.array([x.min(), x.max()])
                axes.plot(ends, np.polyval(np.polyfit(x, y, 1), ends), color=dots.get_color(), linewidth=1)
            axes.set(title=name, xlabel="entropy, nats")
            axes.legend(fontsize=8)
        panels[0].set_ylabel("accept length, 3 drafts")
    caption = (
        "Accept length against the policy's entropy, a dot a look, frozen heads: greedy drafts (TO) and sampled ones "
        "(RS). Slopes are means of the runs' own, lines go through all dots. The paper's policies have .1 to .5 nats."
    )
    return {"entropy.svg": caption}


def draw_parts(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Draw Eq. 16 over the evaluations with the arm of greedy drafts (figure 3), and both entropies (figure 11)."""
    directions = list(dict.fromkeys(run.direction for run in runs))
    arms = {"TO + CE": ("ce", "greedy"), "RS + CE": ("ce", "sampled"), "RS + TV": ("tv", "sampled")}
    with figure(folder / "parts.svg", len(arms) + 1, width=3.6, rows=len(directions), squeeze=False) as panels:
        for row, direction in zip(panels, directions, strict=True):
            own = [run for run in runs if run.direction == direction]
            steps = [look["step"] for look in own[0].looks]
            for axes, (name, (arm, kind)) in zip(row, arms.items(), strict=False):
                found = np.mean([split_by_entropy(run, arm, kind) for run in own], 0)
                axes.plot(steps, found.sum(1), color="#6b7280", label="all")
                axes.plot(steps, found[:, 0], label="entropy part")
                axes.plot(steps, found[:, 1], label="the rest: mismatch")
                axes.axhline(0, color="#1f2933", linewidth=0.6)
                axes.set(title=f"{name}, entropy {direction}", xlabel="step")
            row[0].set_ylabel("change of the first draft's acceptance")
            row[0].legend(fontsize=8)
            for arm in ("ce", "tv", "e2e_tv"):
                drafts = np.mean([[means(look, arm)["draft entropy"] for look in run.looks] for run in own], 0)
                row[-1].plot(steps, drafts, color=color(arm), label=f"draft, {arm}")
            policy = np.mean([[means(look, "ce")["entropy"] for look in run.looks] for run in own], 0)
            row[-1].plot(steps, policy, color="#1f2933", linestyle="--", label="policy")
            row[-1].set(title=f"entropy, nats, {direction}", xlabel="step")
            row[-1].legend(fontsize=8)
    caption = (
        "Eq. 16 for the first draft of frozen heads, means of the seeds; the slope is that over the answers of the "
        "first look. Right: entropies of the heads' first drafts and of the policy."
    )
    return {"parts.svg": caption}

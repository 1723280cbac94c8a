"""The figure: reward, entropy and accept length over the steps of every run."""

from collections.abc import Sequence
from pathlib import Path

from recipes.reproduce.figures import color, figure
from recipes.reproduce.real.rl.analysis import Run, accept
from recipes.reproduce.real.rl.plan import ARMS

FILE = "steps.svg"
STYLES = {"ce": ":", "tv": "--"}  # of a head that is updated, by the one that it begins with


def draw(runs: Sequence[Run], folder: Path) -> dict[str, str]:
    """Draw it; file and caption."""
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

"""The figure of the study."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.figures import COLORS, band, errors, figure
from recipes.reproduce.pad_training.jobs import ARMS, PLAIN

SHADES = dict(zip(ARMS, ("ce", "e2e_tv", "nla", "rkl", "hard_ce"), strict=True))


def draw(
    folder: Path,
    rows: Mapping[tuple[str, int], list[dict[str, Any]]],
    held_out: Mapping[tuple[str, int], float],
    start: Mapping[int, float],
    seeds: Sequence[int],
) -> dict[str, str]:
    """Draw training reward over the steps and held-out reward after training; return the caption by file name."""
    with figure(folder / "reward.svg", 2, 5.2, 3.8) as (left, right):
        for place, arm in enumerate(ARMS):
            jobs = [rows[arm, seed] for seed in seeds]
            curve = [across_seeds([job[i]["reward/mean"] for job in jobs]) for i in range(len(jobs[0]))]
            steps = [row["step"] for row in jobs[0]]
            if arm == PLAIN:
                band(left, steps, curve, SHADES[arm], label=arm)
            else:
                left.plot(steps, [i.value for i in curve], color=COLORS[SHADES[arm]], label=arm)
            end = across_seeds([held_out[arm, seed] for seed in seeds])
            right.errorbar([place], [end.value], errors([end]), fmt="o", capsize=3, color=COLORS[SHADES[arm]])
            right.plot([place] * len(seeds), [held_out[arm, s] for s in seeds], "_", color=COLORS[SHADES[arm]])
        right.axhline(
            across_seeds([*start.values()]).value, color=COLORS["start"], linestyle=":", label="before training"
        )
        left.set(xlabel="step", ylabel="reward of the answers trained on")
        left.legend(fontsize=8)
        right.set_xticks(range(len(ARMS)), [arm.replace(", ", ",\n") for arm in ARMS], rotation=35, ha="right")
        right.set(ylabel="held-out reward, exact decoding")
        right.legend(fontsize=8)
    return {
        "reward.svg": "Reward of the answers that each job trains on, drawn by its own decoding, mean of the seeds "
        "(left; the band is the 95 % interval of rejection sampling); reward of the policies on held-out questions "
        "under exact decoding, with 95 % intervals over seeds and each seed as a dash (right)."
    }

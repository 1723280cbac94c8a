"""``python -m recipes.reproduce.async_steps [--quick]``: asynchronous jobs with and without drafts; see README.md."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.bench.gpu.headline import asynchronous
from bebop.command import check_writable
from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.async_steps.jobs import (
    ANSWERS,
    ARMS,
    BAR,
    GREEDY,
    GROUPS,
    PLACE,
    PLAIN,
    SAMPLED,
    SEEDS,
    STEPS,
    WARM,
    WINDOW,
    Job,
    carry_out,
    model_of,
    settings,
)
from recipes.reproduce.cli import start
from recipes.reproduce.figures import band, figure
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real.plan import agree
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import corpus, results_folder

HERE = results_folder(Path(__file__).parent)
Jobs = Mapping[int, Mapping[str, Job]]  # by seed and arm


def main() -> None:
    """Train the heads, run the jobs one at a time, judge, draw and write."""
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("async_steps")
    agree(PLACE / "plan.json", settings(), "jobs")
    found: dict[int, dict[str, Job]] = {seed: {} for seed in SEEDS}
    with tqdm(total=len(SEEDS) * (2 + len(ARMS)), desc="heads and jobs", unit="part") as bar:
        for seed in SEEDS:
            corpus(seed)
            for arm in (GREEDY, SAMPLED):  # train first: no training runs beside a timed job
                model_of(arm, seed)
                bar.update()
        for seed in SEEDS:
            arms = [*ARMS][seed % len(ARMS) :] + [*ARMS][: seed % len(ARMS)]  # the first arm rotates with the seed
            for arm in arms:
                found[seed][arm] = carry_out(arm, seed)
                bar.update()
    draw(found, HERE / "figures")
    figures = {
        "steps.svg": "Latency of a step (left) and mean reward over the seconds since the first step (right), by arm: "
        f"means of three seeds with 95 % intervals; reward is a mean of {WINDOW} steps, the line is the bar.",
    }
    keep(HERE, started, numbers(found), {"Jobs": rows(found)}, figures, {**settings(), "steps": STEPS, "bar": BAR})


def numbers(found: Jobs) -> dict[str, Number]:
    """Return the numbers that the rules test or quote."""

    def over(value: Any) -> Number:
        return over_seeds([value(found[seed]) for seed in found])

    by_name: dict[str, Number] = {}
    for arm in ARMS:
        by_name |= {
            f"step s, {arm}": over(lambda jobs, a=arm: jobs[a].mean("time/step")),
            f"accept length, {arm}": over(lambda jobs, a=arm: jobs[a].mean("accept length")),
            f"reached, {arm}": over(lambda jobs, a=arm: float(jobs[a].reaching() is not None)),
            f"rollout share, {arm}": over(lambda jobs, a=arm: jobs[a].share),
        }
    for arm in (GREEDY, SAMPLED):
        by_name |= {
            f"steps, {arm}": over(lambda jobs, a=arm: steps_ratio(jobs, PLAIN, a)),
            f"rollouts, {arm}": over(lambda jobs, a=arm: jobs[PLAIN].per_token / jobs[a].per_token),
            f"seconds to the reward, {arm}": over(
                lambda jobs, a=arm: jobs[PLAIN].seconds_to_bar() / jobs[a].seconds_to_bar()
            ),
        }
    by_name["greedy over sampled"] = over(lambda jobs: steps_ratio(jobs, GREEDY, SAMPLED))
    by_name["ceiling"] = over(lambda jobs: jobs[PLAIN].mean("time/step") / jobs[PLAIN].mean("time/update"))
    by_name["beside formula"] = over(beside_formula)
    return by_name


def steps_ratio(jobs: Mapping[str, Job], base: str, arm: str) -> float:
    """Return the latency of a step of ``base`` over that of ``arm``."""
    return jobs[base].mean("time/step") / jobs[arm].mean("time/step")


def beside_formula(jobs: Mapping[str, Job]) -> float:
    """Return the measured over the computed ratio of step latencies, minus 1, averaged over the arms with drafts."""
    plain = jobs[PLAIN]
    found = [
        steps_ratio(jobs, PLAIN, arm) / asynchronous(plain.share, plain.per_token / jobs[arm].per_token)
        for arm in (GREEDY, SAMPLED)
    ]
    return float(np.mean(found)) - 1


def rows(found: Jobs) -> list[dict[str, Any]]:
    """Return one table row per job: seconds of a step and its parts, means over the counted steps."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "step s": job.mean("time/step"),
            "rollout s": job.mean("time/rollout"),
            "update s": job.mean("time/update"),
            "ms of rollout a token": 1e3 * job.per_token,
            "rollout share": job.share,
            "accept length": job.mean("accept length"),
            "reward first": float(np.mean(job.rows["reward/mean"][:WINDOW])),
            "reward last": float(np.mean(job.rows["reward/mean"][-WINDOW:])),
            "step of the reward": job.reaching(),
            "seconds to it": job.seconds_to_bar() if job.reaching() else None,
            "busy cores": job.busy,
        }
        for seed, arm in product(found, ARMS)
        for job in (found[seed][arm],)
    ]


def draw(found: Jobs, folder: Path) -> None:
    """Draw the latency over steps, and the reward over seconds."""
    with figure(folder / "steps.svg", 2, 4.8, 3.4) as (left, right):
        for arm in ARMS:
            jobs = [found[seed][arm] for seed in found]
            latency = np.array([job.rows["time/step"][WARM:] for job in jobs])
            band(left, range(WARM + 1, STEPS + 1), [across_seeds(column) for column in latency.T], arm)
            seconds = np.cumsum([job.rows["time/step"] for job in jobs], 1)[:, WINDOW - 1 :]
            band(right, seconds.mean(0).tolist(), windows(jobs), arm)
        right.axhline(BAR, color="#6b7280", linestyle="--", linewidth=1)
        left.set(xlabel="step", ylabel="seconds of a step", ylim=(0, None))
        right.set(xlabel="seconds since the first step", ylabel=f"reward of {GROUPS} x {ANSWERS} completions a step")
        left.legend(fontsize=8)


def windows(jobs: Sequence[Job]) -> list[Interval]:
    """Return the mean reward of ``WINDOW`` steps over seeds, from the first step that has as many behind it."""
    kernel = np.full(WINDOW, 1 / WINDOW)
    means = np.array([np.convolve(job.rows["reward/mean"], kernel, "valid") for job in jobs])
    return [across_seeds(column) for column in means.T]


if __name__ == "__main__":
    start(main, __doc__)

"""Jobs of every arm and seed, held-out reward of the trained policies, and the effect of weights on one policy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bebop.config.job import JobConfig
from bebop.metrics.intervals import across_seeds
from bebop.metrics.metrics import SampleSize
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.pad_training.charts import draw
from recipes.reproduce.pad_training.decoded import COMPARED, HELD_OUT, Answers, answers, built_in, chosen, trained
from recipes.reproduce.pad_training.jobs import (
    ANSWERS,
    ARMS,
    GROUPS,
    LARGE,
    LEARNING_RATE,
    PADS,
    PLAIN,
    SMALL,
    STEPS,
    UNWEIGHTED,
    WHOLE,
    classifier,
    configuration,
    train,
)
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import QUICK, SEEDS, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)
BIAS = {SMALL: 0.005, LARGE: 0.02}  # mean R_N of a verified draft that each tau is chosen for
DECODED = (PLAIN, SMALL, LARGE)
USED = SEEDS[:2] if QUICK else SEEDS
ENDS = 3  # steps that are averaged at either end
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All measurements of the study; keys are (arm, seed)."""

    taus: Mapping[str, float]
    rows: Mapping[tuple[str, int], Rows]  # the metrics of each step of a job
    held_out: Mapping[tuple[str, int], float]  # reward after training
    start: Mapping[int, float]  # the same before
    decoded: Mapping[tuple[str, int], Answers]  # of the built-in model, by three ways of decoding


def main() -> None:
    """Run the jobs, judge, draw and store the results."""
    started = begin("pad_training")
    results = measure()
    tables = {
        "Jobs": [job_row(results, arm, seed) for arm in ARMS for seed in USED],
        "Arms": [arm_row(results, arm) for arm in ARMS],
        "Answers of the built-in model": [decoded_row(results, arm) for arm in DECODED],
    }
    figures = draw(HERE / "figures", results.rows, results.held_out, results.start, USED)
    plan = {
        "steps": STEPS, "groups": GROUPS, "answers": ANSWERS, "lr": LEARNING_RATE, "seeds": USED, "taus": results.taus,
        "classifier": classifier(), "held out": HELD_OUT, "compared": COMPARED,
    }  # fmt: skip
    keep(HERE, started, numbers(results), tables, figures, plan)


def measure() -> Results:
    """Choose both taus, decode with the built-in model, then train and judge arm after arm, seed by seed."""
    model = built_in()

    def probed(tau: float) -> JobConfig:
        return configuration(SMALL, 0, {SMALL: tau})

    taus = dict(zip(BIAS, chosen(model, probed, [*BIAS.values()]), strict=True))
    decoded = {(arm, s): answers(model, configuration(arm, s, taus), COMPARED, s) for s in USED for arm in DECODED}
    start = {s: judged_reward(model, s) for s in USED}
    keys = [(arm, seed) for seed in USED for arm in ARMS]
    found = dict(zip(keys, everywhere(learned, [(*key, taus) for key in keys], "pad_training"), strict=True))
    rows, held_out = {key: one[0] for key, one in found.items()}, {key: one[1] for key, one in found.items()}
    return Results(taus=taus, rows=rows, held_out=held_out, start=start, decoded=decoded)


def learned(job: tuple[str, int, Mapping[str, float]]) -> tuple[Rows, float]:
    """Train one job; return the metrics of its steps and its held-out reward.

    Two jobs run at a time: a synchronous job decodes or trains, but hardly ever both.
    """
    arm, seed, taus = job
    done = train(arm, seed, taus)
    return done.rows(), judged_reward(trained(done.policy), seed)


def judged_reward(policy: Any, seed: int) -> float:
    """Return the mean reward of completions to held-out questions, sampled from the policy's own distribution."""
    return float(answers(policy, configuration(PLAIN, seed, {}), HELD_OUT, 50 + seed).reward.mean())


def numbers(results: Results) -> dict[str, Number]:
    """Return the numbers that the rules use, by name."""
    held, decoded = results.held_out, results.decoded

    def difference(a: str, b: str) -> Number:
        return over_seeds([held[a, s] - held[b, s] for s in USED])

    by_name = {f"reward {arm}": over_seeds([held[arm, s] for s in USED]) for arm in ARMS}
    by_name |= {f"{arm} - plain": difference(arm, PLAIN) for arm in PADS}
    by_name |= {f"sample size {arm}": of_steps(results, arm, "train/tis_ess") for arm in (SMALL, LARGE, WHOLE)}
    by_name["start"] = over_seeds([*results.start.values()])
    by_name["gain"] = over_seeds([held[PLAIN, s] - results.start[s] for s in USED])
    by_name["weights - no weights"] = difference(LARGE, UNWEIGHTED)
    by_name["whole answers - tokens"] = difference(WHOLE, LARGE)
    for arm in (SMALL, LARGE):
        own = [(decoded[arm, s], decoded[PLAIN, s]) for s in USED]
        by_name[f"bias {arm}"] = over_seeds([a.per_draft("bias") for a, _ in own])
        by_name[f"drawn {arm}"] = over_seeds([a.reward.mean() - plain.reward.mean() for a, plain in own])
        by_name[f"weighted {arm}"] = over_seeds([weighted(a) - plain.reward.mean() for a, plain in own])
        by_name[f"speed {arm}"] = over_seeds([speed(a) / speed(plain) for a, plain in own])
    for arm in DECODED:  # of its own mean, so that its spread is that of a ratio
        speeds = np.array([speed(decoded[arm, s]) for s in USED])
        by_name[f"relative speed {arm}"] = over_seeds(speeds / speeds.mean())
    return by_name


def weighted(one: Answers) -> float:
    """Return the mean reward with one weight per completion; the weights have mean 1 in expectation."""
    return float((np.exp(one.log_weight) * one.reward).mean())


def speed(one: Answers) -> float:
    """Return the completion tokens per second of processor time."""
    return one.tokens / one.seconds


def of_steps(results: Results, arm: str, name: str) -> Number:
    """Return a metric of an arm's jobs: the mean over steps, then over seeds."""
    return over_seeds([np.mean([row[name] for row in results.rows[arm, s]]) for s in USED])


def by_position(row: Mapping[str, Any], name: str) -> float:
    """Return the mean of a metric over the draft positions; 0 if the system does not have it."""
    found = [value for key, value in row.items() if key.startswith(f"rollout/{name}/")]
    return float(np.mean(found)) if found else 0.0


# ---- tables


def job_row(results: Results, arm: str, seed: int) -> dict[str, Any]:
    """Return the row of one job: reward of its own completions at both ends, and held-out reward of its policy."""
    rows = results.rows[arm, seed]
    count = min(ENDS, len(rows) // 2)
    reward = [float(np.mean([row["reward/mean"] for row in part])) for part in (rows[:count], rows[-count:])]
    return {
        "arm": arm, "seed": seed, "own answers first": reward[0], "own answers last": reward[1],
        "held out before": results.start[seed], "held out after": results.held_out[arm, seed],
        "answer length last": rows[-1]["response/length"],
    }  # fmt: skip


def arm_row(results: Results, arm: str) -> dict[str, Any]:
    """Return means over the steps of an arm's jobs, with intervals over seeds; weights only if the arm has them."""

    def mean(value: Any) -> Any:
        return across_seeds([np.mean([value(row) for row in results.rows[arm, s]]) for s in USED])

    row: dict[str, Any] = {"arm": arm, "accept length": mean(lambda r: r["rollout/accept_length"])}
    row["overridden"] = mean(lambda r: by_position(r, "overridden"))
    row["R_N"] = mean(lambda r: by_position(r, "bias"))
    row["answer length"] = mean(lambda r: r["response/length"])
    row["truncated"] = mean(lambda r: r["response/truncated"])
    row["policy clipped"] = mean(lambda r: r["train/clip_frac"])
    row["weight"] = mean(lambda r: r["train/tis_mean"])
    has = arm not in (PLAIN, UNWEIGHTED)
    row["weight variance"] = mean(lambda r: r["train/tis_mean"] ** 2 * (1 / r["train/tis_ess"] - 1)) if has else ""
    row["sample size"] = mean(lambda r: r["train/tis_ess"]) if has else ""
    row["of whole answers"] = mean(lambda r: r["train/tis_ess_answers"]) if has else ""
    row["weights capped"] = mean(lambda r: r["train/tis_capped"]) if has else ""
    return row


def decoded_row(results: Results, arm: str) -> dict[str, Any]:
    """Return the row of one way of decoding with the built-in model."""
    own: Sequence[Answers] = [results.decoded[arm, s] for s in USED]

    def mean(value: Any) -> Any:
        return across_seeds([value(one) for one in own])

    return {
        "arm": arm,
        "tau": results.taus.get(arm, 0.0),
        "reward": mean(lambda a: a.reward.mean()),
        "weighted reward": mean(weighted),
        "weight of an answer": mean(lambda a: np.exp(a.log_weight).mean()),
        "sample size of answers": mean(lambda a: SampleSize.of(np.exp(a.log_weight)).value),
        "accept length": mean(lambda a: a.stats.accept_length),
        "overridden": mean(lambda a: a.per_draft("overridden")),
        "R_N": mean(lambda a: a.per_draft("bias")),
        "tokens per processor second": mean(speed),
        "tokens of an answer": mean(lambda a: a.tokens / len(a.reward)),
        "truncated": mean(lambda a: a.truncated),
        "tokens without a weight": sum(a.unweighable for a in own),
    }

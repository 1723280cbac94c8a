"""``python -m recipes.reproduce.real_steps [--quick]``: time RL steps with and without drafts; see README.md."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.command import check_writable
from bebop.metrics.intervals import across_seeds
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from recipes.reproduce.cli import start
from recipes.reproduce.figures import figure
from recipes.reproduce.measured import Number, of
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real.rl.plan import RL_PLAN
from recipes.reproduce.real.rl.task import write_questions
from recipes.reproduce.real_pays.rounds import policy
from recipes.reproduce.real_steps.pairs import ARMS, GROUPS, PAIRS, STEPS, Pair, carry_out, ratio, share
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import FOLDER, results_folder
from recipes.stages import once

HERE = results_folder(Path(__file__).parent)
PLACE = FOLDER / "real_steps"


def main() -> None:
    """Run pairs of jobs, judge the rules, draw the figure and write the results."""
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("real_steps")
    model, questions, drafting = PLACE / "model", PLACE / "questions.jsonl", policy()
    settings: dict[str, Any] = {"model": RL_PLAN.model, "steps": STEPS, "groups": GROUPS, "group": RL_PLAN.group_size}
    settings |= {"new tokens": RL_PLAN.max_new_tokens, "arms": {arm: list(given) for arm, given in ARMS.items()}}
    agree(PLACE / "plan.json", {**settings, "head": drafting.head_fingerprint()}, "jobs")
    once(model, partial(saved, drafting))
    write_questions(questions, RL_PLAN.questions)
    pairs: list[Pair] = []
    with tqdm(total=PAIRS * len(ARMS), desc="jobs", unit="job") as bar:
        for number in range(PAIRS):
            arms = list(ARMS)[:: -1 if number % 2 else 1]  # each begins in turn
            jobs = {}
            for arm in arms:
                jobs[arm] = carry_out(model, questions, number, arm, PLACE)
                bar.update()
            pairs.append({arm: jobs[arm] for arm in ARMS})
    draw(pairs)
    caption = "Time of a step in its parts, by job; the first step of each is left out."
    keep(HERE, started, numbers(pairs), {"Jobs": rows(pairs)}, {"steps.svg": caption}, {**settings, "pairs": PAIRS})


def saved(drafting: Policy, folder: Path) -> dict[str, Any]:
    """Save the first policy with its head as a stage, in the format that jobs read."""
    save_policy(drafting, folder)
    return {}


def numbers(pairs: Sequence[Pair]) -> dict[str, Number]:
    """Return the numbers of the rules by name."""
    found = {name: [ratio(pair, name) for pair in pairs] for name in ("rollouts", "steps")}
    found |= {"share": [share(pair) for pair in pairs]}
    found |= {"accept length": [float(np.mean(pair["drafts"].accept_length)) for pair in pairs]}
    return {name: of(across_seeds(values), len(pairs)) for name, values in found.items()}


def rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Return one line per job: seconds of a step and of its parts, means over the counted steps."""
    return [
        {
            "pair": number,
            "arm": arm,
            "step s": float(np.mean(job.step)),
            "rollout s": float(np.mean(job.rollout)),
            "update s": float(np.mean(job.update)),
            "ms of rollout a token": 1e3 * job.per_token,
            "tokens": float(np.mean(job.tokens)),
            "accept length": float(np.mean(job.accept_length)),
        }
        for number, pair in enumerate(pairs)
        for arm, job in pair.items()
    ]


def draw(pairs: Sequence[Pair]) -> None:
    """Draw one bar per job: rollouts, update, and the rest of the step."""
    jobs = [(f"{arm} {number}", job) for number, pair in enumerate(pairs) for arm, job in pair.items()]
    names = [name for name, _ in jobs]
    parts = {
        "rollout": [float(np.mean(job.rollout)) for _, job in jobs],
        "update": [float(np.mean(job.update)) for _, job in jobs],
    }
    spent = [float(np.mean(job.step)) for _, job in jobs]
    parts["other"] = [max(0.0, whole - a - b) for whole, a, b in zip(spent, *parts.values(), strict=True)]
    with figure(HERE / "figures" / "steps.svg", 1, 5.0, 3.0) as panel:
        left = np.zeros(len(jobs))
        for (name, values), shade in zip(parts.items(), ("#d1603d", "#16407a", "#9ca3af"), strict=True):
            panel.barh(names, values, left=left, color=shade, label=name)
            left += np.array(values)
        panel.invert_yaxis()
        panel.set(xlabel="seconds of a step")
        panel.legend(fontsize=8)


if __name__ == "__main__":
    start(main, __doc__)

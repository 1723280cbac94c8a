"""``python -m recipes.reproduce.blockpilot``: block drafts, and a block size for each prompt; see README.md."""

from pathlib import Path
from typing import Any

import numpy as np

from recipes.reproduce.blockpilot import costs, jobs, marker, protocol, sweeps
from recipes.reproduce.blockpilot.charts import draw
from recipes.reproduce.blockpilot.comparison import Found, found, rule_numbers, tables
from recipes.reproduce.cli import start
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, everywhere, results_folder, spent

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Sweep block sizes, time them, plant the marker, compare the arms, judge, draw and write."""
    started = begin("blockpilot")
    results = run()
    settings = {
        "seeds": SEEDS,
        "prompts": sweeps.PROMPTS,
        "with every size": sweeps.FULL,
        "sizes": sweeps.SIZES,
        "candidates": sweeps.CANDIDATES,
        "sampled prompts": sweeps.DRAWN,
        "answers in a set": sweeps.DRAWS,
        "planted prompts": marker.PROMPTS,
        "planted sizes": marker.SIZES,
        "timed prompts": costs.PROMPTS,
        "rounds": costs.ROUNDS,
        "steps": protocol.STEPS,
        "ema": sweeps.TIMES,
    }
    figures = draw(results, HERE / "figures")
    keep(HERE, started, rule_numbers(results), tables(results), figures, settings, facts(results))


def run() -> list[Found]:
    """Measure the seeds one after another, because processor time is measured; return the comparisons of each seed."""
    measured = everywhere(jobs.run, SEEDS, "seeds", workers=1)
    # One curve for all seeds: processor time does not depend on prompts, but it is noisy.
    curve = np.median([timed.curves[:, costs.SPENT.index("cycle")] for _, _, timed, _, _ in measured], 0).tolist()
    return [found(seed, *one, curve) for seed, one in zip(SEEDS, measured, strict=True)]


def facts(results: list[Found]) -> dict[str, Any]:
    """Return facts that no rule tests."""
    return {
        "same answers with every size": float(np.mean([one.swept.same for one in results])),
        "all arms gave the answers of plain decoding": all(one.timed.same for one in results),
        "processor seconds of the jobs, which are kept one by one": round(spent("blockpilot")),
        "best size of the training prompts": [one.best for one in results],
    }


if __name__ == "__main__":
    start(main, __doc__)

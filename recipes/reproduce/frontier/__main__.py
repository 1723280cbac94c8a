"""``python -m recipes.reproduce.frontier``: speed of all systems against total variation and against right answers."""

from pathlib import Path

from recipes.reproduce.cli import start
from recipes.reproduce.frontier import jobs
from recipes.reproduce.frontier.analysis import facts, rule_numbers, table
from recipes.reproduce.frontier.arms import ARMS
from recipes.reproduce.frontier.charts import draw
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder, spent

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Time and observe the arms, judge, draw and write."""
    started = begin("frontier")
    results = jobs.everything()
    plan = {
        "arms": len(ARMS),
        "prompts": jobs.PROMPTS,
        "prompts of a chunk and chunks that are timed": {
            str(batch): list(sizes) for batch, sizes in jobs.CHUNKS.items()
        },
        "batch size that is watched": jobs.WATCHED,
        "tokens of an answer at most": jobs.LONGEST,
        "seed": jobs.SEED,
    }
    told = facts(results) | {"processor seconds of the jobs, which are kept one by one": round(spent("frontier"))}
    tables = {"All arms": table(results)}
    keep(HERE, started, rule_numbers(results), tables, draw(results, HERE / "figures"), plan, told)


if __name__ == "__main__":
    start(main, __doc__)

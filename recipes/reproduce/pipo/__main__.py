"""``python -m recipes.reproduce.pipo``: pair networks, from SFT and by distillation; see README.md."""

from pathlib import Path
from typing import Any

from recipes.reproduce.cli import start
from recipes.reproduce.pipo import analysis, arms, decoding, jobs
from recipes.reproduce.pipo.charts import draw
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Train the networks, decode, judge, draw and store the results."""
    started = begin("pipo")
    arms.corpus()  # shared by the seeds
    everywhere(jobs.timed, SEEDS, "first tokens", workers=1)  # nothing else may run beside what is timed
    results = everywhere(jobs.run, SEEDS, "seeds")
    settings: dict[str, Any] = {
        "seeds": SEEDS,
        "questions": arms.QUESTIONS,
        "right answers": len(arms.corpus()),
        "held out": arms.HELD_OUT,
        "steps": {"SFT": arms.SFT_STEPS, "more": arms.MORE_STEPS},
        "drafts dropped": jobs.SHARES,
        "judged answers": decoding.JUDGED,
        "budgets": {name: list(budget) for name, budget in analysis.BUDGETS.items() if name != analysis.WHOLE},
        "rounds": jobs.ROUNDS,
    }
    facts = {"processor seconds of the jobs, which are kept one by one": round(arms.spent())}
    figures = draw(results, HERE / "figures")
    keep(HERE, started, analysis.numbers(results), analysis.tables(results), figures, settings, facts)


if __name__ == "__main__":
    start(main, __doc__)

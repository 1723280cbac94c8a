"""``python -m recipes.reproduce.firp``: pseudo hidden states, their rivals, and the effect of layers and losses."""

from pathlib import Path

from recipes.reproduce.cli import start
from recipes.reproduce.firp import arms, comparison, measures, texts
from recipes.reproduce.firp.charts import draw
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, everywhere, results_folder, spent

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Train, measure, judge, draw and write."""
    started = begin("firp")
    everywhere(texts.prepare, SEEDS, "texts")
    everywhere(comparison.measure_one, comparison.jobs(), "arms")
    results = everywhere(comparison.run, SEEDS, "seeds")
    plan = {
        "seeds": SEEDS,
        "answers": texts.ANSWERS,
        "prompts to calibrate with": texts.CALIBRATION,
        "held-out prompts": texts.HELD_OUT,
        "layers": arms.LAYERS,
        "updates of a step": arms.UPDATES,
        "updates in the sweeps": arms.SHORT,
        "answers in an update": arms.ROWS,
        "anchors in an answer": arms.ANCHORS,
        "learning rates": arms.RATES,
        "nodes": measures.NODES,
    }
    facts = {"processor seconds of the jobs, which are kept one by one": round(spent("firp"))}
    figures = draw(results, HERE / "figures")
    keep(HERE, started, comparison.rule_numbers(results), comparison.tables(results), figures, plan, facts)


if __name__ == "__main__":
    start(main, __doc__)

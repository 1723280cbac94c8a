"""``python -m recipes.reproduce.real_entropy``: relate acceptance to entropy on SmolLM2, from the heads of ``real``;
see README.md.
"""

from pathlib import Path

from recipes.reproduce.cli import start
from recipes.reproduce.real.evaluation import EVERY, TEMPERATURES
from recipes.reproduce.real.plan import HERE as REAL
from recipes.reproduce.real_entropy.analysis import HEADS, measure, read
from recipes.reproduce.real_entropy.charts import draw
from recipes.reproduce.real_entropy.tables import tables
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Measure the stored evaluations, judge the rules, draw the figures and write the results."""
    started = begin("real_entropy")
    results = read(REAL)
    told = measure(results, REAL)
    seeds = {head: sorted(looks.plain) for head, looks in results.items()}
    settings = {"heads": HEADS, "seeds": seeds, "temperatures": TEMPERATURES, "chains": f"each {EVERY}-th"}
    keep(HERE, started, told.numbers, tables(results), draw(results, HERE / "figures"), settings, told.facts)


if __name__ == "__main__":
    start(main, __doc__)

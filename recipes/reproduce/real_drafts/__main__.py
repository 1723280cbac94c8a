"""``python -m recipes.reproduce.real_drafts``: compare sampled with greedy drafts on SmolLM2, from the heads of
``real``; see README.md.
"""

from pathlib import Path

from recipes.reproduce.cli import start
from recipes.reproduce.real.evaluation import DRAFT_TEMPERATURES, EVERY, TOP_P
from recipes.reproduce.real.plan import HERE as REAL
from recipes.reproduce.real_drafts.analysis import measure, read
from recipes.reproduce.real_drafts.charts import draw
from recipes.reproduce.real_drafts.findings import HEADS, TEMPERATURES
from recipes.reproduce.real_drafts.tables import tables
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Measure the stored evaluations, judge the rules, draw the figures and write the results."""
    started = begin("real_drafts")
    results = read(REAL)
    told = measure(results, REAL)
    settings = {
        "heads": HEADS, "seeds": {head: sorted(looks.plain) for head, looks in results.items()},
        "temperatures": TEMPERATURES, "draft temperatures": DRAFT_TEMPERATURES, "top_p": TOP_P,
        "chains": f"each {EVERY}-th",
    }  # fmt: skip
    keep(HERE, started, told.numbers, tables(results), draw(results, HERE / "figures"), settings, told.facts)


if __name__ == "__main__":
    start(main, __doc__)

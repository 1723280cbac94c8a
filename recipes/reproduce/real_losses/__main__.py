"""``python -m recipes.reproduce.real_losses [--quick]``: claim C3 on the heads of the real study; see README.md."""

from pathlib import Path

from bebop.command import check_writable
from recipes.reproduce.cli import start
from recipes.reproduce.real.arms import looked_at
from recipes.reproduce.real.corpus import corpus_size
from recipes.reproduce.real.plan import HERE as PLACE
from recipes.reproduce.real.plan import PLAN
from recipes.reproduce.real.runs import LAST
from recipes.reproduce.real_losses import curves, tables
from recipes.reproduce.real_losses.charts import draw
from recipes.reproduce.real_losses.comparison import ALL_MARKS, NAMES, heads, measure
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Measure the existing arms, judge the rules, draw the figures and write the results.

    Raises:
        UserError: No head was evaluated yet, or not all on the same chains.
    """
    check_writable("BEBOP_REPRODUCE", HERE)
    study(PLACE, HERE)


def study(place: Path, folder: Path) -> None:
    """Turn the evaluation in ``place`` into the results in ``folder``."""
    arms = {name: heads(place, name) for name in NAMES}
    looked_at(place, [one for arm in arms.values() for one in arm.values()])
    found = {name: len(arm) for name, arm in arms.items()}
    started = begin("real_losses")
    told = measure(place)
    runs = curves.trained(place)
    fused_lines, fused_facts = tables.fused(place)
    written = {
        "Every loss, best heads": tables.best_lines(place),
        "Accept length over that of ce": tables.gain_lines(place),
        "Accept length over another loss, by when seeds were run": tables.look_lines(place),
        "Accept length at the marks of training": tables.mark_lines(place),
        "Slopes of acceptance on the target's entropy, per nat": tables.slope_lines(place),
        "Accept length by kind of prompt": tables.kind_lines(place),
        "Runs": [curves.line(one) for one in runs],
        "Losses of one step's chains, forward and backward": fused_lines,
    }
    figures = draw(place, runs, folder / "figures")
    counts = {name: count for name, count in found.items() if count}
    plan = {"corpus": corpus_size(place, PLAN), "steps": LAST, "marks": ALL_MARKS, "heads": counts}
    facts = {**told.facts, **fused_facts}
    keep(folder, started, told.numbers, {n: lines for n, lines in written.items() if lines}, figures, plan, facts)


if __name__ == "__main__":
    start(main, __doc__)

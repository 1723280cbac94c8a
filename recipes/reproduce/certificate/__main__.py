"""``python -m recipes.reproduce.certificate``: which faults a certificate finds, how soon, and its false alarms."""

from pathlib import Path

from recipes.reproduce.certificate import jobs
from recipes.reproduce.certificate.analysis import facts, rule_numbers, tables
from recipes.reproduce.certificate.charts import draw
from recipes.reproduce.certificate.runs import ALPHA, COHORT, TOKENS
from recipes.reproduce.cli import start
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder, spent

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Plant faults, run the certificate, judge, draw and write."""
    started = begin("certificate")
    results = jobs.everything()
    plan = {
        "alpha": ALPHA,
        "requests in a cohort": COHORT,
        "tokens of an answer at most": TOKENS,
        "runs of a fault": jobs.REPEATS,
        "simulated runs at each temperature": jobs.SIMULATED,
        "live runs without a fault": jobs.LIVE * len(jobs.HEATS),
        "tokens of each": jobs.LONG,
    }
    told = facts(results) | {"processor seconds of the jobs, which are kept one by one": round(spent("certificate"))}
    keep(HERE, started, rule_numbers(results), tables(results), draw(results, HERE / "figures"), plan, told)


if __name__ == "__main__":
    start(main, __doc__)

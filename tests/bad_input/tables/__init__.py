"""All bad inputs. The tests and ``python -m tests.bad_input`` run every one of them."""

from tests.bad_input.case import Case, cases
from tests.bad_input.tables import adapt, bench, certify, dashboards, recipes, report, run

CASES: tuple[Case, ...] = (
    *cases("run", run.CASES),
    *cases("adapt", adapt.CASES),
    *cases("bench", bench.CASES),
    *cases("report", report.CASES),
    *cases("dashboards", dashboards.CASES),
    *cases("reproduce", recipes.REPRODUCE),
    *cases("tiny", recipes.TINY),
    *cases("certify", certify.CASES),
)

"""All bad inputs. The tests and ``python -m tests.bad_input`` run every one of them."""

from tests.bad_input.case import Case, cases
from tests.bad_input.tables import (
    adapt,
    bench,
    certify,
    damaged,
    dashboards,
    others,
    recipes,
    report,
    run,
    surroundings,
)

CASES: tuple[Case, ...] = (
    *cases("run", run.CASES),
    *cases("run", damaged.RUN),
    *cases("run", surroundings.RUN),
    *cases("adapt", adapt.CASES),
    *cases("adapt", damaged.ADAPT),
    *cases("bench", bench.CASES),
    *cases("report", report.CASES),
    *cases("report", damaged.REPORT),
    *cases("report", surroundings.REPORT),
    *cases("view", others.VIEW),
    *cases("view", damaged.VIEW),
    *cases("dashboards", dashboards.CASES),
    *cases("reproduce", recipes.REPRODUCE),
    *cases("tiny", recipes.TINY),
    *cases("cluster", others.CLUSTER),
    *cases("certify", certify.CASES),
    *cases("certify", damaged.CERTIFY),
    *cases("export", others.EXPORT),
    *cases("export", damaged.EXPORT),
    *cases("simulate", others.SIMULATE),
    *cases("settings", others.SETTINGS),
    *cases("catalogue", others.CATALOGUE),
    *cases("docs", others.DOCS),
    *cases("megatron_job.adapt", others.MEGATRON_ADAPT),
    *cases("megatron_job.convert", others.MEGATRON_CONVERT),
)

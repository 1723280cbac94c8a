"""The catalogue of metrics lists what is logged, and nothing else."""

import re
from pathlib import Path

import pytest

from bebop.metrics.catalogue import (
    CHARTS,
    INEXACT,
    METRICS,
    TITLES,
    MetricRow,
    document,
    names,
    tracker_layout,
    tracker_values,
)
from tests.monitor.test_watch_job import Job
from tests.mutants.fault import ROOT

ADAPTED = "bebop/adaptation/job.py"


def row_of(name: str) -> MetricRow | None:
    """The row of a logged name; None if it is listed nowhere."""
    bare = re.sub(r"/\d+(?=/|$)", "/K", re.sub(r"^(turn/\w+)/\d+/", r"\1/N/", name))
    ends = [row for row in METRICS if row.interval and bare in (f"{row.name}_low", f"{row.name}_high")]
    return next((row for row in METRICS if row.name == bare), ends[0] if ends else None)


def differences(logged: set[str], rows: tuple[MetricRow, ...]) -> tuple[set[str], set[str]]:
    """Names that were logged and are not listed; rows that were not logged."""
    found = {name: row_of(name) for name in logged}
    return {name for name, row in found.items() if row is None}, {r.name for r in rows if r not in found.values()}


def test_names_of_draft_positions_and_of_intervals_have_their_row() -> None:
    assert row_of("rollout/accept_rate/3") == row_of("rollout/accept_rate/K") is not None
    low = row_of("drift/position/2/change_low")
    assert low is not None and low.name == "drift/position/K/change"
    row = row_of("turn/overlap/4/2")
    assert row is not None and row.name == "turn/overlap/N/K" != row_of("turn/overlap/after/2")
    assert row_of("reward/mean_low") is None and row_of("rollout/accept_rate") is None
    assert len({row.name for row in METRICS}) == len(METRICS)


def test_the_document_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text() == document(), (
        "python -m bebop.metrics.catalogue > docs/metrics.md"
    )


@pytest.mark.slow
def test_a_job_logs_what_is_listed_and_nothing_else(tmp_path: Path) -> None:
    small = ("trainer.groups_per_step=4", "rollout.sampling.max_new_tokens=64", "rollout.slots=16")
    more = ("cotrain=always", "algorithm.kl_coefficient=0.01", "monitor.probe_every=2", "monitor.probe_completions=4")
    rows = Job(tmp_path, 7, *small, *more, "monitor.certify_every=3").run()
    logged = {name for row in rows for name in row} | {"step"}  # which the sinks add
    # Its reward has no parts. It keeps no old keys and values, decodes exactly, and its steps are too few for a slope
    # of their own (tests/monitor/test_drift.py).
    listed = tuple(
        r
        for r in METRICS
        if r.part not in ("adapt", "system", "turn", "evaluation")  # of the last: tests/driver/test_evaluation.py
        and "kept" not in r.name
        and "PART" not in r.name
        and r.rare != INEXACT
        and "rout" not in r.name  # of mixtures of experts, as the next: tests/trainer/test_routing.py
        and r.name
        not in ("train/expert_load_max", "drift/slope/early", "rollout/filtered_groups", "samples/epoch", "time/eval")
    )
    assert differences(logged, listed) == (set(), set())
    one = logged - {"reward/mean"} | {"reward/median"}
    assert differences(one, listed) == ({"reward/median"}, {"reward/mean"})


def test_the_rest_is_written_where_the_code_says_so() -> None:
    """What an adaptation evaluates, what keys and values of older weights do, and the weights of inexact answers."""
    sources = (ROOT / ADAPTED).read_text() + (ROOT / "trainer/losses.py").read_text()
    rest = [row.name for row in METRICS if row.part == "adapt" or "kept" in row.name or row.rare == INEXACT]
    assert [name for name in rest if f'"{name.removesuffix("K")}' not in sources] == []
    evaluated = {re.sub(r"{[^}]*}", "K", name) for name in re.findall(r'"(eval/[^"]+)"', (ROOT / ADAPTED).read_text())}
    assert evaluated == names("adapt", position="K")


def spelled() -> dict[str, str]:
    """Every string in the package that looks like a metric's name, with a file that has it."""
    groups = "|".join({row.name.split("/")[0] for row in METRICS if "/" in row.name})
    pattern = re.compile(rf'"((?:{groups})/[a-z_/0-9]+)"')
    files = [file for folder in ("bebop", "trainer", "rollout") for file in (ROOT / folder).rglob("*.py")]
    return {name: str(file) for file in files for name in pattern.findall(file.read_text())}


def test_reports_dashboards_and_the_monitor_use_listed_names() -> None:
    """A name may stop before the draft position, or before the part of a change."""
    listed = [name for part in TITLES for name in names(part)]
    foreign = {"rollout/spec_accept_length", "rollout/entropy", "samples/s"}  # of other trainers' logs, of the bench
    unlisted = {n: f for n, f in spelled().items() if n not in foreign and not any(o.startswith(n) for o in listed)}
    assert unlisted == {}
    assert len(spelled()) > 40


def test_trackers_sort_the_main_metrics_first_and_drift_last() -> None:
    """TensorBoard and W&B sort the part before the slash by the alphabet."""
    logged = {name: float(i) for i, name in enumerate(sorted(names("run", "head", "drift", "certificate")))}
    shown = tracker_values(logged)
    assert set(logged) - set(shown) == {*names("drift"), "step", "version"}, "all others keep their names"
    groups = list(dict.fromkeys(name.partition("/")[0] for name in sorted(shown)))
    assert groups[0] == "_main" and groups[-1] == "z_drift" and "reward" in groups
    main = [name for name in sorted(shown) if name.startswith("_main/")]
    order = ["reward/mean", "response/length", "policy/entropy", "rollout/accept_length", "rollout/tokens_per_s"]
    assert [shown[name] for name in main] == [logged[name] for name in order]
    assert tracker_values({"eval/accept_length": 2.5}) == {
        "_main/1_accept_length_held_out": 2.5,
        "eval/accept_length": 2.5,
    }


def test_the_page_of_charts_names_what_is_logged() -> None:
    shown = tracker_values(dict.fromkeys(sorted(names(*TITLES, position="2")), 0.0))
    layout = tracker_layout()
    assert list(layout) == ["main", *dict.fromkeys(chart.group for chart in CHARTS)]
    for charts in layout.values():
        assert charts
        for kind, tags in charts.values():
            assert kind == "Multiline" or (len(tags) == 3 and kind == "Margin")
            assert [tag for tag in tags if not any(re.fullmatch(tag, name) for name in shown)] == []
    assert layout["drafting"]["Why the accept length moved: entropy part"][1][0] == "z_drift/length/entropy"
    assert list(tracker_layout(adapted=True)) == ["main"]

"""Dashboard and alerts: names are those of a run, files are written where they belong, rules fire when they must."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from bebop.metrics import catalogue
from bebop.monitor.controller import ControllerConfig
from bebop.monitor.drift_monitor import STATES
from bebop.report.dashboards import provision
from bebop.report.dashboards.__main__ import main
from bebop.report.dashboards.alerts import LONG, rule_file
from bebop.report.dashboards.panels import FIRST_ID, ROWS, dashboard, on_top, series
from tests.commands import error_of

ROOT = Path(__file__).resolve().parents[3]
PANELS = [panel for panels in ROWS.values() for panel in panels]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)"
)
NAME = re.compile(r'__name__=~"([^"]+)"|\b(ray_\w+)')


def names(expr: str) -> set[str]:
    """The metrics in an expression; patterns as they stand."""
    return {pattern or name for pattern, name in NAME.findall(expr)}


def unknown(exprs: Iterable[str], exported: Iterable[str]) -> set[str]:
    """Names in the expressions that match nothing a run exports."""
    known = [series(name) for name in exported]
    return {name for expr in exprs for name in names(expr) if not any(re.fullmatch(name, metric) for metric in known)}


def tables() -> list[str]:
    """Every expression of the dashboard and of the rules."""
    rules = rule_file(provision.STALENESS)["groups"][0]["rules"]
    return [t["expr"] for p in dashboard()["panels"] for t in p.get("targets", [])] + [rule["expr"] for rule in rules]


# ---- what they show


def test_names_are_those_of_a_run() -> None:
    assert unknown(tables(), catalogue.names("run", "evaluation", "head", "drift", "certificate")) == set()
    assert unknown(["rate(ray_bebop_reward_max[1m])"], catalogue.names("run")) == {"ray_bebop_reward_max"}
    assert unknown(['{__name__=~"ray_bebop_rollout_accept_share_[0-9]+"}'], catalogue.names("run"))
    for panel in PANELS:
        wanted = catalogue.names(next((part for part, needs in catalogue.NEEDS.items() if needs == panel.needs), "run"))
        assert unknown([query.expr for query in panel.queries], wanted) == set(), panel.title


def test_panels_do_not_overlap_and_ids_are_unique() -> None:
    shown = dashboard()["panels"]
    assert len({p["id"] for p in shown}) == len(shown) == len(PANELS) + len(ROWS)
    cells = [(x, y) for p in shown for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"])
             for y in range(g["y"], g["y"] + g["h"])]  # fmt: skip
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({p.title for p in PANELS}) == len(PANELS)


def test_every_state_has_a_name_in_its_timeline() -> None:
    timeline = next(p for p in dashboard()["panels"] if p["type"] == "state-timeline")
    mapping = timeline["fieldConfig"]["defaults"]["mappings"][0]["options"]
    assert [mapping[str(i)]["text"] for i in range(len(STATES))] == list(STATES)


def test_bands_fill_down_to_a_line_that_is_there() -> None:
    for panel in dashboard()["panels"]:
        legends = {t["legendFormat"] for t in panel.get("targets", [])}
        for rule in panel.get("fieldConfig", {}).get("overrides", []):
            assert rule["matcher"]["options"] in legends
            below = [p["value"] for p in rule["properties"] if p["id"] == "custom.fillBelowTo"]
            assert set(below) <= legends


# ---- where it is written


def ray_session(folder: Path) -> Path:
    """What Ray leaves in a session: its dashboard with an open and a folded row, and its Grafana configuration."""
    dashboards = folder / "metrics" / "grafana" / "dashboards"
    dashboards.mkdir(parents=True)
    rays: dict[str, Any] = {
        "uid": "rayDefaultDashboard",
        "panels": [
            {"id": 1001, "type": "row", "panels": [], "gridPos": {"h": 1, "w": 24, "x": 0, "y": 0}},
            {"id": 24, "type": "graph", "gridPos": {"h": 8, "w": 12, "x": 0, "y": 1}},
            {"id": 1005, "type": "row", "panels": [{"id": 7, "gridPos": {"h": 8, "w": 12, "x": 0, "y": 10}}],
             "gridPos": {"h": 1, "w": 24, "x": 0, "y": 9}},
        ],
    }  # fmt: skip
    (dashboards / provision.RAYS).write_text(json.dumps(rays))
    (folder / "metrics" / "grafana" / "grafana.ini").write_text("ray's own")
    return folder


def test_a_session_gets_everything_and_keeps_what_ray_wrote(tmp_path: Path) -> None:
    session = ray_session(tmp_path)
    written = provision.provision(session, staleness=3)
    assert {p.name for p in written} == {
        "default.yml",
        "prometheus.yml",
        provision.ALERTS,
        provision.DASHBOARD,
        provision.RAYS,
    }
    assert (session / "metrics/grafana/grafana.ini").read_text() == "ray's own"
    config = yaml.safe_load((session / "metrics/prometheus/prometheus.yml").read_text())
    assert config["scrape_configs"][0]["file_sd_configs"][0]["files"] == [str(session / provision.DISCOVERY)]
    provider = yaml.safe_load((session / "metrics/grafana/provisioning/dashboards/default.yml").read_text())
    assert provider["providers"][0]["options"]["path"] == str(session / "metrics/grafana/dashboards")
    assert "rollout.staleness=3" in (session / "metrics/prometheus" / provision.ALERTS).read_text()


def test_without_rays_dashboard_the_node_is_found_by_its_port(tmp_path: Path) -> None:
    (tmp_path / "metrics_export_port_4e1f").write_text("18123")
    discovery = tmp_path / provision.DISCOVERY
    provision.provision(tmp_path, tmp_path / "out")
    assert json.loads(discovery.read_text())[0]["targets"] == ["127.0.0.1:18123"]
    discovery.write_text("Ray's own")
    provision.provision(tmp_path, tmp_path / "out")
    assert discovery.read_text() == "Ray's own"


def test_rays_dashboard_gets_the_panels_on_top_once(tmp_path: Path) -> None:
    path = ray_session(tmp_path) / "metrics/grafana/dashboards" / provision.RAYS
    before = json.loads(path.read_text())["panels"]
    provision.provision(tmp_path)
    once = path.read_text()
    provision.provision(tmp_path)
    assert path.read_text() == once
    panels = json.loads(once)["panels"]
    theirs = [p for p in panels if p["id"] < FIRST_ID]
    shift = theirs[0]["gridPos"]["y"] - before[0]["gridPos"]["y"]
    assert [p["id"] for p in theirs] == [p["id"] for p in before]
    assert shift >= max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in panels if p["id"] >= FIRST_ID)
    assert theirs[2]["panels"][0]["gridPos"]["y"] == before[2]["panels"][0]["gridPos"]["y"] + shift
    assert json.loads(once)["uid"] == "rayDefaultDashboard"


def test_panels_fit_the_dashboard_that_ray_itself_makes() -> None:
    factory = pytest.importorskip("ray.dashboard.modules.metrics.grafana_dashboard_factory")
    content, _ = factory.generate_default_grafana_dashboard()
    rays = json.loads(content)
    ids = [q["id"] for p in rays["panels"] for q in (p, *p.get("panels", []))]
    assert max(ids) < FIRST_ID
    joined = on_top(rays)
    assert len(joined["panels"]) == len(rays["panels"]) + len(PANELS) + len(ROWS)
    # The panels' two variables are Ray's as well.
    assert {"datasource", "SessionName"} <= {v["name"] for v in rays["templating"]["list"]}


def test_another_folder_and_a_missing_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "session").mkdir()
    assert main(["--session", str(tmp_path / "session"), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out/grafana/grafana.ini").exists() and not (tmp_path / "session/metrics").exists()
    assert error_of(main, ["--session", str(tmp_path / "none")], capsys).endswith("start the run first")


def test_dashboard_and_rules_are_written_without_a_session(tmp_path: Path) -> None:
    assert main(["--export", str(tmp_path), "--staleness", "3"]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {provision.DASHBOARD, provision.ALERTS}
    assert json.loads((tmp_path / provision.DASHBOARD).read_text()) == dashboard()
    assert yaml.safe_load((tmp_path / provision.ALERTS).read_text()) == rule_file(3)


# ---- what fires

HEALTHY: dict[str, str | None] = {
    "step": "1+1x240", "time/step": "15x240", "rollout/accept_length": "2.8x240", "rollout/accept_rate/1": "0.7x240",
    "drift/state": "0x240", "staleness/max": "1x240", "train/skipped": "0x240", "head/skipped": "0x240",
    "rollout/restarts": "0x240", "certify/failed": "0x240",
}  # fmt: skip
SICK: list[
    tuple[dict[str, str | None], set[str]]
] = [  # what is different in the series, of 30 s each; what fires after an hour
    ({}, set()),
    ({"rollout/accept_length": "1.0x240", "drift/state": None}, set()),  # plain decoding
    ({"rollout/accept_length": "2.8x100 1.1x140"}, {"BebopAcceptanceCollapse"}),
    ({"rollout/accept_length": "2.8x100 1.9x140"}, set()),  # half as many drafts: not a collapse
    ({"rollout/accept_rate/1": "0.02x240"}, {"BebopDraftsAtChance"}),
    ({"drift/state": "0x118 3x122"}, {"BebopBroken"}),
    ({"drift/state": "0x40 2x200"}, {"BebopMismatchDriven"}),
    ({"drift/state": "0x100 2x140"}, set()),  # for ten minutes only
    ({"drift/state": "1x240"}, set()),
    ({"certify/failed": "0x118 1x122"}, {"BebopNotCertified"}),
    ({"staleness/max": "2x240"}, {"BebopStale"}),
    ({"step": "1+1x90 90x150"}, {"BebopNoProgress"}),
    ({"step": "1+1x90 90x150", "time/step": "900x240"}, set()),  # a step takes fifteen minutes
    ({"step": "_x118 0x122"}, set()),  # it has just begun
    ({"train/skipped": "0x115 1x1 0x124"}, {"BebopSkippedSteps"}),
    ({"head/skipped": "0x115 1x1 0x124"}, {"BebopSkippedHeadSteps"}),
    ({"rollout/restarts": "0x100 3x140"}, {"BebopWorkersDie"}),
    ({"rollout/restarts": "3x240"}, set()),  # long ago
]


Case = tuple[Mapping[str, str | None], Iterable[str]]


def case(different: Mapping[str, str | None], firing: Iterable[str]) -> dict[str, Any]:
    """One run, in promtool's words: its series, and the alerts that fire after an hour."""
    values = {name: value for name, value in {**HEALTHY, **different}.items() if value is not None}
    return {
        "interval": "30s",
        "input_series": [{"series": f'{series(n)}{{SessionName="s"}}', "values": v} for n, v in values.items()],
        "promql_expr_test": [
            {
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                "eval_time": "60m",
                "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in sorted(firing)],
            }
        ],
    }


def complaint(folder: Path, rules: Mapping[str, Any], cases: Iterable[Case]) -> str:
    """What promtool finds wrong; empty if exactly the expected alerts fire in every case."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules))
    tests = [case(different, firing) for different, firing in cases]
    content = {"rule_files": ["rules.yaml"], "evaluation_interval": "30s", "tests": tests}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    command = ["promtool", "test", "rules", "test.yaml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_rules_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "session").mkdir()
    provision.provision(tmp_path / "session", tmp_path / "out")
    for kind, name in (("rules", provision.ALERTS), ("config", "prometheus.yml")):
        command = ["promtool", "check", kind, str(tmp_path / "out/prometheus" / name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    assert "SUCCESS" in done.stdout


@needs_promtool
def test_alerts_fire_when_they_must(tmp_path: Path) -> None:
    assert complaint(tmp_path, rule_file(1), SICK) == ""


@needs_promtool
def test_the_check_of_alerts_can_fail(tmp_path: Path) -> None:
    stale: Case = ({"staleness/max": "2x240"}, {"BebopStale"})
    assert "FAILED" in complaint(tmp_path, rule_file(2), [stale])  # a looser bound
    assert "FAILED" in complaint(tmp_path, rule_file(1), [({}, {"BebopBroken"})])
    rules = rule_file(1)
    collapse = next(r for r in rules["groups"][0]["rules"] if r["alert"] == "BebopAcceptanceCollapse")
    collapse["expr"] = collapse["expr"].replace(f"< {ControllerConfig().collapse} *", "< 0.9 *")
    assert "FAILED" in complaint(tmp_path, rules, [({"rollout/accept_length": "2.8x100 1.9x140"}, set())])


@needs_promtool
def test_long_steps_have_a_longer_window(tmp_path: Path) -> None:
    still: Case = ({"step": "1+1x60 60x180", "time/step": "900x240"}, {"BebopNoProgressLongSteps"})
    assert "FAILED" in complaint(tmp_path, rule_file(1), [still])  # a pause of half an hour is none
    rules = rule_file(1)
    for rule in rules["groups"][0]["rules"]:
        rule["expr"] = rule["expr"].replace(LONG, "20m")
    assert complaint(tmp_path, rules, [still]) == ""

"""A real Prometheus scrapes a real run: every panel of the dashboard is answered, every rule is evaluated."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bebop.metrics.sinks import read_jsonl
from bebop.report.dashboards.alerts import alerts
from bebop.report.dashboards.panels import ROWS, Panel, series
from bebop.report.dashboards.provision import DASHBOARD

missing = shutil.which("prometheus") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing, reason="prometheus is not installed (Debian: apt-get install prometheus)"),
]

# Small steps, and the head trained beside the policy, so that all numbers occur.
RUN = [
    "trainer.steps=100000", "trainer.save_every=0", "trainer.groups_per_step=2", "trainer.group_size=4",
    "rollout.slots=8", "rollout.sampling.max_new_tokens=48", "monitor.probe_every=4", "cotrain=always",
    "monitor.certify_every=4", "monitor.tensorboard=false", "monitor.plots=false", "runtime.progress=false",
]  # fmt: skip
PANELS = [panel for panels in ROWS.values() for panel in panels]
STEPS = 10  # before the first question: the monitor's reference is complete, its fixed contexts were read twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A run in progress and the Prometheus that watches it."""

    session: Path  # Ray's
    run: Path
    url: str  # of Prometheus
    exported: frozenset[str]  # every name so far, as Prometheus has to know it; not all occur in every step

    def ask(self, path: str, **arguments: str) -> Any:
        """The ``data`` of an answer of Prometheus' API."""
        query = f"?{urllib.parse.urlencode(arguments)}" if arguments else ""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, expr: str) -> list[Any]:
        """The series of a PromQL expression, with the dashboard's variable set as Grafana sets it."""
        return list(self.ask("query", query=expr.replace("$SessionName", self.session.name))["result"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(what: str, done: Callable[[], bool], seconds: float, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert process.poll() is None, f"{what}: the process ended with {process.returncode}"
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(1)


def stop(process: subprocess.Popen[str]) -> None:
    """Politely, then not; the whole group, as Ray's processes must not stay."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run and Prometheus, once every number of the first steps has been scraped."""
    folder = tmp_path_factory.mktemp("site")
    ray = Path(tempfile.mkdtemp(prefix="bebop-"))  # its sockets need a short path
    command = [sys.executable, "-m", "bebop.run", f"runtime.dir={folder / 'run'}", f"runtime.temp_dir={ray}", *RUN]
    command.append(f"runtime.metrics_port={free_port()}")
    # A file, as a pipe that nobody reads would fill up.
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, text=True, start_new_session=True)
        prometheus: subprocess.Popen[str] | None = None
        try:
            metrics = folder / "run" / "metrics.jsonl"
            wait("steps", lambda: metrics.exists() and len(read_jsonl(metrics)) >= STEPS, 300, job)
            session = (ray / "session_latest").resolve()
            subprocess.run(
                [sys.executable, "-m", "bebop.report.dashboards", "--session", str(session)], check=True, stdout=log
            )
            names = frozenset(series(name) for row in read_jsonl(metrics) for name in row)
            url = f"http://127.0.0.1:{free_port()}"
            site = Site(session=session, run=folder / "run", url=url, exported=names)
            config = session / "metrics" / "prometheus" / "prometheus.yml"
            address = site.url.removeprefix("http://")
            store = f"--storage.tsdb.path={folder / 'tsdb'}"
            start = ["prometheus", f"--config.file={config}", f"--web.listen-address={address}", store]
            prometheus = subprocess.Popen(start, stdout=log, stderr=log, text=True)
            wait("scraping", lambda: scraped(site), 120, job)
            yield site
        finally:
            if prometheus is not None:
                stop(prometheus)
            stop(job)
            shutil.rmtree(ray, ignore_errors=True)


def scraped(site: Site) -> bool:
    """Whether Prometheus knows every number of the run."""
    try:
        known = set(site.ask("label/__name__/values"))
    except (urllib.error.URLError, ConnectionError):
        return False
    return site.exported <= known


def shown(site: Site) -> dict[str, list[str]]:
    """Title -> expressions, of the dashboard as it lies in Ray's session."""
    dashboard = json.loads((site.session / "metrics" / "grafana" / "dashboards" / DASHBOARD).read_text())
    return {p["title"]: [t["expr"] for t in p["targets"]] for p in dashboard["panels"] if "targets" in p}


def occurs(site: Site, expr: str) -> bool:
    """Whether the run exports a metric of the expression."""
    pattern = re.search(r'__name__=~"([^"]+)"|\bray_bebop_\w+', expr)
    assert pattern is not None, expr
    return any(re.fullmatch(pattern[1] or pattern[0], name) for name in site.exported)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
def test_every_panel_is_answered(site: Site, panel: Panel) -> None:
    exprs = shown(site)[panel.title]
    absent = [expr for expr in exprs if not occurs(site, expr)]
    for expr in set(exprs) - set(absent):
        answers = site.query(expr)
        assert answers, expr
        assert all(answer["metric"]["SessionName"] == site.session.name for answer in answers)
    if absent and panel.needs:
        pytest.skip(f"this run has no numbers of {panel.needs} for {', '.join(absent)}")
    assert absent == []


def test_positions_become_labels(site: Site) -> None:
    expr = shown(site)["Acceptance per draft position"][0]
    assert [answer["metric"]["position"] for answer in site.query(expr)] == ["1", "2", "3"]


def test_another_session_has_no_data(site: Site) -> None:
    """The questions can go unanswered."""
    for exprs in shown(site).values():
        assert site.ask("query", query=exprs[0].replace("$SessionName", "session_of_another"))["result"] == []


def test_values_are_those_of_the_run(site: Site) -> None:
    (answer,) = site.query(f"{series('rollout/accept_length')}")
    seen = [row["rollout/accept_length"] for row in read_jsonl(site.run / "metrics.jsonl")]
    assert min(abs(float(answer["value"][1]) - value) for value in seen) < 1e-6
    (answer,) = site.query(f"count by (SessionName) ({series('step')})")
    assert answer["metric"]["SessionName"] == site.session.name  # what the dashboard's menu lists


def test_rules_are_evaluated_and_a_healthy_run_is_quiet(site: Site) -> None:
    def rules() -> list[Any]:
        groups = site.ask("rules")["groups"]
        return [rule for group in groups for rule in group["rules"]]

    end = time.monotonic() + 30
    while any(rule["health"] == "unknown" for rule in rules()) and time.monotonic() < end:
        time.sleep(1)
    loaded = rules()
    assert [rule["name"] for rule in loaded] == [alert.name for alert in alerts(1)]
    assert {rule["health"] for rule in loaded} == {"ok"}
    assert {rule["name"] for rule in loaded if rule["state"] == "firing"} == set()

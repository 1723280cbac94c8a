"""Writes dashboards, provisioning, scrape configuration and alerts, in Ray's places and formats.

``METRICS`` is ``<session>/metrics``, or the environment's RAY_METRICS_OUTPUT_ROOT. Ray's own files there are kept (its
Grafana configuration) or contained in their replacement (its scrape configuration, its dashboard).
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bebop.config.job import RolloutConfig
from bebop.errors import UserError
from bebop.report.dashboards.alerts import rule_file
from bebop.report.dashboards.panels import dashboard, on_top

DISCOVERY = "prom_metrics_service_discovery.json"  # Ray lists its nodes there, in the session's folder
DASHBOARD, RAYS = "bebop_grafana_dashboard.json", "default_grafana_dashboard.json"
ALERTS = "bebop_alerts.yaml"
STALENESS = RolloutConfig().staleness


def default_session() -> Path:
    """Return the path of the newest Ray session that was started without a folder of its own."""
    return Path(tempfile.gettempdir()) / "ray" / "session_latest"


def metrics_folder(session: Path) -> Path:
    """Return the folder in which Ray keeps the files for Grafana and Prometheus."""
    return Path(os.environ.get("RAY_METRICS_OUTPUT_ROOT") or session / "metrics")


def provision(session: Path, out: Path | None = None, staleness: int = STALENESS) -> list[Path]:
    """Write all files for a Ray session, into ``out`` or Ray's own folder, and return their paths.

    Call it once Ray is up: its dashboard empties the folder when it starts. Raises ``UserError`` if there is no
    session.
    """
    session = session.resolve()  # session_latest will point to the next session
    if not session.is_dir():
        raise UserError(f"{str(session)!r} is no Ray session: give the folder, or start the run first")
    root = (out or metrics_folder(session)).resolve()
    own = os.environ.get("RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR") if out is None else None
    dashboards = Path(own) if own else root / "grafana" / "dashboards"
    written = [*_grafana(root / "grafana", dashboards), *_discovery(session)]
    texts = {
        root / "prometheus" / ALERTS: as_yaml(rule_file(staleness)),
        root / "prometheus" / "prometheus.yml": as_yaml(scrape_config(session / DISCOVERY)),
        dashboards / DASHBOARD: as_json(dashboard()),
    }
    rays = dashboards / RAYS
    if rays.exists():
        texts[rays] = as_json(on_top(json.loads(rays.read_text(encoding="utf-8"))))
    return written + [_write(path, text) for path, text in texts.items()]


def export(folder: Path, staleness: int = STALENESS) -> list[Path]:
    """Write only the dashboard and the rules, for a Grafana and a Prometheus that are configured already."""
    texts = {folder / DASHBOARD: as_json(dashboard()), folder / ALERTS: as_yaml(rule_file(staleness))}
    return [_write(path, text) for path, text in texts.items()]


def scrape_config(discovery: Path) -> dict[str, Any]:
    """Return Ray's own scrape configuration with the alert rules added."""
    return {
        "global": {"scrape_interval": "10s", "evaluation_interval": "10s"},  # Ray renews its numbers as often
        "rule_files": [ALERTS],  # beside this file
        "scrape_configs": [{"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)]}]}],
    }


def as_json(content: dict[str, Any]) -> str:
    """Return indented JSON with a newline at the end."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def as_yaml(content: dict[str, Any]) -> str:
    """Return YAML in the order given, without folded lines."""
    return yaml.safe_dump(content, sort_keys=False, width=10_000)


def _grafana(root: Path, dashboards: Path) -> list[Path]:
    """Write the files of Grafana's configuration that Ray has not written, for instance as its dashboard is off."""
    provisioning = root / "provisioning"
    provider = {"name": "Ray", "folder": "Ray", "type": "file", "options": {"path": str(dashboards)}}
    source = {
        "name": os.environ.get("RAY_PROMETHEUS_NAME") or "Prometheus",
        "url": os.environ.get("RAY_PROMETHEUS_HOST") or "http://localhost:9090",
        "type": "prometheus",
        "isDefault": True,
        "access": "proxy",
    }
    texts = {
        root / "grafana.ini": INI.format(provisioning=provisioning),
        provisioning / "dashboards" / "default.yml": as_yaml({"apiVersion": 1, "providers": [provider]}),
        provisioning / "datasources" / "default.yml": as_yaml({"apiVersion": 1, "datasources": [source]}),
    }
    return [_write(path, text) for path, text in texts.items() if not path.exists()]


def _discovery(session: Path) -> list[Path]:
    """Write the list of nodes if Ray has not; with Ray's dashboard off, this node is the only one."""
    path = session / DISCOVERY
    ports = [port.read_text(encoding="utf-8").strip() for port in session.glob("metrics_export_port_*")]
    if path.exists() or not ports:
        return []
    targets = [f"127.0.0.1:{port}" for port in ports]
    return [_write(path, json.dumps([{"labels": {"job": "ray"}, "targets": targets}]))]


INI = """[security]
allow_embedding = true

[auth.anonymous]
enabled = true
org_name = Main Org.
org_role = Viewer

[paths]
provisioning = {provisioning}
"""


def _write(path: Path, text: str) -> Path:
    """Write a file atomically, since Grafana and Prometheus may be reading it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
    return path

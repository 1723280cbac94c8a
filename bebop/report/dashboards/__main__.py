"""``python -m bebop.report.dashboards``: writes the files that Grafana and Prometheus need to show a run."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bebop.command import Parser, check_writable, run_main, whole
from bebop.report.dashboards.provision import STALENESS, default_session, export, metrics_folder, provision

NEXT = """Prometheus: prometheus --config.file={root}/prometheus/prometheus.yml
Grafana:    grafana-server --homepath DIR --config {root}/grafana/grafana.ini, then the dashboard Bebop
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files and print their paths; raise ``UserError`` if there is no session or no place to write."""
    parser = Parser(
        prog="python -m bebop.report.dashboards",
        description="Write a Grafana dashboard, alert rules and the configuration of Grafana and Prometheus for a run.",
    )
    parser.add_argument(
        "--session",
        metavar="DIR",
        type=Path,
        default=default_session(),
        help="the run's Ray session, runtime.temp_dir/session_latest (default: %(default)s)",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: where Ray keeps its own)")
    parser.add_argument("--staleness", type=whole(0), default=STALENESS, help="of the run (default: %(default)s)")
    parser.add_argument("--export", metavar="DIR", type=Path, help="write the dashboard and the rules alone, there")
    options = parser.parse_args(arguments)
    if options.export is not None:
        check_writable("--export", options.export)
        return _list_written(export(options.export, options.staleness))
    if options.out is not None:
        check_writable("--out", options.out)
    _list_written(provision(options.session, options.out, options.staleness))
    root = options.out or metrics_folder(options.session)
    sys.stderr.write(NEXT.format(root=root.resolve()))
    return 0


def _list_written(paths: list[Path]) -> int:
    sys.stdout.writelines(f"{path}\n" for path in paths)
    return 0


if __name__ == "__main__":
    run_main(main)

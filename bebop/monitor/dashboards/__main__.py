"""``python -m bebop.monitor.dashboards``: what Grafana and Prometheus need to show a run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bebop.errors import UserError
from bebop.monitor.dashboards.provision import STALENESS, commit, default_session, metrics_folder, provision

NEXT = """Prometheus: prometheus --config.file={root}/prometheus/prometheus.yml
Grafana:    grafana-server --homepath DIR --config {root}/grafana/grafana.ini, then the dashboard Bebop
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files; 0 if all is well, 2 with one line on stderr if not."""
    parser = argparse.ArgumentParser(
        prog="python -m bebop.monitor.dashboards",
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
    parser.add_argument("--staleness", type=int, default=STALENESS, help="rollout.staleness (default: %(default)s)")
    parser.add_argument("--commit", action="store_true", help="renew the files inside the package instead")
    options = parser.parse_args(arguments)
    try:
        if options.commit:
            return _tell(commit())
        _tell(provision(options.session, options.out, options.staleness))
    except (UserError, OSError) as error:
        sys.stderr.write(f"bebop.monitor.dashboards: {error}\n")
        return 2
    root = options.out or metrics_folder(options.session)
    sys.stderr.write(NEXT.format(root=root.resolve()))
    return 0


def _tell(paths: list[Path]) -> int:
    sys.stdout.writelines(f"{path}\n" for path in paths)
    return 0


if __name__ == "__main__":
    sys.exit(main())

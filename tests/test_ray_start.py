"""Ray that does not come up: tried again with other ports, then refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.remote import session


@pytest.mark.parametrize("failures", [0, 1, session.STARTS - 1, session.STARTS])
def test_a_start_that_fails_is_tried_again(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    given = iter([40001] * 3 + [40002, 40003] * 2 + [40004, 40005, 40006])  # as the system may, the same one again

    def init(_metrics_export_port: int, **_: Any) -> None:
        ports.extend((int(session.os.environ["RAY_GCS_SERVER_PORT"]), _metrics_export_port))
        if len(ports) <= 2 * failures:
            raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr(session, "_some_port", lambda: next(given))
    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setenv("RAY_GCS_SERVER_PORT", "0")
    if failures < session.STARTS:
        session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    else:
        with pytest.raises(UserError, match=r"^Ray did not start: .* timed out during startup\. \(3 times\)$"):
            session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    assert ports == [40001, 40002, 40003, 40004, 40005, 40006][: 2 * min(failures + 1, session.STARTS)]

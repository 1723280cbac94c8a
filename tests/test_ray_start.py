"""Ray that does not come up: tried again with other ports, then refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.remote import session


@pytest.mark.parametrize("failures", [0, 1, session.STARTS - 1, session.STARTS])
def test_a_start_that_fails_is_tried_again(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[str] = []

    def init(**_: Any) -> None:
        ports.append(session.os.environ["RAY_GCS_SERVER_PORT"])
        if len(ports) <= failures:
            raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setenv("RAY_GCS_SERVER_PORT", "0")
    if failures < session.STARTS:
        session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    else:
        with pytest.raises(UserError, match=r"^Ray did not start: .* timed out during startup\. \(3 times\)$"):
            session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    assert len(ports) == min(failures + 1, session.STARTS) == len(set(ports))

"""Says with each answer of the embedded engine what its parked caches have been good for so far.

Loaded through VERL_USE_EXTERNAL_MODULES.
"""

import dataclasses
from typing import Any

from bebop.verl_job.server import EmbeddedServer

_output = EmbeddedServer._output


def output(self: EmbeddedServer, *args: Any) -> dict[str, Any]:
    answer = _output(self, *args)
    counts = dataclasses.asdict(self.thread.engine.retention.counts)  # type: ignore[attr-defined]
    return answer | {"extra_fields": answer["extra_fields"] | {"parking": counts}}


EmbeddedServer._output = output  # type: ignore[method-assign]

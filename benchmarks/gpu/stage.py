"""Shared parts of the GPU benchmark's stages: rows that are stored at once, the time left, and timing of calls."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bebop.bench import record
from bebop.bench.kernels import Timer

GPUS = Path("/proc/driver/nvidia/gpus")
STEADY = 0.05  # two measurements of a call may differ by this share
Row = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Context:
    """Inputs of a stage, and the rows that it has measured."""

    file: Path  # where its rows go
    seconds: float  # that it may take
    dry: bool  # on the CPU, with tiny shapes
    origin: Mapping[str, object]  # commit and command
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    _timer: Timer | None = None

    @property
    def device(self) -> torch.device:
        """Return the device that everything runs on."""
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def left(self) -> float:
        """Return the seconds until the stage has to end."""
        return self.seconds - (time.monotonic() - self.began)

    @property
    def timer(self) -> Timer:
        """Return the timer of calls; the first call makes it: it takes a gigabyte to flush the caches with."""
        if self._timer is None:
            self._timer = Timer(str(self.device), repeats=3 if self.dry else 30)
        return self._timer

    def keep(self, what: str, value: float | None, **more: object) -> None:
        """Add a row and write it to the file at once."""
        self.rows.append({"what": what, "value": value, **more})
        self.write()

    def write(self) -> None:
        """Write all rows so far, atomically: the stage may be killed at any moment."""
        content = {"seconds": self.seconds, "dry": self.dry, "place": record.place(self.origin), "rows": self.rows}
        scratch = self.file.with_suffix(".new")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(self.file)

    def time(
        self, what: str, call: Callable[[], object], bytes_: float = 0.0, flops: float = 0.0, **more: object
    ) -> None:
        """Keep the milliseconds of a call, with cold caches: the better of two medians, and whether both agree.

        ``bytes_`` and ``flops``: the traffic and computation of any implementation; rates are kept beside. If time or
        memory runs out, the row gives the reason.
        """
        if self.left < 0:
            self.keep(what, None, skipped="time is up", **more)
            return
        try:
            limit = min(1.0, max(0.1, self.left / 8))
            first, second = (self.timer(call, limit) for _ in range(2))
        except (
            Exception
        ) as error:  # of one case, such as tiles too wide for the card: the others are measured all the same
            reason = "out of memory" if isinstance(error, torch.OutOfMemoryError) else _line(error)
            self.keep(what, None, skipped=reason, **more)
            torch.cuda.empty_cache()
            return
        best = min(first, second)
        rates = {"GB/s": bytes_ / best / 1e6} if bytes_ else {}
        rates |= {"TFLOP/s": flops / best / 1e9} if flops else {}
        self.keep(what, best, unit="ms", steady=abs(first - second) <= STEADY * best, **rates, **more)

    @contextmanager
    def tried(self, what: str, **more: object) -> Iterator[None]:
        """Continue if the block fails; a row gives the reason."""
        try:
            yield
        except Exception as error:
            self.keep(what, None, skipped=_line(error), **more)


def _line(error: Exception) -> str:
    """Return an error as one line of bounded length."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def warmed(calls: Sequence[Callable[[], object]]) -> None:
    """Call everything once in parallel: Triton compiles each kernel for seconds, on one core each."""

    def call(one: Callable[[], object]) -> None:
        try:
            one()
        except Exception:  # it will fail again where it is timed, and say so there
            pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, calls))
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the run."""

    name: str
    seconds: float  # of a run of 480 seconds
    run: Callable[[Context], None]
    decides: str
    asked: bool = False  # only where --stage names it

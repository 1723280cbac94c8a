"""Readers of logs as step records: drift.jsonl, metrics.jsonl, SGLang's and vLLM's numbers, other trainers' JSONL.

A log has one JSON object a line; its keys tell the kind of line. A log of averages has one row a step, so its intervals
come from the scatter of steps. If a step occurs twice (a run went back to a checkpoint), the later line counts.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bebop.config.fields import MAX_INT
from bebop.errors import UserError
from bebop.monitor.adapters import ACCEPTED, VLLM, VllmCounters, sglang_stats, sglang_stretches, verified_entries
from bebop.monitor.certified import Certified
from bebop.monitor.controller import Health
from bebop.monitor.drift_monitor import DriftMonitor, Explanation
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.records import StepRecords, from_averages, from_stats, merge_records, with_entropy
from bebop.run_dir.safe_parse import finite, json_lines
from bebop.trajectory import DecodeStats

# Accepted keys of a line of averages; ``names`` takes precedence. A trailing / stands for position 1, 2, ...
NAMES: dict[str, tuple[str, ...]] = {
    "step": ("step", "global_step", "_step", "rollout_step"),
    "accept_length": ("rollout/accept_length", "accept_length", "rollout/spec_accept_length", "spec_accept_length"),
    "entropy": ("rollout/target_entropy", "policy/entropy", "actor/entropy", "rollout/entropy", "entropy"),
    "tokens": ("response/tokens", "tokens"),
    "accept_rate/": ("rollout/accept_rate/", "accept_rate/"),
    "overlap/": ("rollout/overlap/", "overlap/"),
    "target_only/": ("rollout/target_only/", "target_only/"),
    "task": ("task",),
    "prompt": ("prompt", "prompt_index", "group"),
    "version": ("version", "weight_version"),
    "lag": ("lag", "staleness/mean"),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedStep:
    """One step of a log: its records and the readings made at that step."""

    records: StepRecords
    reading: ProbeReading | None = None
    sweep: Sweep | None = None
    certified: Certified | None = None
    health: Health | None = None
    restart: bool = False  # from here on against a new reference

    def feed(self, monitor: DriftMonitor) -> Explanation | None:
        """Pass the step to ``monitor`` and return its explanation."""
        if self.restart:
            monitor.restart()
        uncertified = "" if self.certified is None else self.certified.diagnosis()
        return monitor.observe(self.records, self.reading, self.sweep, self.health, uncertified)


def log_row(
    records: StepRecords,
    reading: ProbeReading | None = None,
    sweep: Sweep | None = None,
    certified: Certified | None = None,
    health: Health | None = None,
    restart: bool = False,
) -> dict[str, Any]:
    """Return one line of ``drift.jsonl``, which suffices to recompute every estimate."""
    extra = {"bank": reading, "sweep": sweep, "certified": certified, "health": health}
    row = records.to_row() | {name: part.to_row() for name, part in extra.items() if part is not None}
    return row | ({"restart": True} if restart else {})


def read_log(path: Path, names: Mapping[str, str] | None = None) -> list[LoggedStep]:
    """Read the steps of a log into memory, in order; ``names`` maps keys of ``NAMES`` to those of the log.

    Raises ``UserError`` for a missing file, a broken line, an unknown name, or a log without acceptance.
    """
    steps: dict[int, list[LoggedStep]] = {}
    for step, together, logged in _logged_lines(path, names):
        steps[step] = [*(steps.get(step, []) if together else []), logged]
    return [_joined(steps[step]) for step in sorted(steps)]


class OutOfOrderError(UserError):
    """A log goes back to an earlier step, so it cannot be read step by step."""


def iter_log(path: Path, names: Mapping[str, str] | None = None) -> Iterator[LoggedStep]:
    """Yield the steps that ``read_log`` returns, with one of them in memory at a time.

    Raises ``OutOfOrderError`` if a step follows a later one, which a ``StepLog`` rules out.
    """
    parts: list[LoggedStep] = []
    newest: int | None = None
    for step, together, logged in _logged_lines(path, names):
        if newest is not None and step < newest:
            raise OutOfOrderError(f"{path} goes back from step {newest} to step {step}: sort its lines by step")
        if parts and step != newest:
            yield _joined(parts)
        parts = [*(parts if together and step == newest else []), logged]
        newest = step
    if parts:
        yield _joined(parts)


def _logged_lines(path: Path, names: Mapping[str, str] | None) -> Iterator[tuple[int, bool, LoggedStep]]:
    """Yield step, whether the line is one of several of its step, and content of each line that tells of drafts."""
    unknown = sorted(set(names or {}) - set(NAMES))
    if unknown:
        raise UserError(f"cannot map {unknown[0]!r}: give one of {', '.join(NAMES)}")
    known = {ours: ((names or {}).get(ours), *theirs) for ours, theirs in NAMES.items()}
    counters: VllmCounters | None = None
    keys: set[str] = set()
    empty = True
    for number, row in _rows(path):
        keys |= set(row)
        step = _find(row, known["step"])
        if isinstance(step, bool) or (value := finite(step)) is None or value % 1 or abs(value) > MAX_INT:
            raise UserError(f"{path} line {number} has no whole-numbered step: name its key with step=NAME")
        try:
            logged, counters = _read(row, int(step), known, counters)
        except UserError as error:
            raise UserError(f"{path} line {number}: {error}") from None
        except (ArithmeticError, AttributeError, IndexError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} line {number} cannot be read ({reason}): give finite numbers and lists") from None
        if logged is not None:
            # Averages and drift rows are whole steps; requests of one step follow one another.
            yield int(step), "meta_info" in row or any(key in row for key in ACCEPTED), logged
            empty = False
    if empty:
        shown = ", ".join(sorted(keys)[:12])
        raise UserError(f"{path} has no acceptance (keys: {shown}): name its key with accept_length=NAME")


def read_row(row: Mapping[str, Any]) -> LoggedStep:
    """Read a line of ``drift.jsonl``: the inverse of ``log_row``, up to its rounding."""
    kinds: dict[str, Any] = {"bank": ProbeReading, "sweep": Sweep, "certified": Certified, "health": Health}
    try:
        parts = {name: kind.from_row(row[name]) for name, kind in kinds.items() if row.get(name) is not None}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{', '.join(kinds)} cannot be read ({error!r}): give drift.jsonl") from None
    reading, restart = parts.pop("bank", None), bool(row.get("restart"))
    return LoggedStep(records=StepRecords.from_row(row), reading=reading, restart=restart, **parts)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield line number and object of each line of a JSONL file; an incomplete last line is left out."""
    try:
        for number, _, row in json_lines(path, blank=True):
            if not isinstance(row, dict):
                raise UserError(f"{path} line {number} is not an object: give one JSON object a line")
            yield number, row
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise UserError(f"{path} cannot be read ({reason}): give a JSONL file") from None


def _read(
    row: Mapping[str, Any], step: int, known: Mapping[str, tuple[str | None, ...]], counters: VllmCounters | None
) -> tuple[LoggedStep | None, VllmCounters | None]:
    """Return one line as a step, None if it says nothing about drafts, and the latest vLLM counters."""
    if isinstance(row.get("reached"), list) and "unit" in row:
        return read_row({**row, "step": step}), counters
    if any(key.startswith(VLLM) for key in row):
        now = VllmCounters.of(row)
        stats = now.since(counters)
        return (None if stats is None else _logged([(0, stats)], row, step, known)), now
    meta = row.get("meta_info", row if any(key in row for key in (*ACCEPTED, "spec_verify_ct")) else None)
    if isinstance(meta, Mapping):
        if verified := verified_entries(meta):
            return _logged(sglang_stretches(verified), row, step, known), counters
        stats = sglang_stats(meta)
        return (None if stats is None else _logged([(0, stats)], row, step, known)), counters
    return _averages(row, step, known), counters


def _logged(
    stretches: list[tuple[int, DecodeStats]],
    row: Mapping[str, Any],
    step: int,
    known: Mapping[str, tuple[str | None, ...]],
) -> LoggedStep:
    """Return the records of one completion (or of one reading of counters), with the labels of its line."""
    count = len(stretches)
    prompt, version, lag = (_whole(_find(row, known[name])) for name in ("prompt", "version", "lag"))
    records = from_stats(
        [stats for _, stats in stretches],
        step,
        unit=[prompt] * count,
        answer=[0] * count,
        position=[token for token, _ in stretches],
        task=[str(_find(row, known["task"]) or "")] * count,
        version=[version] * count,
        lag=[lag] * count,
    )
    entropy = _find(row, known["entropy"])
    if isinstance(entropy, int | float) and not np.isfinite(records.entropy_sum).all():
        records = with_entropy(records, float(entropy))
    return LoggedStep(records=records)


def _averages(row: Mapping[str, Any], step: int, known: Mapping[str, tuple[str | None, ...]]) -> LoggedStep | None:
    """Read a line of averages as one row, weighted by its number of tokens if it has one."""
    length = _find(row, known["accept_length"])
    if not isinstance(length, int | float) or not math.isfinite(length):
        return None
    if length < 1:
        raise UserError(f"accept length {length} is below 1: it counts the token after the accepted drafts, so add 1")
    tokens, entropy = _find(row, known["tokens"]), _find(row, known["entropy"])
    rates = {name: _positions(row, known[f"{name}/"]) for name in ("accept_rate", "overlap", "target_only")}
    records = from_averages(
        step,
        length=float(length),
        entropy=float(entropy) if isinstance(entropy, int | float) else math.nan,
        cycles=float(tokens) / length if isinstance(tokens, int | float) and tokens > 0 else 1.0,
        accept_rate=rates["accept_rate"],
        overlap=rates["overlap"],
        target_only=rates["target_only"],
    )
    return LoggedStep(records=records)


def _joined(parts: list[LoggedStep]) -> LoggedStep:
    """Merge the requests of one step; requests without a prompt number become units of their own."""
    records = merge_records([part.records for part in parts])
    alone = records.unit < 0
    unit = np.where(alone, records.unit.max(initial=-1) + 1 + records.answer, records.unit)
    return dataclasses.replace(parts[-1], records=records.relabelled(unit))


def _find(row: Mapping[str, Any], names: tuple[str | None, ...]) -> Any:
    """Return the value of the first of ``names`` that the row has."""
    return next((row[name] for name in names if name is not None and row.get(name) is not None), None)


def _positions(row: Mapping[str, Any], prefixes: tuple[str | None, ...]) -> list[float]:
    """Return the numbers under ``<prefix>1``, ``<prefix>2``, ... for the first prefix that the row has."""
    for prefix in prefixes:
        values: list[float] = []
        while prefix is not None and isinstance(value := row.get(f"{prefix}{len(values) + 1}"), int | float):
            values.append(float(value))
        if values:
            return values
    return []


def _whole(value: Any) -> int:
    """Return ``value`` as a whole number for a label; -1 if it is not a number."""
    try:
        return round(float(value))
    except (TypeError, ValueError):
        return -1

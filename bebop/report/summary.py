"""The table at the top of the report: one row a run."""

from collections.abc import Sequence

from bebop.report.runs import DASH, Run
from bebop.systems import SYSTEMS

HEADS = ("Run", "Model", "Task", "System", "Steps", "Reward", "Accept length", "Tokens/s", "Minutes")
NOTE = (
    "Reward and accept length: mean of the first five steps → mean of the last ten; of fewer than fifteen, the first "
    "five or the first half → the rest. Tokens/s: mean over the run, weighted by the duration of each step."
)
FIRST, LAST = 5, 10


def summary(run: Run) -> tuple[str, ...]:
    """The cells of one run, in the order of ``HEADS``; a dash where there is no data."""
    drafts = run.setting("decoding.draft_tokens")
    system = run.setting("decoding.system")
    drafting = DASH not in (system, drafts) and (system not in SYSTEMS or SYSTEMS[system].drafts)
    return (
        run.name,
        run.setting("model.path").rstrip("/").rsplit("/", 1)[-1],
        run.setting("task.name"),
        f"{system}, K = {drafts}" if drafting else system,
        str(len(run.steps)),
        _first_last(run, "reward/mean", 3),
        _first_last(run, "rollout/accept_length", 2),
        _shown(_over_time(run, "rollout/tokens_per_s"), 0),
        _shown(_minutes(run), 1),
    )


def windows(column: Sequence[float | None]) -> tuple[list[float], list[float]]:
    """The first numbers and the last ones, none of which is in both; a single number is among the last."""
    known = [value for value in column if value is not None]
    first = min(FIRST, len(known) // 2)
    return known[:first], known[first:][-LAST:]


def _first_last(run: Run, metric: str, digits: int) -> str:
    """Mean of the first steps, mean of the last ones, and the difference."""
    first, last = map(_mean, windows(run.columns.get(metric, [])))
    if first is None or last is None:
        return DASH if last is None else f"{last:.{digits}f}"
    return f"{first:.{digits}f} → {last:.{digits}f} ({last - first:+.{digits}f})"


def _over_time(run: Run, metric: str) -> float | None:
    """Mean of a rate over time: steps weigh as long as they took; evenly where that is not known."""
    rates = run.columns.get(metric, [])
    times = run.columns.get("time/step", [None] * len(rates))
    pairs = [(rate, time) for rate, time in zip(rates, times, strict=True) if rate is not None and time is not None]
    if not pairs or not sum(time for _, time in pairs):
        return _mean(rates)
    return sum(rate * time for rate, time in pairs) / sum(time for _, time in pairs)


def _minutes(run: Run) -> float | None:
    """Time in steps; None if it was not recorded."""
    times = [time for time in run.columns.get("time/step", []) if time is not None]
    return sum(times) / 60 if times else None


def _mean(column: Sequence[float | None]) -> float | None:
    """Mean of the numbers in a column; None without any."""
    numbers = [value for value in column if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _shown(value: float | None, digits: int) -> str:
    """A number with thousands separated, or a dash."""
    return DASH if value is None else f"{value:,.{digits}f}"

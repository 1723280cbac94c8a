"""Alert rules for Prometheus, as a table: expression, hold time, and what to do."""

from dataclasses import dataclass
from typing import Any, Literal

from bebop.monitor.controller import ControllerConfig, State
from bebop.monitor.drift_monitor import STATES
from bebop.report.dashboards.panels import series

MANY, LONG = "10m", "2h"  # windows in which a run of short steps, or of long steps, must finish a step
SHORT_STEP, LONG_STEP = 200, 2400  # s: a third of those windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert rule of Prometheus."""

    name: str
    expr: str
    hold: str  # how long the expression must be true
    severity: Literal["warning", "critical"]
    summary: str
    description: str  # what it means and what to look at


def alerts(staleness: int) -> tuple[Alert, ...]:
    """Return all alert rules of a run with the given bound ``rollout.staleness``."""
    return (*_drafting(), *_running(staleness))


def rule_file(staleness: int) -> dict[str, Any]:
    """Return the rules in Prometheus' format."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in alerts(staleness)
    ]
    return {"groups": [{"name": "bebop", "rules": rules}]}


def _drafting() -> tuple[Alert, ...]:
    length, first = series("rollout/accept_length"), series("rollout/accept_rate/1")
    thresholds = ControllerConfig()
    return (
        Alert(
            name="BebopAcceptanceCollapse",
            expr=f"({length} - 1) < {thresholds.collapse} * (max_over_time({length}[1h]) - 1)",
            hold="1m",
            severity="critical",
            summary="Drafts are accepted less than a fifth as often as within the last hour",
            description="Accepted drafts per cycle fell to {{ $value }}. Look at the last weight sync: a head that "
            "does not belong to the model, or was not sent.",
        ),
        Alert(
            name="BebopDraftsAtChance",
            expr=f"{first} < {thresholds.chance}",
            hold="5m",
            severity="warning",
            summary="Hardly a draft is accepted",
            description="The first draft is accepted with a rate of {{ $value }}: drafting costs more than it gives. "
            "Train the head (python -m bebop.adapt), or set decoding=autoregressive.",
        ),
        _state(
            "broken",
            "0s",
            "critical",
            "The monitor calls the draft broken",
            "Drafts are as good as chance, the engine does not run the weights that it should, or its completions do "
            "not follow the policy's distribution.",
        ),
        _state(
            "mismatch-driven",
            "30m",
            "warning",
            "The head has not fitted the policy for half an hour",
            "Acceptance is lost to mismatch, not to entropy: co-train the head (cotrain.mode=auto), or adapt it.",
        ),
    )


def _state(state: State, hold: str, severity: Literal["warning", "critical"], summary: str, description: str) -> Alert:
    """Return the rule that fires while the monitor is in ``state``."""
    name = "Bebop" + "".join(word.capitalize() for word in state.split("-"))
    expr = f"{series('drift/state')} == {STATES.index(state)}"
    return Alert(name=name, expr=expr, hold=hold, severity=severity, summary=summary, description=description)


def _running(staleness: int) -> tuple[Alert, ...]:
    return (
        Alert(
            name="BebopNotCertified",
            expr=f"{series('certify/failed')} == 1",
            hold="0s",
            severity="critical",
            summary="Completions do not follow the policy's distribution",
            description="What speaks for it, and for which cause, is in the run's controller.jsonl and in its log. "
            "python -m bebop.certify holds the engine against the model without a job around it.",
        ),
        Alert(
            name="BebopStale",
            expr=f"{series('staleness/max')} > {staleness}",
            hold="0s",
            severity="critical",
            summary=f"Tokens lag by more than rollout.staleness={staleness} updates",
            description="The largest lag is {{ $value }}. The buffer rules this out: it is a bug, or these rules "
            "were written for another bound.",
        ),
        _no_progress("BebopNoProgress", MANY, f"< {SHORT_STEP}"),
        _no_progress("BebopNoProgressLongSteps", LONG, f">= {SHORT_STEP} < {LONG_STEP}"),
        *(_skipped(name, what, prefix) for name, what, prefix in SKIPPED),
        Alert(
            name="BebopWorkersDie",
            expr=f"delta({series('rollout/restarts')}[30m]) > 1",
            hold="0s",
            severity="warning",
            summary="More than one rollout worker was replaced within half an hour",
            description="The run ends at runtime.max_restarts. Look at the workers' logs in Ray's session folder.",
        ),
    )


SKIPPED = (("BebopSkippedSteps", "the policy", "train"), ("BebopSkippedHeadSteps", "the head", "head"))


def _no_progress(name: str, window: str, step: str) -> Alert:
    """Return the rule that fires if no update finished within ``window``; it applies to steps of which three fit into
    it.
    """
    count, duration = series("step"), series("time/step")
    still = f"changes({count}[{window}]) == 0 and {count} offset {window}"  # excludes a run that has just begun
    return Alert(
        name=name,
        expr=f"{still} and {duration} {step}",
        hold="0s",
        severity="critical",
        summary=f"No update was finished within {window}",
        description="Ray session {{ $labels.SessionName }} stands still. Look at the rewards (a verifier that does not "
        "end), at time/idle, and at the workers' logs.",
    )


def _skipped(name: str, what: str, prefix: str) -> Alert:
    """Return the rule on skipped steps, with a maximum over time: Prometheus samples single steps and may miss short
    ones.
    """
    return Alert(
        name=name,
        expr=f"max_over_time({series(prefix + '/skipped')}[10m]) > 0",
        hold="0s",
        severity="warning",
        summary=f"Optimizer steps of {what} were skipped",
        description="Their gradient was not finite. One is an accident; several call for a smaller learning rate.",
    )

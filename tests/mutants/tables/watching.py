"""Faults in what is concluded: the controller, records of steps, fingerprints, intervals of studies."""

from tests.mutants.fault import fault

LOGS = "monitor/test_logs.py"
INTERVALS, FINGERPRINT = "test_intervals.py", "model/test_fingerprint.py"
PARTS = "monitor/test_parts.py"

FAULTS = (
    fault(
        "monitor/controller-level",
        "bebop/monitor/controller.py",
        "part.excludes_zero(self.config.level)",
        "part.excludes_zero()",
        PARTS,
    ),
    fault(
        "monitor/controller-consequence",
        "bebop/monitor/controller.py",
        "abs(part.point) >= small and part",
        "part",
        "monitor/test_controller.py::test_hysteresis_keeps_it_from_flapping",
    ),
    fault(
        "monitor/controller-patience",
        "bebop/monitor/controller.py",
        "len(set(self._seen)) == 1)",
        "True)",
        "monitor/test_controller.py::test_a_state_is_seen_twice_before_it_counts",
    ),
    fault(
        "monitor/controller-hysteresis",
        "bebop/monitor/controller.py",
        "return self.state if lasts else",
        "return",
        "monitor/test_controller.py::test_hysteresis_keeps_it_from_flapping",
    ),
    fault(
        "monitor/controller-take-turns",
        "bebop/monitor/controller.py",
        "strong[leader] < 1.25 * strong[self.state]",
        "strong[leader] < strong[self.state]",
        PARTS,
    ),
    fault(
        "monitor/controller-broken-late",
        "bebop/monitor/controller.py",
        "if broken or (len(",
        "if (len(",
        "monitor/test_controller.py::test_a_stale_head_is_broken_at_once_and_recovers",
    ),
    fault(
        "monitor/controller-health",
        "bebop/monitor/controller.py",
        "and is_ != want]",
        "and is_ == want]",
        "monitor/test_controller.py::test_wrong_weights_are_broken_whatever_the_acceptance",
    ),
    fault(
        "monitor/controller-better-head",
        "bebop/monitor/controller.py",
        "and cause.mismatch.point < 0",
        "",
        "monitor/test_controller.py::test_a_better_head_is_not_cotrained",
    ),
    fault(
        "monitor/controller-boundary",
        "bebop/monitor/controller.py",
        "now.sampled == (boundary.point > 0)",
        "now.sampled != (boundary.point > 0)",
        "monitor/test_controller.py::test_the_system_follows_the_decision_boundary",
    ),
    fault(
        "monitor/controller-gain",
        "bebop/monitor/controller.py",
        "gain.point < self.config.least_gain or",
        "False or",
        PARTS,
    ),
    fault(
        "monitor/controller-pause",
        "bebop/monitor/controller.py",
        "signals.step - self._acted < self.config.pause",
        "False",
        "monitor/test_controller.py::test_the_system_follows_the_decision_boundary",
    ),
    fault(
        "monitor/controller-correlation",
        "bebop/monitor/controller.py",
        "return along and not any(",
        "return not any(",
        "monitor/test_controller.py::test_a_slope_over_answers_is_believed_only_where_acceptance_moved_along",
    ),
    fault("monitor/lag-sign", "bebop/monitor/collect.py", "else version - v for v", "else v - version for v", LOGS),
    fault(
        "monitor/version-of-stretch",
        "bebop/monitor/collect.py",
        "completion.versions[start : 2",
        "completion.versions[0 : 2",
        PARTS,
    ),
    fault(
        "monitor/fingerprint-place", "bebop/model/fingerprint.py", "(piece * place).sum()", "piece.sum()", FINGERPRINT
    ),
    fault(
        "monitor/fingerprint-pieces",
        "bebop/model/fingerprint.py",
        "torch.arange(start, start + len(piece)",
        "torch.arange(0, len(piece)",
        FINGERPRINT,
    ),
    fault(
        "monitor/fingerprint-names",
        "bebop/model/fingerprint.py",
        "for name in sorted(weights)",
        "for name in weights",
        FINGERPRINT,
    ),
    fault(
        "monitor/bootstrap-percentile",
        "bebop/intervals.py",
        "[2.5, 97.5]",
        "[25, 75]",
        "test_coverage.py::test_intervals_hold_the_truth",
    ),
    fault(
        "monitor/bootstrap-weights",
        "bebop/intervals.py",
        "_over(w @ a, w @ b) - _over(w @ c, w @ d)",
        "_over(w @ a, w @ b) - _over(c.sum(), d.sum())",
        INTERVALS,
    ),
    fault("monitor/seeds-deviation", "bebop/intervals.py", "array.std(ddof=1)", "array.std()", INTERVALS),
)

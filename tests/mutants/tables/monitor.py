"""Faults in the monitor: intervals, slopes, the split into parts, the bank, the controller, fingerprints."""

from tests.mutants.fault import fault

WINDOW, SLOPE, DRIFT = "monitor/test_window.py", "monitor/test_slope.py", "monitor/test_drift.py"
BANK, CONTROLLER, LOGS = "monitor/test_bank.py", "monitor/test_controller.py", "monitor/test_logs.py"
INTERVALS, FINGERPRINT, READER = "test_intervals.py", "model/test_fingerprint.py", "trainer/test_bank.py"
NARROW = "monitor/test_intervals_hold.py"
PARTS = "monitor/test_parts.py"

FAULTS = (
    fault(
        "monitor/interval-narrow",
        "bebop/monitor/estimate.py",
        "half = _quantile(level) * self.error",
        "half = 0.5 * _quantile(level) * self.error",
        WINDOW,
        SLOPE,
    ),
    fault(
        "monitor/interval-level",
        "bebop/monitor/estimate.py",
        "_quantile(level) * self.error",
        "_quantile(LEVEL) * self.error",
        WINDOW,
        CONTROLLER,
    ),
    fault("monitor/interval-one-sided", "bebop/monitor/estimate.py", "0.5 + level / 2", "level", WINDOW),
    fault("monitor/students-t", "bebop/monitor/estimate.py", "(z**3 + z) / 4 / freedom", "0.0", WINDOW),
    fault("monitor/resampling-n", "bebop/monitor/window.py", "size=(draws, units - 1)", "size=(draws, units)", WINDOW),
    fault("monitor/resampling-scale", "bebop/monitor/window.py", "counts * (units / (units - 1))", "counts", WINDOW),
    fault(
        "monitor/resampling-rows",
        "bebop/monitor/window.py",
        "per_unit(records.unit, table(records))",
        "table(records)",
        WINDOW,
        NARROW,
    ),
    fault(
        "monitor/window-merge",
        "bebop/monitor/window.py",
        "_wide(self.totals, width) + _wide(other.totals, width)",
        "_wide(self.totals, width)",
        WINDOW,
    ),
    fault(
        "monitor/window-merge-draws",
        "bebop/monitor/window.py",
        "_wide(self.replicates, width) + _wide(other.replicates, width)",
        "2 * _wide(self.replicates, width)",
        WINDOW,
        NARROW,
    ),
    fault(
        "monitor/window-units",
        "bebop/monitor/window.py",
        "t_over_normal(self.units - self.strata)",
        "t_over_normal(self.units)",
        NARROW,
    ),
    fault(
        "monitor/rate-position",
        "bebop/monitor/window.py",
        '"reached")[..., self.position - 1],\n                _per_position(columns, "target',
        '"reached")[..., 0],\n                _per_position(columns, "target',
        WINDOW,
    ),
    fault(
        "monitor/slope-narrow-temperature",
        "bebop/monitor/slope.py",
        "* error * t_over_normal(freedom)",
        "* error * 0.1",
        NARROW,
    ),
    fault(
        "monitor/slope-narrow-frozen",
        "bebop/monitor/slope.py",
        "away = t_over_normal(units - len(sums)) * (",
        "away = 0.3 * (",
        SLOPE,
    ),
    fault("monitor/slope-independent-steps", "bebop/monitor/slope.py", "BLOCK = 5 ", "BLOCK = 1 ", SLOPE),
    fault(
        "monitor/slope-residuals",
        "bebop/monitor/slope.py",
        "* math.sqrt(count / (count - 2))",
        "",
        SLOPE,
        immortal="five per cent of an interval whose blocks are three: no coverage over hundreds of runs sees it",
    ),
    fault(
        "monitor/slope-between-steps",
        "bebop/monitor/slope.py",
        "heat - np.average(heat, weights=weight)",
        "heat",
        SLOPE,
    ),
    fault(
        "monitor/slope-unsigned",
        "bebop/monitor/slope.py",
        "slope = float(lever @ y)",
        "slope = abs(float(lever @ y))",
        SLOPE,
    ),
    fault("monitor/slope-flat", "bebop/monitor/slope.py", "if entropy.std() < MIN_ENTROPY_SPREAD:", "if False:", DRIFT),
    fault(
        "monitor/slope-least-trusted",
        "bebop/monitor/drift_monitor.py",
        '("temperature", "frozen", "early")',
        '("early", "frozen", "temperature")',
        PARTS,
    ),
    fault(
        "monitor/mismatch-sign",
        "bebop/monitor/drift.py",
        "mismatch = change - entropy",
        "mismatch = change + entropy",
        PARTS,
    ),
    fault(
        "monitor/entropy-sign",
        "bebop/monitor/drift.py",
        "entropy = slope.value * heat",
        "entropy = slope.value * (heat - heat - heat)",
        PARTS,
    ),
    fault(
        "monitor/change-sign",
        "bebop/monitor/drift.py",
        "change = now.value(measure) - reference.value(measure)",
        "change = reference.value(measure) - now.value(measure)",
        PARTS,
    ),
    fault(
        "monitor/blurred-slope",
        "bebop/monitor/drift.py",
        "if blur > max(abs(change.point), small):",
        "if False:",
        DRIFT,
    ),
    fault(
        "monitor/bank-sweep-order",
        "bebop/monitor/bank.py",
        'order = heat.argsort(0, kind="stable")',
        "order = (-heat).argsort(0)",
        BANK,
    ),
    fault(
        "monitor/bank-weights",
        "bebop/monitor/bank.py",
        "(everything @ expected) / everything.sum(1)",
        "np.full(len(everything), expected.mean())",
        PARTS,
    ),
    fault(
        "monitor/bank-units",
        "bebop/monitor/bank.py",
        "np.arange(len(before.overlap)) if before.unit is None else before.unit",
        "np.arange(len(before.overlap))",
        BANK,
    ),
    fault("monitor/bank-extrapolates", "bebop/monitor/bank.py", "if support >= MIN_SUPPORT else", "if True else", BANK),
    fault(
        "monitor/bank-latest-is-first",
        "bebop/monitor/drift_monitor.py",
        "self._bank = self._bank or bank",
        "self._bank = bank",
        BANK,
    ),
    fault(
        "monitor/bank-target-position",
        "trainer/bank.py",
        "rates[:, 0], entropy[:, 0]",
        "rates[:, -1], entropy[:, 0]",
        READER,
    ),
    fault(
        "monitor/bank-sweep-temperature",
        "trainer/bank.py",
        "self.sampling.temperature * heat\n        logits",
        "self.sampling.temperature\n        logits",
        READER,
    ),
    fault(
        "monitor/bank-greedy", "trainer/bank.py", "pair.target_only if greedy else pair.overlap", "pair.overlap", READER
    ),
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
        CONTROLLER,
    ),
    fault(
        "monitor/controller-patience", "bebop/monitor/controller.py", "len(set(self._seen)) == 1)", "True)", CONTROLLER
    ),
    fault(
        "monitor/controller-hysteresis",
        "bebop/monitor/controller.py",
        "return self.state if lasts else",
        "return",
        CONTROLLER,
    ),
    fault(
        "monitor/controller-take-turns",
        "bebop/monitor/controller.py",
        "strong[leader] < 1.25 * strong[self.state]",
        "strong[leader] < strong[self.state]",
        PARTS,
    ),
    fault(
        "monitor/controller-broken-late", "bebop/monitor/controller.py", "if broken or (len(", "if (len(", CONTROLLER
    ),
    fault(
        "monitor/controller-health", "bebop/monitor/controller.py", "and is_ != want]", "and is_ == want]", CONTROLLER
    ),
    fault(
        "monitor/controller-better-head", "bebop/monitor/controller.py", "and cause.mismatch.point < 0", "", CONTROLLER
    ),
    fault(
        "monitor/controller-boundary",
        "bebop/monitor/controller.py",
        "SAMPLED if boundary.point > 0 else GREEDY",
        "GREEDY if boundary.point > 0 else SAMPLED",
        CONTROLLER,
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
        CONTROLLER,
    ),
    fault(
        "monitor/controller-correlation",
        "bebop/monitor/controller.py",
        "return along and not any(",
        "return not any(",
        CONTROLLER,
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
    fault("monitor/bootstrap-percentile", "bebop/intervals.py", "[2.5, 97.5]", "[25, 75]", INTERVALS),
    fault(
        "monitor/bootstrap-weights",
        "bebop/intervals.py",
        "_over(w @ a, w @ b) - _over(w @ c, w @ d)",
        "_over(w @ a, w @ b) - _over(c.sum(), d.sum())",
        INTERVALS,
    ),
    fault("monitor/seeds-deviation", "bebop/intervals.py", "array.std(ddof=1)", "array.std()", INTERVALS),
)

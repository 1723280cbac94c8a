"""Faults in the importance weights of inexact and older answers, and in what is said of them."""

from tests.mutants.fault import fault

TIS = "trainer/test_tis.py"

FAULTS = (
    fault(
        "weights/tis-geometric",
        "trainer/losses.py",
        'segment_reduce(log_ratio, "sum", lengths=answers)\n    return',
        'segment_reduce(log_ratio, "mean", lengths=answers)\n    return',
        "trainer/test_overridden_gradient.py",
    ),
    fault(
        "weights/tis-level-ignored",
        "trainer/losses.py",
        "log_weight = TIS_LEVELS[config.tis_level](",
        'log_weight = TIS_LEVELS["token"](',
        TIS,
    ),
    fault(
        "weights/tis-ess-uncapped",
        "trainer/losses.py",
        "SampleSize.of(weight.clamp(max=config.tis_cap)",
        "SampleSize.of(weight",
        TIS,
    ),
)

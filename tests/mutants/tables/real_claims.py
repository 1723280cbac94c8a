"""Faults in what the study on a real model makes of its heads: statistics and claims."""

from tests.mutants.fault import fault

REAL = "recipes/reproduce/real"
STATISTICS = "recipes/reproduce/test_real_statistics.py"

FAULTS = (
    fault(
        "real/seeds-left-out",
        f"{REAL}/statistics.py",
        "math.hypot(over_seeds, NormalDist()",
        "math.hypot(0 * over_seeds, NormalDist()",
        STATISTICS,
    ),
    fault(
        "real/prompts-left-out",
        f"{REAL}/statistics.py",
        "prompt_error = max(value - over_prompts.low, over_prompts.high - value) / NORMAL_95",
        "prompt_error = 0.0",
        STATISTICS,
    ),
    fault(
        "real/chains-for-prompts",
        f"{REAL}/statistics.py",
        "np.unique(chains.row, return_inverse=True)[1].astype(np.int64)",
        "np.arange(len(chains.row))",
        STATISTICS,
    ),
    fault(
        "real/seeds-as-if-many",
        f"{REAL}/statistics.py",
        "quantile(level, self.seeds - 1) * self.seed_error",
        "NormalDist().inv_cdf(1 - level / 2) * self.seed_error",
        STATISTICS,
    ),
    fault(
        "real/surer-than-the-effect",
        f"{REAL}/statistics.py",
        "least, most = self.seeds - 1, MOST_DEGREES",
        "least, most = MOST_DEGREES - 1, MOST_DEGREES",
        STATISTICS,
    ),
    fault(
        "real/noise-of-the-quieter-arm",
        f"{REAL}/statistics.py",
        "floor=max(within)",
        "floor=min(within)",
        STATISTICS,
    ),
    fault("real/one-seed-as-noise", f"{REAL}/statistics.py", "math.sqrt(2) * float", "float", STATISTICS),
    fault(
        "real/gaps-count-as-zero",
        f"{REAL}/statistics.py",
        "np.where(known, values, 0), known.astype(float)]",
        "np.where(known, values, 0), np.ones(known.shape)]",
        STATISTICS,
    ),
)

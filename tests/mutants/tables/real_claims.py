"""Faults in what the study on a real model makes of its heads: statistics and claims."""

from tests.mutants.fault import fault

REAL = "recipes/reproduce/real"
EFFECTS = "recipes/reproduce/test_real_effects.py"
RULES = "recipes/reproduce/test_real_rules.py"

FAULTS = (
    fault(
        "real/seeds-left-out",
        f"{REAL}/effects.py",
        "math.hypot(over_seeds, NormalDist()",
        "math.hypot(0 * over_seeds, NormalDist()",
        EFFECTS,
    ),
    fault(
        "real/prompts-left-out",
        f"{REAL}/effects.py",
        "prompt_error = max(value - over_prompts.low, over_prompts.high - value) / NORMAL_95",
        "prompt_error = 0.0",
        EFFECTS,
    ),
    fault(
        "real/chains-for-prompts",
        f"{REAL}/effects.py",
        "np.unique(chains.row, return_inverse=True)[1].astype(np.int64)",
        "np.arange(len(chains.row))",
        EFFECTS,
    ),
    fault(
        "real/seeds-as-if-many",
        f"{REAL}/effects.py",
        "quantile(level, self.seeds - 1) * self.seed_error",
        "NormalDist().inv_cdf(1 - level / 2) * self.seed_error",
        EFFECTS,
    ),
    fault(
        "real/surer-than-the-effect",
        f"{REAL}/effects.py",
        "least, most = self.seeds - 1, MOST_DEGREES",
        "least, most = MOST_DEGREES - 1, MOST_DEGREES",
        EFFECTS,
    ),
    fault(
        "real/noise-of-the-quieter-arm",
        f"{REAL}/effects.py",
        "floor=max(within)",
        "floor=min(within)",
        EFFECTS,
    ),
    fault("real/one-seed-as-noise", f"{REAL}/effects.py", "math.sqrt(2) * float", "float", EFFECTS),
    fault(
        "real/gaps-count-as-zero",
        f"{REAL}/effects.py",
        "np.where(known, values, 0), known.astype(float)]",
        "np.where(known, values, 0), np.ones(known.shape)]",
        EFFECTS,
    ),
    fault(
        "real/heads-that-do-not-draft",
        f"{REAL}_entropy/findings.py",
        'kind="above", bound=DRAFTS,',
        'kind="above", bound=0.0,',
        RULES,
    ),
    fault(
        "real/two-flat-curves-of-three",
        f"{REAL}_entropy/findings.py",
        "CONVERGED = 0.99",
        "CONVERGED = 0.5",
        f"{RULES}::test_a_head_whose_curve_is_not_flat_says_nothing_of_what_its_loss_leads_to",
    ),
    fault(
        "real/one-end-is-enough",
        f"{REAL}_drafts/findings.py",
        "zip((0.0, 1.0), arms, strict=True)",
        "zip((0.0,), arms, strict=False)",
        f"{RULES}::test_a_draft_temperature_that_beats_one_end_alone_is_no_gain",
    ),
    fault(
        "real/no-noise-under-top-p",
        f"{REAL}_drafts/findings.py",
        "any_of=((Part(number=number, arms=arms),),),",
        "any_of=((Part(number=number),),),",
        RULES,
    ),
)

"""Faults in what chooses numbers of drafts from history row by row, and in what it knows of cycles."""

from tests.mutants.fault import fault

SECONDS, SECONDSS = "rollout/decoding/cycle_seconds.py", "rollout/test_cycle_seconds.py"
ROW, ROWS = "rollout/decoding/lengths/row_cost.py", "rollout/test_row_cost.py"

FAULTS = (
    fault(
        "auto/seconds-drift-together",
        SECONDS,
        "DRIFT, DRIFT_EACH = 0.005, 0.02",
        "DRIFT, DRIFT_EACH = 0.02, 0.005",
        f"{SECONDSS}::test_drafts_that_become_dearer_do_not_make_plain_cycles_seem_dear",
    ),
    fault(
        "auto/seconds-of-a-draft-in-one-row",
        SECONDS,
        "verify=rows * verify / plain",
        "verify=verify / plain",
        f"{SECONDSS}::test_numbers_are_found_again_in_their_unit",
    ),
    fault(
        "auto/seconds-believe-outliers",
        SECONDS,
        "surprise = max(-math.log(OUTLIER), min(math.log(OUTLIER), surprise))",
        "",
        f"{SECONDSS}::test_an_outlier_counts_for_little",
    ),
    fault(
        "auto/seconds-uncertain-without-bounds",
        SECONDS,
        "UNKNOWN / np.sqrt(np.diag(spread))",
        "UNKNOWN",
        f"{SECONDSS}::test_numbers_that_nothing_says_anything_about_become_uncertain_within_bounds",
    ),
    fault(
        "auto/seconds-have-no-unit",
        SECONDS,
        "self.known, surprise = True, 0.0",
        "self.known, surprise = True, surprise",
        f"{SECONDSS}::test_before_anything_is_known_ratios_are_those_given",
    ),
    fault(
        "auto/rows-draft-where-it-does-not-pay",
        ROW,
        "pays = tokens * plain > taken",
        "pays = tokens * plain < taken",
        f"{ROWS}::test_drafts_that_cost_nothing_are_made_and_dear_ones_are_not",
    ),
    fault(
        "auto/rows-try-what-they-have-not-earned",
        ROW,
        "if loss > self.owed or self.idle < REST:",
        "if self.idle < REST:",
        f"{ROWS}::test_trials_cost_what_they_may",
    ),
    fault(
        "auto/rows-try-ties-all-the-time",
        ROW,
        "if loss > self.owed or self.idle < REST:",
        "if loss > self.owed:",
        f"{ROWS}::test_trials_cost_what_they_may",
    ),
    fault(
        "auto/rows-take-the-drafts-of-one",
        ROW,
        "Work(1.0, drafted, drafts * rows, passes)",
        "Work(1.0, drafted, drafts, passes)",
        f"{ROWS}::test_trials_cost_what_they_may",
    ),
    fault(
        "auto/rows-draft-in-any-case",
        "rollout/decoding/recall.py",
        'self.first = config.draft_tokens != "auto"',
        "self.first = True",
        f"{ROWS}::test_a_row_that_is_sure_drafts_on_beside_one_that_is_not",
    ),
    fault(
        "auto/rows-never-draft-first",
        "rollout/decoding/drafters/history.py",
        "always=recall.first",
        "always=False",
        f"{ROWS}::test_a_row_that_is_sure_drafts_on_beside_one_that_is_not",
    ),
    fault(
        "auto/warming-up-stays-in-history",
        "rollout/warm.py",
        "    slots.history.forget(prompt)\n    length.forget()",
        "    length.forget()",
        f"{ROWS}::test_the_engine_measures_cycles_of_every_kind_before_its_first_request",
    ),
)

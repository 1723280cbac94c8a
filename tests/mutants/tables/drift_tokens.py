"""Faults in the way from a drift alarm to its tokens, and in what a report opens with."""

from tests.mutants.fault import fault

DRIFT, TOLD, SAID = "bebop/monitor/token_drift.py", "bebop/view/drift_tokens.py", "bebop/report/verdict.py"
NAMED = "monitor/test_token_drift.py::test_the_kind_that_lost_is_named_with_what_it_lost"
ENTROPY = "monitor/test_token_drift.py::test_entropy_is_no_loss_of_anybody"
WORST = "monitor/test_token_drift.py::test_examples_are_the_worst_places_of_different_answers"
HELD = "monitor/test_token_drift.py::test_intervals_hold_the_truth_over_runs"
GAIN = "monitor/test_token_drift.py::test_a_gain_lists_what_gained_first"
FIRST = "view/test_drift_tokens.py::test_the_token_that_lost_comes_first_with_places_to_look_at"
PLACES = "view/test_drift_tokens.py::test_examples_point_at_real_places"
TABLES = "view/test_drift_tokens.py::test_the_token_before_and_the_draft_s_place_are_told_too"
RESTART = "view/test_drift_tokens.py::test_steps_before_a_restart_are_no_reference"
FITS = "report/test_verdict.py::test_a_head_that_stops_fitting_is_to_be_trained"
CERTAIN = "report/test_verdict.py::test_a_policy_that_is_less_certain_is_no_reason_to_train_the_head"
UNSURE = "report/test_verdict.py::test_what_is_not_known_is_said"

FAULTS = (
    fault("drift-tokens/entropy-not-taken-out", DRIFT, "curve(after.entropy)", "0 * curve(after.entropy)", ENTROPY),
    fault("drift-tokens/own-level-forgotten", DRIFT, "then[1] / (then[0] + SHRINK)", "0 * then[1]", NAMED),
    fault("drift-tokens/answers-not-resampled", DRIFT, "DRAWS).astype(float)", "DRAWS).astype(float) * 0 + 1", HELD),
    fault("drift-tokens/best-for-worst", DRIFT, "np.argsort(-missing[among]", "np.argsort(missing[among]", WORST),
    fault("drift-tokens/gains-last", DRIFT, "1.0 if whole.point >= 0 else -1.0", "1.0", GAIN),
    fault("drift-tokens/drawn-for-expected", TOLD, '"expects": trace.target_ids[at, 0]', '"expects": answer.ids[at]',
          FIRST),
    fault("drift-tokens/context-one-late", TOLD, "place - CONTEXT) : place]", "place - CONTEXT) : place + 1]", PLACES),
    fault("drift-tokens/place-in-the-answer", TOLD, "at - begins[at] + 1", "at + 1", TABLES),
    fault("drift-tokens/restart-forgotten", TOLD, "start = at\n", "start = 1\n", RESTART),
    fault("verdict/causes-swapped", SAID, 'part = cause.entropy if state == "entropy-driven" else cause.mismatch',
          'part = cause.mismatch if state == "entropy-driven" else cause.entropy', FITS),
    fault("verdict/entropy-blamed-on-the-head", SAID, '"the policy has become less certain; the head still fits"',
          '"the draft head no longer fits the policy"', CERTAIN),
    fault("verdict/chance-for-progress", SAID, "<= 2 * error", "<= 0 * error", UNSURE),
)  # fmt: skip

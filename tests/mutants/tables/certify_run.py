"""Faults in what a certificate asks for, merges and says."""

from tests.mutants.fault import fault

RUN, PLAN, VERDICT = "bebop/certify/run.py", "bebop/certify/plan.py", "bebop/certify/verdict.py"
TESTS, WORDS, TWO = "certify/test_run.py", "certify/test_verdict.py", "certify/test_two_sample.py"

FAULTS = (
    fault(
        "certify-run/one-prompt-a-request",
        RUN,
        "self.plan.first_prompt + i // 2",
        "self.plan.first_prompt + i",
        f"{TESTS}::test_requests_come_in_pairs_of_a_prompt_with_seeds_of_their_own",
    ),
    fault(
        "certify-run/the-other-engine-has-the-same-seeds",
        PLAN,
        'f"{seed} {number} {stream}"',
        'f"{seed} {number}"',
        f"{TESTS}::test_seeds_fit_31_bits_and_none_is_given_twice",
        f"{TESTS}::test_without_a_reference_answers_are_held_against_those_of_an_engine_without_drafts",
    ),
    fault(
        "certify-run/repeats-are-taken-for-new-draws",
        RUN,
        "        self._weigh(one, number, answers)\n",
        "        self._weigh(one, number, answers)\n                self._repeated()\n",
        f"{TESTS}::test_the_first_pair_is_asked_again_once_all_evidence_is_in",
    ),
    fault(
        "certify-run/kind-of-log-probs-found-once",
        RUN,
        "if one.mode is None:",
        "one.mode = self.done[0].mode\n        if one.mode is None:",
        f"{TESTS}::test_what_log_probs_are_of_is_found_at_each_setting",
    ),
    fault(
        "certify-run/unfinished-answers-left-out",
        RUN,
        "one.unfinished += sum(",
        "one.unfinished += 0 * sum(",
        f"{TESTS}::test_an_interrupted_cohort_counts_as_far_as_it_came",
    ),
    fault(
        "certify-run/structure-is-no-proof",
        VERDICT,
        "if structure or log_e >= math.log(1 / alpha):",
        "if log_e >= math.log(1 / alpha):",
        f"{WORDS}::test_no_evidence_against_is_not_evidence_for",
        f"{TESTS}::test_a_broken_rule_fails_whatever_the_evidence",
    ),
    fault(
        "certify-run/pass-where-nothing-is-bounded",
        VERDICT,
        "if known and len(known) == len(bounds) and max(known) < limit_tv",
        "if max(known, default=0) < limit_tv",
        f"{WORDS}::test_no_evidence_against_is_not_evidence_for",
    ),
    fault(
        "certify-run/every-setting-has-all-the-weight",
        PLAN,
        'Setting(name="stress", params=other, weight=shares["stress"] / total)',
        'Setting(name="stress", params=other, weight=shares["stress"])',
        f"{TESTS}::test_weights_of_settings_and_white_box_share_one",
    ),
    fault(
        "certify-run/bets-with-what-the-pair-taught",
        "bebop/certify/two_sample.py",
        "self._bet(difference(features(one), features(other)))",
        "[self._bet(difference(features(one), features(other))) for _ in range(2)]",
        f"{TWO}::test_equal_engines_are_left_alone_and_a_test_that_learns_before_it_bets_is_caught",
    ),
    fault(
        "certify-run/inconclusive-is-let-through",
        "bebop/certify/certificate.py",
        'if self.verdict != "pass":',
        'if self.verdict == "fail":',
        f"{WORDS}::test_only_a_pass_is_let_through",
    ),
)

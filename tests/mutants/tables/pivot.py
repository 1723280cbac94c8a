"""Faults in PAD: overrides, the distribution that comes out of them, labels."""

from tests.mutants.fault import fault

KERNEL, RULE = "kernels/pivot.py", "rollout/decoding/rules/pivot_override.py"
EMITTED = "rollout/test_pivot_override.py::test_the_output_distribution_is_the_one_worked_out"
LOGPROBS = "rollout/test_pivot_override.py::test_recorded_logprobs_are_those_of_the_distribution_that_was_drawn_from"

FAULTS = (
    fault(
        "pivot/tau-inclusive",
        KERNEL,
        "(scores < tau)",
        "(scores <= tau)",
        "kernels/test_pivot.py::test_what_is_never_overridden",
    ),
    fault(
        "pivot/stops-overridden",
        KERNEL,
        " & ~stops",
        "",
        "kernels/test_pivot.py::test_what_is_never_overridden",
    ),
    fault(
        "pivot/no-least-probability",
        KERNEL,
        " & (p >= p_min)",
        "",
        "kernels/test_pivot.py::test_what_is_never_overridden",
    ),
    fault(
        "pivot/nothing-forced",
        KERNEL,
        "tests.masked_fill(allowed, 0.0)",
        "tests",
        "kernels/test_pivot.py::test_beyond_one_the_draft_comes_out",
    ),
    fault(
        "pivot/residual-is-the-target",
        KERNEL,
        "rejected * residual(p, q)",
        "rejected * p",
        "kernels/test_pivot.py::test_the_bias_is_exact_and_without_it_nothing_moves",
    ),
    fault(
        "pivot/overridden-counts-what-passed",
        KERNEL,
        "allowed & ~(tests * q < p)",
        "allowed",
        "kernels/test_pivot.py::test_acceptance_grows_with_tau",
    ),
    fault("pivot/state-one-late", RULE, '0 if self.network.position == "pred" else 1', "1", EMITTED),
    fault("pivot/stops-of-the-request", RULE, " & ~stops).nonzero", ").nonzero", EMITTED),
    fault("pivot/log-p-for-log-P", RULE, "torch.cat([probs, out.probs[:, drafts:]], 1)", "out.probs", LOGPROBS),
    fault(
        "pivot/log-P-dropped",
        "rollout/decoding/emit.py",
        "unknown if accepted.logprobs is None else accepted.logprobs.float()",
        "unknown",
        "rollout/test_sampled_logprobs.py::test_what_a_rule_says_stands_beside_log_p",
    ),
    fault(
        "pivot/unknown-taken-for-log-p",
        "rollout/decoding/emit.py",
        "logprobs if exact else torch.full_like(logprobs, torch.nan)",
        "logprobs",
        "rollout/test_sampled_logprobs.py::test_an_answer_of_two_rules_is_known_where_both_are",
    ),
    fault(
        "pivot/weighted-by-log-p",
        "trainer/packing.py",
        "rollout_logprobs=own(lambda c: c.drawn_logprobs",
        "rollout_logprobs=own(lambda c: c.logprobs",
        "trainer/test_policy.py::test_inexact_answers_that_say_what_was_drawn_from_are_weighted_by_it",
    ),
    fault(
        "pivot/engine-compared-with-log-P",
        "trainer/losses.py",
        "logp - rows.target_logprobs",
        "logp - rows.rollout_logprobs",
        "trainer/test_policy.py::test_inexact_answers_that_say_what_was_drawn_from_are_weighted_by_it",
    ),
    fault(
        "pivot/labels-turned-round",
        "trainer/pivot_labels.py",
        "(against - value)",
        "(value - against)",
        "trainer/test_pivot_labels.py::test_both_definitions_by_hand",
    ),
    fault(
        "pivot/judge-takes-away",
        "trainer/pivot_labels.py",
        "(losses > tol) | judged",
        "(losses > tol) & ~judged",
        "trainer/test_pivot_labels.py::test_both_definitions_by_hand",
    ),
    fault(
        "pivot/drawn-by-other-numbers",
        "bebop/adaptation/candidates.py",
        "sample(target, draws[:, 1])",
        "sample(target, draws[:, 0])",
        "adaptation/test_pivot_rollouts.py::test_continuations_share_their_numbers_and_their_prefix",
    ),
    fault(
        "pivot/candidates-that-pass",
        "bebop/adaptation/candidates.py",
        "~(numbers[at, 2 * depth - 1] * at_q < at_p)",
        "(at_p > 0)",
        "adaptation/test_pivot_rollouts.py::test_candidates_are_drafts_that_would_be_rejected",
    ),
)

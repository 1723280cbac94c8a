"""Faults in what chooses draft temperatures and numbers of drafts by itself."""

from tests.mutants.fault import fault

HERE = "rollout/test_temperature.py"
TABLE = f"{HERE}::test_overlaps_are_those_of_drafts_that_were_tested_under_each_request_s_own_sampling"
FILE = "rollout/decoding/temperature.py"
PACE, PACES = "rollout/decoding/pace.py", "rollout/test_pace.py"
COST, COSTS = "rollout/decoding/lengths/cost.py", "rollout/test_cost_length.py"

FAULTS = (
    fault(
        "auto/temperature-counts-what-was-not-tested",
        FILE,
        "else torch.minimum(emitted, drawn.lengths)",
        "else drawn.lengths",
        TABLE,
    ),
    fault(
        "auto/temperature-forgets-how-many-count",
        FILE,
        "emitted if drawn.lengths is None else torch.minimum(emitted, drawn.lengths)",
        "emitted",
        TABLE,
    ),
    fault(
        "auto/temperature-forgets-the-target-s",
        FILE,
        "temperature=factor * own)",
        "temperature=factor + 0 * own)",
        TABLE,
    ),
    fault(
        "auto/temperature-of-other-rows",
        FILE,
        "else column[rows] for",
        "else column[: len(rows)] for",
        f"{HERE}::test_a_row_is_measured_by_itself_while_others_are_not",
    ),
    fault("auto/temperature-forgets-penalties", FILE, "torch.stack(seen, 1) if seen else None", "None", TABLE),
    fault(
        "auto/temperature-of-the-smallest-overlap",
        FILE,
        "pooled[..., -1:]).argmax(-1)",
        "pooled[..., -1:]).argmin(-1)",
        f"{HERE}::test_the_temperature_of_the_largest_overlap_is_found_in_a_few_cycles",
    ),
    fault(
        "auto/temperature-never-forgets",
        FILE,
        "DECAY * self.kept + seen",
        "self.kept + seen",
        f"{HERE}::test_what_was_long_ago_fades",
    ),
    fault(
        "auto/temperature-positions-alike",
        FILE,
        "(kept[..., :-1] + SHARED",
        "(0 * kept[..., :-1] + SHARED",
        f"{HERE}::test_a_position_that_was_not_reached_follows_the_others_until_it_knows_better",
    ),
    fault(
        "auto/temperature-always-measured",
        FILE,
        "(cycles < ALWAYS) | (cycles % EVERY == 0)",
        "cycles >= 0",
        f"{HERE}::test_the_first_cycles_are_measured_then_one_in_so_many",
    ),
    fault(
        "auto/temperature-greedy-rows",
        FILE,
        "factors if own is None else factors * own[:, None]",
        "factors",
        f"{HERE}::test_temperatures_are_those_of_each_request_and_greedy_rows_draft_greedily",
    ),
    fault(
        "auto/temperature-not-reported",
        "rollout/decoding/drafters/mtp.py",
        "probs.append(distribution)",
        "probs.append(rows.probs(logits, None if seen is None else seen[:, None])[:, 0])",
        "rollout/test_exactness.py::test_the_output_distribution_is_the_target_at_draft_temperatures_that_are_chosen",
    ),
    fault(
        "auto/temperature-a-word-that-is-none",
        "bebop/parsing.py",
        "known = not words or",
        "known = True or",
        "test_config.py::test_wrong_types_are_named",
    ),
    fault(
        "auto/pace-costs-of-the-larger-size",
        PACE,
        "(1 - share) * a + share * b",
        "b",
        f"{PACES}::test_costs_between_two_sizes_are_on_a_straight_line",
    ),
    fault(
        "auto/pace-chances-not-of-a-prefix",
        PACE,
        "accumulate(accumulate(chances, mul), initial",
        "accumulate(chances, initial",
        f"{PACES}::test_tokens_are_one_and_the_chances_that_a_prefix_stands",
    ),
    fault(
        "auto/pace-never-plain",
        PACE,
        "return rates.index(max(rates))",
        "return rates.index(max(rates[1:]))",
        f"{PACES}::test_the_best_number_has_most_tokens_a_second",
    ),
    fault(
        "auto/pace-no-trials",
        PACE,
        "loss <= self.owed[other]",
        "loss <= -1",
        f"{PACES}::test_trials_cost_what_they_may_and_see_every_number",
    ),
    fault(
        "auto/pace-trials-for-nothing",
        PACE,
        "                self.owed[other] = 0.0\n",
        "",
        f"{PACES}::test_trials_cost_what_they_may_and_see_every_number",
    ),
    fault(
        "auto/pace-trials-starve-the-best",
        PACE,
        "self.idle[other] >= REST",
        "self.idle[other] >= 0",
        f"{PACES}::test_drafts_that_stop_to_pay_are_given_up_and_taken_up_again",
    ),
    fault(
        "auto/pace-outliers-heard",
        PACE,
        "surprise = max(-math.log(OUTLIER), min(math.log(OUTLIER), surprise))",
        "surprise = max(-math.log(OUTLIER), surprise)",
        f"{PACES}::test_seconds_follow_what_is_measured_and_one_outlier_is_hardly_heard",
    ),
    fault(
        "auto/pace-acceptance-never-fades",
        PACE,
        "FADE * self.passed[k]",
        "self.passed[k]",
        f"{PACES}::test_what_was_accepted_fades_by_cycles_at_the_positions_that_were_drafted",
    ),
    fault(
        "auto/length-clock-of-the-step-before",
        "rollout/torch_engine.py",
        "self.decoder.took(self.clock() - began)",
        "self.decoder.took(1.0)",
        f"{COSTS}::test_it_switches_off_where_drafts_become_dear",
    ),
    fault(
        "auto/length-head-does-not-follow",
        "rollout/decoding/draft_verify.py",
        "            drafter.commit(rows, out, accepted.tokens, emitted)\n",
        "            if draft.tokens.shape[1]:\n                drafter.commit(rows, out, accepted.tokens, emitted)\n",
        f"{COSTS}::test_the_heads_cache_follows_where_nothing_is_drafted",
    ),
    fault(
        "auto/length-counts-the-untested",
        PACE,
        "sum(length >= k for length in lengths)",
        "len(lengths)",
        f"{COSTS}::test_acceptance_is_that_of_drafts_that_were_tested",
    ),
    fault(
        "auto/length-keeps-measuring",
        COST,
        "self.forced, self._kept = None, None",
        "self._kept = None",
        f"{COSTS}::test_drafts_that_cost_nothing_are_made_and_dear_ones_are_not",
    ),
    fault(
        "auto/length-forgets-with-the-system",
        COST,
        "known.most == self.pace.most",
        "known.most != self.pace.most",
        f"{COSTS}::test_what_is_known_stays_while_another_system_is_in_charge",
    ),
)

"""Faults in what chooses draft temperatures by itself."""

from tests.mutants.fault import fault

HERE = "rollout/test_temperature.py"
TABLE = f"{HERE}::test_overlaps_are_those_of_drafts_that_were_tested_under_each_request_s_own_sampling"
FILE = "rollout/decoding/temperature.py"

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
        f"{HERE}::test_an_answer_does_not_depend_on_those_beside_it",
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
)

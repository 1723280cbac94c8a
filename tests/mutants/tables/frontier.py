"""Faults in the frontier: the witness, the planted rule, what is compared with what."""

from tests.mutants.fault import fault

FOLDER = "recipes/reproduce/frontier"
WITNESS, ARMS, ANALYSIS = f"{FOLDER}/witness.py", f"{FOLDER}/arms.py", f"{FOLDER}/analysis.py"
PAIRS = f"{FOLDER}/pipo.py"
TESTS = "recipes/reproduce/test_frontier.py"
NUMBERS = "recipes/reproduce/test_frontier_numbers.py"

FAULTS = (
    fault(
        "frontier/witness-of-the-other-side",
        WITNESS,
        "favoured = q > p",
        "favoured = q < p",
        f"{TESTS}::test_its_mean_is_the_total_variation_of_every_rule_that_has_a_formula",
    ),
    fault(
        "frontier/dropped-draft-forgotten",
        PAIRS,
        "dropped = second[place]",
        "dropped = None",
        f"{TESTS}::test_a_dropped_draft_fixes_what_its_place_is_tested_with",
    ),
    fault(
        "frontier/newest-token-not-fed",
        WITNESS,
        "fed = 1 + (",
        "fed = 0 + (",
        f"{TESTS}::test_what_else_is_counted",
    ),
    fault(
        "frontier/pairs-of-the-prompt",
        PAIRS,
        "own = slice(row.prompt - 1, len(row.pairs) - 1)",
        "own = slice(row.prompt - 2, len(row.pairs) - 2)",
        f"{TESTS}::test_pairs_without_drafts_come_to_the_total_variation_of_their_first_tokens",
    ),
    fault(
        "frontier/twice-the-epsilon",
        ARMS,
        "< self.epsilon",
        "< 2 * self.epsilon",
        f"{TESTS}::test_a_tested_position_emits_the_mixture",
    ),
    fault(
        "frontier/coins-that-drew-the-drafts",
        ARMS,
        " + COINS, rows.fed",
        ", rows.fed",
        f"{TESTS}::test_on_the_engine_the_planted_rule_lands_at_its_total_variation",
    ),
    fault(
        "frontier/interval-not-turned",
        ANALYSIS,
        "Interval(-own.value, -own.high, -own.low)",
        "Interval(-own.value, own.low, own.high)",
        f"{NUMBERS}::test_one_system_that_is_not_exact_is_found",
    ),
    fault(
        "frontier/dear-counts-as-cheap",
        ANALYSIS,
        ".value >= -CHEAP",
        ".value >= -1",
        f"{NUMBERS}::test_speed_is_compared_within_chunks_and_with_the_best",
    ),
)

"""Faults in the statistics of the certificate: bets that are not fair, order, bounds, causes."""

from tests.mutants.fault import fault

DIRECTIONS = "certify/test_directions.py"
LEDGER = "certify/test_ledger.py"
MARGINALS = "certify/test_marginals.py"
SIMULATION = "certify/test_simulation.py"

FAULTS = (
    fault(
        "certify/restricted-without-its-mass",
        "bebop/certify/directions.py",
        "own * self.kept.gather(1, cells) / mass.clamp_min(EMPTY)",
        "own * self.kept.gather(1, cells)",
        f"{DIRECTIONS}::test_directions_are_distributions_and_their_distance_is_right",
    ),
    fault(
        "certify/uniform-over-columns",
        "bebop/certify/directions.py",
        "unlisted = (rows.vocabulary - rows.p.shape[1] + rest.sum(-1, keepdim=True)) / rows.vocabulary",
        "unlisted = 1 / rows.vocabulary",
        f"{DIRECTIONS}::test_equal_mass_is_equal_over_tokens_and_not_over_columns",
    ),
    fault(
        "certify/no-floor-under-impossible-tokens",
        "bebop/certify/ledger.py",
        "floored = rows.p.gather(1, cells).clamp_min(FLOOR)",
        "floored = rows.p.gather(1, cells)",
        f"{LEDGER}::test_an_impossible_token_is_proof_and_finite",
    ),
    fault(
        "certify/requests-in-any-order",
        "bebop/certify/ledger.py",
        "late = (new < 0).any() or (len(new) and new[0] == 0)",
        "late = False",
        f"{LEDGER}::test_requests_out_of_order_are_refused",
    ),
    fault(
        "certify/bins-learn-before-they-bet",
        "bebop/certify/marginals.py",
        "        chances = (counts",
        "        for pair in bins[0]:\n            counts[(0, *pair)] += 1\n        chances = (counts",
        f"{MARGINALS}::test_bins_learn_from_earlier_cohorts_alone",
    ),
    fault(
        "certify/tilt-without-its-normaliser",
        "bebop/certify/tilt.py",
        "found.append(step * taken - (p * grown).sum(-1).log())",
        "found.append(step * taken)",
        "certify/test_tilt.py::test_bets_are_fair_with_what_was_learned",
    ),
    fault(
        "certify/ids-without-the-price-of-waiting",
        "bebop/certify/marginals.py",
        "self._positions * np.log1p(-np.asarray(SHARES))",
        "0 * np.log1p(-np.asarray(SHARES))",
        f"{MARGINALS}::test_bets_on_single_tokens_are_fair_and_those_of_the_definition",
    ),
    fault(
        "certify/uniform-of-oneself",
        "bebop/certify/cohort.py",
        "rows=_find(key, key - span)",
        "rows=_find(key, key)",
        f"{SIMULATION}::test_every_direction_has_expectation_one",
    ),
    fault(
        "certify/bound-that-forgets-the-level",
        "bebop/certify/evidence.py",
        "limit = mixture - math.log(1 / alpha)",
        "limit = mixture - 0.5 * math.log(1 / alpha)",
        f"{MARGINALS}::test_a_bound_between_shares_is_at_least_the_exact_one",
    ),
    fault(
        "certify/visible-without-a-price",
        "bebop/certify/evidence.py",
        "need = math.log(1 / alpha) - math.log(weight) + math.log(len(shares))",
        "need = 0.5 * math.log(1 / alpha)",
        f"{SIMULATION}::test_what_is_called_visible_is_seen",
    ),
    fault(
        "certify/errors-too-high-taken-for-too-low",
        "bebop/certify/causes.py",
        'high, low = log_e["reported_high"], log_e["reported_low"]',
        'low, high = log_e["reported_high"], log_e["reported_low"]',
        "certify/test_causes.py::test_wrong_reports_are_found_and_named",
    ),
    fault(
        "certify/checkpoint-forgets-the-pairs",
        "bebop/certify/bigram.py",
        "self.keys, self.counts = np.array",
        "_ = np.array",
        f"{LEDGER}::test_a_checkpoint_goes_on_bit_by_bit",
    ),
)

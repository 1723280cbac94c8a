"""Faults in parked caches: what is gone on from, from where on, under which weights, and what goes first."""

from tests.mutants.fault import fault

PARKING, ADMISSION, ENGINE = "rollout/parking.py", "rollout/admission.py", "rollout/torch_engine.py"
ATTENTION, BASE = "bebop/model/attention.py", "rollout/decoding/base.py"
TESTS = "rollout/test_parking.py::"
TURNS = f"{TESTS}test_turns_are_those_of_a_full_prefill"
TOKEN = f"{TESTS}test_one_changed_token_is_a_miss"
WEIGHTS = f"{TESTS}test_new_weights_keep_what_is_parked_or_drop_it"
GROUP = f"{TESTS}test_a_group_goes_on_from_one_cache_and_shares_what_it_reads"
STORE = "rollout/test_parking_store.py::"
ORDER = f"{STORE}test_the_bound_holds_and_what_was_wanted_longest_ago_goes_first"
PADDING = f"{TESTS}test_padding_never_lands_on_a_row_that_ends_at_its_slot"
DRAWS = f"{TESTS}test_no_turn_draws_numbers_again"
NEWEST = f"{TESTS}test_another_request_goes_on_from_the_newest_weights_alone"
RESUMED = f"{TESTS}test_abort_and_resume_of_a_turn_that_went_on"

FAULTS = (
    fault("parking/survives-recompute", ENGINE, 'if self.on_update == "recompute":\n            self.parking.clear()',
          'if self.on_update == "recompute":\n            pass', WEIGHTS),
    fault("parking/survives-a-new-drafter", ENGINE,
          "if self.decoder.configure(decoding):\n            self.parking.clear()",
          "if self.decoder.configure(decoding):\n            pass",
          f"{TESTS}test_a_drafter_that_is_new_has_read_nothing_of_what_is_parked"),
    fault("parking/last-token-ignored", PARKING, "key, entries, oldest = _written(tokens), len",
          "key, entries, oldest = _written(tokens[:-1]), len", TOKEN),
    fault("parking/first-token-ignored", PARKING, 'array("q", tokens)', 'array("q", [0, *tokens[1:]])', TOKEN),
    fault("parking/order-ignored", PARKING, 'array("q", tokens)', 'array("q", sorted(tokens))', TOKEN),
    fault("parking/one-version-a-trajectory", ADMISSION,
          "self.slots.oldest[run.targets[0] : run.targets[-1] + 1] = run.parked.oldest", "pass", WEIGHTS),
    fault("parking/version-of-one-member", ADMISSION,
          "self.slots.oldest[run.targets[0] : run.targets[-1] + 1]", "self.slots.oldest[run.targets[0]]", GROUP),
    fault("parking/weights-of-others", PARKING, "seed in found.seeds or found.oldest == version", "True", NEWEST),
    fault("parking/of-equal-ones-the-older", PARKING, "like.oldest >= oldest", "True",
          f"{STORE}test_of_equal_answers_the_one_with_newer_weights_serves_both"),
    fault("parking/nothing-read", ADMISSION, "min(self.parked.entries, len(self.read) - 2)",
          "min(self.parked.entries, len(self.read) - 1)", RESUMED),
    fault("parking/positions-from-the-start", ATTENTION, "positions = torch.minimum(entries, begins + counts - 1)",
          "positions = steps", f"{TURNS}[bebop]"),
    fault("parking/padding-out-of-the-slot", ATTENTION,
          "(begins + steps).clamp_max(room - 1)", "begins + steps", PADDING),
    fault("parking/padding-on-the-row", ATTENTION, "(begins + steps).clamp_max(room - 1)",
          "torch.minimum(begins + steps, begins + counts - 1)", f"{TURNS}[bebop]"),
    fault("parking/whole-prompts-first", ADMISSION,
          "key=lambda i: found[i] is None", "key=lambda i: i", f"{TURNS}[bebop]"),
    fault("parking/newest-goes-first", PARKING, "self._remove(next(iter(self._held)))",
          "self._remove(next(reversed(self._held)))", ORDER),
    fault("parking/bound-exceeded-by-one", PARKING, "while self.counts.bytes + size > self.limit",
          "while self.counts.bytes > self.limit", ORDER),
    fault("parking/used-ones-stay", PARKING, "self._held.move_to_end(found.tokens, last=False)", "pass", ORDER),
    fault("parking/draws-by-entries", BASE, "self.sizes - 1, 2 * slots", "self.fed, 2 * slots", DRAWS),
    fault("parking/draws-by-answer", BASE, "self.sizes - 1, 2 * slots", "slots.count[:batch], 2 * slots", DRAWS),
)  # fmt: skip

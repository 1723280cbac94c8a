"""Faults of who is asked for what, what is on its way to workers, and what they report."""

from tests.mutants.fault import fault

DISPATCH, MANIFEST = "test_dispatch.py", "test_weight_manifest.py"
DISORDER = "test_pool_disorder.py::test_each_answer_counts_once_and_in_order_of_these"
FAULTS = (
    fault(
        "balance/an-answer-taken-twice",
        "bebop/dispatch.py",
        ".pop((prompt, member), self) is None",
        ".get((prompt, member), self) is None",
        f"{DISPATCH}::test_static_keeps_what_a_worker_lost_for_its_replacement",
    ),
    fault(
        "balance/idle-fleet-keeps-groups-whole",
        "bebop/dispatch.py",
        "min(len(members), room, share))",
        "min(len(members), room))",
        f"{DISPATCH}::test_an_idle_fleet_shares_what_there_is",
    ),
    fault(
        "balance/beyond-the-bound",
        "bebop/dispatch.py",
        "room, owed = self.bound - self._least,",
        "room, owed = self.bound + 1 - self._least,",
        f"{DISPATCH}::test_nothing_is_lost_doubled_or_above_the_bound",
    ),
    fault(
        "balance/who-has-room-is-forgotten",
        "bebop/dispatch.py",
        "self._least = min(self._least, owed)",
        "pass",
        f"{DISPATCH}::test_with_much_to_do_groups_stay_whole_up_to_the_bound",
    ),
    fault(
        "balance/prompts-before-their-weights",
        "bebop/lane.py",
        "for needed, assignment in self.outbox if needed <= self.sent]",
        "for needed, assignment in self.outbox]",
        DISORDER,
    ),
    fault(
        "balance/a-replacement-counts-reports-on",
        "bebop/lane.py",
        "decoding, 0, 0, False",
        "decoding, 0, self.seen, False",
        "test_pool.py::test_a_dead_worker_is_replaced_and_no_prompt_is_lost",
    ),
    fault(
        "balance/a-report-told-twice-counts-twice",
        "bebop/pool.py",
        "if report.number <= lane.seen:  # told twice",
        "if report.number < lane.seen:",
        DISORDER,
    ),
    fault(
        "balance/the-first-heard-gets-it-all",
        "bebop/pool.py",
        "await asyncio.sleep(0)  # others report",
        "pass  # others report",
        "simulation/test_reports.py::test_workers_that_report_at_one_moment_share_what_goes_out_then",
    ),
    fault(
        "balance/a-complaint-outlives-its-answer",
        "bebop/pool.py",
        "self._health.clear()",
        "pass",
        "test_loop_watch.py::test_a_stale_head_is_noticed_named_and_sent_again",
    ),
    fault(
        "balance/blocks-may-change-places",
        "bebop/weight_manifest.py",
        "(2 * np.arange(sums.size, dtype=np.uint64) + np.uint64(1))",
        "np.uint64(1)",
        f"{MANIFEST}::test_damage_is_noticed_and_named",
    ),
    fault(
        "balance/a-lost-tensor-is-not-missed",
        "bebop/weight_manifest.py",
        "if sent.weights.keys() != sent.manifest.keys():",
        "if not sent.weights.keys() <= sent.manifest.keys():",
        f"{MANIFEST}::test_damage_is_noticed_and_named",
    ),
    fault(
        "balance/weights-taken-unread",
        "rollout/worker.py",
        "weights = verified(weights) if",
        "weights = weights.weights if",
        f"{MANIFEST}::test_a_worker_refuses_damaged_weights_and_keeps_its_own",
    ),
    fault(
        "balance/simulated-answers-wait-for-their-group",
        "bebop/simulation/parts.py",
        "return self._pulls and self._ended > 0 and",
        "return False and",
        "simulation/test_reports.py::test_a_free_slot_has_single_answers_told_after_a_moment",
    ),
    fault(
        "balance/bound-of-one-slot",
        "benchmarks/balance.py",
        "costs.cycle(fleet.slots) / fleet.slots",
        "costs.cycle(1)",
        "benchmarks/test_balance.py::test_the_bound_is_work_over_what_full_engines_do",
    ),
    fault(
        "balance/weights-copied-by-every-reader",
        "bebop/weight_manifest.py",
        "return _received, (packed, self.manifest)",
        "return object.__reduce_ex__(self, 4)",
        "test_weight_manifest.py::test_readers_map_the_bytes_instead_of_copying_them",
    ),
)

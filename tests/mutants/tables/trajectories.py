"""Faults in the file of answers, and in the log-probs that the trainer adds to it."""

from tests.mutants.fault import fault

LOG, ROWS, READER = "bebop/trajectory_log.py", "bebop/trajectory_rows.py", "bebop/trajectories.py"
STEPS, LOOP = "test_trajectory_log.py", "test_loop_trajectories.py"
READ = "test_trajectories.py::test_an_answer_is_read_back_as_it_was"
TRACED = "trainer/test_traced.py::test_they_are_those_before_the_update"


FAULTS = (
    fault(
        "trajectories/resumed-step-lost",
        LOG,
        "self._drop((resume_from or 0) + 1)",
        "self._drop(resume_from or 0)",
        f"{STEPS}::test_going_on_after_a_step_drops_the_later_ones",
    ),
    fault(
        "trajectories/later-steps-stay",
        LOG,
        "self._drop(first)",
        "pass",
        f"{STEPS}::test_going_back_in_flight_replaces_steps",
    ),
    fault(
        "trajectories/left-out-step-of-before",
        LOG,
        "                self._stale = first\n",
        "",
        f"{STEPS}::test_who_holds_the_file_does_not_end_the_run",
    ),
    fault(
        "trajectories/text-of-a-step-that-failed",
        LOG,
        "fresh = token_ids(groups) - self._known\n",
        "fresh = token_ids(groups) - self._known; self._known |= fresh\n",
        f"{STEPS}::test_a_full_disk_is_one_line_and_leaves_whole_steps",
    ),
    fault("trajectories/lag-of-the-newest-token", ROWS, "int(versions.min(", "int(versions.max(", READ),
    fault(
        "trajectories/overlap-not-measured",
        ROWS,
        "if stats.overlap.any() else 0.0",
        "if True else 0.0",
        "test_trajectories.py::test_an_answer_without_tokens_and_an_engine_that_says_little",
    ),
    fault(
        "trajectories/one-step-too-many",
        READER,
        "traced AND step >= ? AND step < ?",
        "traced AND step >= ? AND step <= ?",
        "test_trajectories.py::test_traced_answers_of_some_steps_and_the_text_of_their_tokens",
    ),
    fault(
        "trajectories/half-a-step-stays",
        READER,
        "if error.sqlite_errorname not in ROLL_BACK:",
        "if True:",
        f"{STEPS}::test_a_reader_takes_back_half_a_step",
    ),
    fault(
        "trajectories/system-of-the-next-step",
        "bebop/loop.py",
        "batch.groups, version, system, found)",
        "batch.groups, version, self.monitor.decoding.system, found)",
        f"{LOOP}::test_answers_are_of_the_system_that_decoded_them",
    ),
    fault(
        "trajectories/first-rank-alone",
        "bebop/remote/actors.py",
        'for part in await self._all("logprobs")',
        'for part in (await self._all("logprobs"))[:1]',
        f"{LOOP}::test_every_rank_is_asked_for_its_answers",
    ),
    fault("trajectories/place-in-the-minibatch", "trainer/traced.py", "first + number if", "number if", TRACED),
    fault(
        "trajectories/after-a-step",
        "trainer/policy.py",
        "self.traced.add(first, rows, prox)",
        "self.traced.add(first, rows, logp)",
        TRACED,
    ),
    fault(
        "trajectories/of-the-engine",
        "trainer/policy.py",
        "self.traced.add(first, rows, prox)",
        "self.traced.add(first, rows, rows.rollout_logprobs)",
        TRACED,
    ),
)

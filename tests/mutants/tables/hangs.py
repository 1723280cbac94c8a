"""Faults in what notices hangs: clocks, deadlines, pings, stacks, and who is ended for them."""

from tests.mutants.fault import fault

HANGS = "test_hangs.py"
SERVERS = "rollout/sglang/test_http_backend.py"
ISOLATED = "tasks/test_isolated.py"

FAULTS = (
    fault(
        "hangs/slept-time-counts",
        "bebop/hangs.py",
        "return min(self._now() - self._last, 2 * TICK)",
        "return self._now() - self._last",
        f"{HANGS}::test_seconds_count_while_this_process_is_awake",
        f"{HANGS}::test_a_driver_that_slept_blames_nobody",
    ),
    fault(
        "hangs/no-floor",
        "bebop/hangs.py",
        "return max(self.floor, self.factor * max(self._slowest.values()))",
        "return self.factor * max(self._slowest.values())",
        f"{HANGS}::test_a_deadline_follows_from_the_slowest_of_all_kinds",
    ),
    fault(
        "hangs/by-kind-alone",
        "bebop/hangs.py",
        "max(self._slowest.values()))",
        "self._slowest[kind])",
        f"{HANGS}::test_a_deadline_follows_from_the_slowest_of_all_kinds",
    ),
    fault(
        "hangs/silence-as-it-is-told",
        "bebop/hangs.py",
        "min(pace.silent, counted + now - at)",
        "pace.silent",
        f"{HANGS}::test_a_silence_is_no_longer_than_what_was_seen_of_it",
    ),
    fault(
        "hangs/unmeasured-thread-has-the-floor",
        "bebop/hangs.py",
        "FACTOR * pace.slowest if pace.slowest else FIRST",
        "FACTOR * pace.slowest",
        f"{HANGS}::test_a_thread_that_does_not_get_on",
    ),
    fault(
        "hangs/own-limit-forgotten",
        "bebop/hangs.py",
        "silent > max(self.floor, measured, own)",
        "silent > max(self.floor, measured)",
        f"{HANGS}::test_a_thread_that_does_not_get_on",
    ),
    fault(
        "hangs/wait-on-purpose-is-measured",
        "bebop/watchdog.py",
        "self.clock.read() - call.since - allowed)",
        "self.clock.read() - call.since)",
        f"{HANGS}::test_a_call_that_waits_on_purpose_may_wait",
    ),
    fault(
        "hangs/all-ranks-blamed",
        "bebop/watchdog.py",
        "lives=tuple(deaf or asked)",
        "lives=tuple(asked)",
        f"{HANGS}::test_a_late_call_is_blamed_on_who_is_deaf_or_else_on_all",
    ),
    fault(
        "hangs/pings-are-not-counted",
        "bebop/watchdog.py",
        "            self.silent += passed\n",
        "            self.silent = passed\n",
        f"{HANGS}::test_who_does_not_answer_hangs_whatever_it_was_asked_for",
    ),
    fault(
        "hangs/pace-of-a-turn-in-progress",
        "rollout/engine_thread.py",
        "begun = self._since = time.monotonic()",
        "begun, self._since = time.monotonic(), None",
        "rollout/test_engine_thread.py::test_its_pace_tells_an_idle_thread_from_one_that_hangs",
    ),
    fault(
        "hangs/server-blamed-while-weights-load",
        "rollout/heartbeat.py",
        "passed if self._owed and not self._controls else 0.0",
        "passed if self._owed else 0.0",
        f"{SERVERS}::test_new_weights_keep_a_server_from_answering_pings_and_that_is_no_hang",
    ),
    fault(
        "hangs/fleet-waits-for-the-silent",
        "rollout/heartbeat.py",
        "[answer, beat], return_when=asyncio.FIRST_COMPLETED",
        "[answer], return_when=asyncio.FIRST_COMPLETED",
        f"{SERVERS}::test_a_server_that_accepts_and_never_answers_is_dead_though_an_answer_may_take_for_ever",
    ),
    fault(
        "hangs/verifier-is-not-asked-again",
        "bebop/tasks/isolated.py",
        "ASKED = 2",
        "ASKED = 1",
        f"{ISOLATED}::test_an_answer_whose_child_was_stopped_or_killed_is_asked_once_more",
    ),
    fault(
        "hangs/busy-verifier-counts-as-still",
        "bebop/tasks/isolated.py",
        "if (now := cpu_ticks(process.pid)) == used:",
        "if (now := cpu_ticks(process.pid)) >= used:",
        f"{ISOLATED}::test_what_computes_is_not_still",
    ),
    fault(
        "hangs/killed-for-memory-is-no-death",
        "bebop/remote/part.py",
        "    except RayError as error:",
        "    except ray.exceptions.RayActorError as error:",
        "test_ray_memory.py::test_an_actor_that_is_killed_for_want_of_memory_counts_as_dead",
    ),
    fault(
        "hangs/weights-wait-for-a-worker-that-is-gone",
        "bebop/pool.py",
        "lane.leave()  # or a synchronous job",
        "pass  # or a synchronous job",
        "test_pool.py::test_a_failure_while_weights_are_sent_ends_a_synchronous_job",
        "test_pool.py::test_too_many_deaths_while_weights_are_sent_end_a_synchronous_job",
    ),
)

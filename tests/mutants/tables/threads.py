"""Faults in the decoding thread and in engines that are served: lost answers, versions, cuts, aborts."""

from tests.mutants.fault import fault

THREAD = "rollout/test_engine_thread.py"
SERVED = "rollout/test_served_engine.py"

FAULTS = (
    fault(
        "engine/served-contexts-forgotten",
        "rollout/served_engine.py",
        "part.versions if recomputed else np.minimum.accumulate(part.versions)",
        "part.versions",
        f"{SERVED}::test_every_token_has_the_version_that_produced_it",
    ),
    fault(
        "engine/served-version-one-late",
        "rollout/served_engine.py",
        "self.version = version\n        if head",
        "self.version = version - 1\n        if head",
        f"{SERVED}::test_every_token_has_the_version_that_produced_it",
    ),
    fault(
        "engine/served-cut-answer-begins-again",
        "rollout/served_engine.py",
        "generate(request, answer.token_ids.tolist())",
        "generate(request, [])",
        f"{SERVED}::test_an_aborted_answer_goes_on_where_it_was",
    ),
    fault(
        "engine/served-abort-is-a-cut",
        "rollout/served_engine.py",
        "while request.id not in self._aborted:",
        "while True:",
        f"{SERVED}::test_an_aborted_answer_goes_on_where_it_was",
    ),
    fault(
        "engine/stop-forgets-who-waits",
        "rollout/engine_thread.py",
        "[*self._open.values(), *(future",
        "[*(future",
        f"{THREAD}::test_nobody_waits_for_a_thread_that_was_stopped",
    ),
    fault(
        "engine/stop-forgets-what-was-queued",
        "rollout/engine_thread.py",
        "*(future for _, future in self._calls)]",
        "]",
        f"{THREAD}::test_nobody_waits_for_a_thread_that_was_stopped",
    ),
    fault(
        "engine/stop-loses-the-last-answers",
        "rollout/engine_thread.py",
        "        self._answer(ended)\n        with self._news:",
        "        self._answer(() if self._stopping else ended)\n        with self._news:",
        f"{THREAD}::test_nobody_waits_for_a_thread_that_was_stopped",
    ),
    fault(
        "engine/cancelled-by-who-waits",
        "rollout/engine_thread.py",
        "future.set_running_or_notify_cancel()",
        "pass",
        f"{THREAD}::test_one_who_no_longer_waits_does_not_harm_the_others",
    ),
    fault(
        "engine/version-before-its-weights",
        "rollout/engine_thread.py",
        "self.engine.load_weights(weights, version)\n        with",
        "self._loaded = (version, self.engine.head)\n        self.engine.load_weights(weights, version)\n        with",
        f"{THREAD}::test_what_can_never_fit_comes_back_as_an_error_and_the_engine_goes_on",
    ),
)

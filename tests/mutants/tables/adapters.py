"""Faults of the adapters for OpenEnv and verifiers."""

from tests.mutants.fault import fault

OPENENV, TOKENS = "bebop/tasks/environments/openenv_client.py", "bebop/tasks/environments/generate_server.py"
EPISODE = "bebop/tasks/environments/verifiers_episode.py"
EPISODE_TESTS = "tasks/test_verifiers_episode.py"
OPENENV_TESTS, TOKENS_TESTS = "tasks/test_openenv_client.py", "tasks/test_generate_server.py"
FAULTS = (
    fault(
        "adapters/a-connection-outlives-a-timeout",
        OPENENV,
        "        yield socket\n        self._socket = socket",
        "        try:\n            yield socket\n        finally:\n            self._socket = socket",
        f"{OPENENV_TESTS}::test_an_answer_that_comes_late_is_nobodys",
    ),
    fault(
        "adapters/a-session-stays-open",
        OPENENV,
        "session, self._session, self._socket = self._session, None, None",
        "session = None",
        f"{OPENENV_TESTS}::test_sessions_end_with_their_episodes",
    ),
    fault(
        "adapters/two-steps-share-a-connection",
        OPENENV,
        "socket, self._socket = self._socket, None\n        if socket",
        "socket = self._socket\n        if socket",
        f"{OPENENV_TESTS}::test_two_steps_at_once_do_not_read_one_anothers_answers",
    ),
    fault(
        "adapters/a-crash-is-an-observation",
        OPENENV,
        'if data.get("code") != "VALIDATION_ERROR":',
        'if data.get("code") == "SESSION_ERROR":',
        f"{OPENENV_TESTS}::test_what_is_not_the_models_fault_is_lost",
    ),
    fault(
        "adapters/a-seed-for-all-questions",
        OPENENV,
        'f"{seed}:{index}"',
        'f"{seed}"',
        f"{OPENENV_TESTS}::test_the_item_is_what_reset_is_given",
    ),
    fault(
        "adapters/a-changed-token",
        TOKENS,
        "if old != new), None)",
        "if old != new and at < 3), None)",
        f"{TOKENS_TESTS}::test_a_request_that_parts_is_refused_before_anything_is_sampled",
    ),
    fault(
        "adapters/a-second-branch",
        TOKENS,
        "if len(ids) < len(self.ids):",
        "if len(ids) < len(self.ids) - len(self.turns[-1].sampled):",
        f"{TOKENS_TESTS}::test_a_request_that_parts_is_refused_before_anything_is_sampled",
    ),
    fault(
        "adapters/a-stop-token-made-up",
        TOKENS,
        'if self.turns and self.turns[-1].finish == "length":',
        'if self.turns and self.turns[-1].finish == "cut":',
        f"{TOKENS_TESTS}::test_nothing_follows_a_turn_that_was_cut_off",
    ),
    fault(
        "adapters/anybody-may-ask",
        TOKENS,
        'return hmac.compare_digest(given.encode(), f"Bearer {self.key}".encode())',
        "return True",
        f"{TOKENS_TESTS}::test_only_who_has_the_key_is_answered",
    ),
    fault(
        "adapters/history-observed-again",
        EPISODE,
        "added, self._history = ids[len(self._history) :], ids",
        "added, self._history = ids, ids",
        f"{EPISODE_TESTS}::test_what_a_request_adds_is_what_is_observed",
    ),
    fault(
        "adapters/the-stop-token-is-kept-back",
        EPISODE,
        "sampled = completion.token_ids.tolist()",
        "sampled = completion.token_ids.tolist()[:-1]",
        f"{EPISODE_TESTS}::test_what_a_request_adds_is_what_is_observed",
    ),
    fault(
        "adapters/a-rollout-outlives-its-episode",
        EPISODE,
        "            rollout.cancel()\n            await asyncio.wait({rollout})\n",
        "            await asyncio.sleep(0)\n",
        f"{EPISODE_TESTS}::test_the_host_serves_while_any_is_open",
    ),
    fault(
        "adapters/the-first-to-leave-shuts-the-host",
        EPISODE,
        "            self.users -= 1\n            if self.users == 0 and",
        "            self.users -= 1\n            if",
        f"{EPISODE_TESTS}::test_the_host_serves_while_any_is_open",
    ),
    fault(
        "adapters/tokens-of-another-model",
        "bebop/tasks/chat_delta.py",
        "if token >= self.vocabulary), None)",
        "if token > self.vocabulary), None)",
        "tasks/test_chat_delta.py::test_tokens_that_are_given_are_the_policys",
    ),
    fault(
        "adapters/text-in-place-of-tokens",
        "rollout/agent_loop.py",
        "completion if self.episodes.kind.tokens else completion.text",
        "completion.text",
        "rollout/test_agent_loop.py::test_an_environment_may_speak_tokens",
    ),
)

"""Trajectories of several turns: what is fed back, who is lost, what ends them."""

from tests.mutants.fault import fault

LOOP, DELTA = "rollout/agent_loop.py", "bebop/tasks/chat_delta.py"
SAMPLED = "rollout/test_agent_loop.py::test_what_was_sampled_is_what_is_read_again"
CUT = "rollout/test_agent_loop.py::test_a_turn_that_is_cut_off_ends_the_trajectory"
LOST = "rollout/test_agent_loop.py::test_what_is_lost_too_often_is_no_row_of_reward_0"
AGAIN = "rollout/test_agent_loop.py::test_a_lost_environment_begins_again_from_the_first_turn"
BUDGETS = "rollout/test_agent_loop.py::test_budgets"
TEMPLATES = "tasks/test_chat_delta.py"

FAULTS = (
    fault(
        "agents/history-tokenised-again",
        LOOP,
        "attempt.history += completion.token_ids.tolist()",
        "attempt.history += self.delta._encode(completion.text + self.delta.stops[0])",
        SAMPLED,
    ),
    fault("agents/observation-left-out", LOOP, "            attempt.history += observation\n", "", SAMPLED),
    fault(
        "agents/made-up-stop",
        LOOP,
        'if completion.finish_reason != "stop":',
        'if completion.finish_reason != "stop":\n'
        "                attempt.history.append(params.stop_token_ids[0])\n"
        "            if False:",
        CUT,
    ),
    fault(
        "agents/lost-as-reward-0",
        LOOP,
        "return Played(prompt=prompt, trajectory=None)",
        "return Played(prompt=prompt, trajectory=Trajectory(turns=tuple(attempt.turns), reward=0.0))",
        LOST,
    ),
    fault("agents/lost-goes-on", LOOP, "except EnvironmentLost as lost:", "except ZeroDivisionError as lost:", LOST),
    fault(
        "agents/what-was-lost-is-kept",
        LOOP,
        "episode, attempt = self.episodes.open(), _Attempt()",
        'episode, attempt = self.episodes.open(), locals().get("attempt") or _Attempt()',
        AGAIN,
    ),
    fault("agents/one-turn-more", LOOP, ">= self.limits.max_turns", "> self.limits.max_turns", BUDGETS),
    fault("agents/no-clock", LOOP, "> self.limits.max_seconds", "> 1e9", BUDGETS),
    fault(
        "agents/observations-written",
        "bebop/trajectory.py",
        "dtype=np.bool_), lambda _: False)",
        "dtype=np.bool_), lambda _: True)",
        SAMPLED,
    ),
    fault(
        "agents/any-beginning",
        "rollout/worker.py",
        "same_beginning(part.prompt, played.prompt)",
        "pass",
        "rollout/test_agent_loop.py::test_members_that_begin_differently_are_refused",
    ),
    fault(
        "agents/any-beginning-over-workers",
        "bebop/pool.py",
        "same_beginning(self._begun.setdefault(index, part.prompt), part.prompt)",
        "self._begun.setdefault(index, part.prompt)",
        "test_lost_members.py::test_members_that_begin_differently_are_refused",
    ),
    fault(
        "agents/lost-members-uncounted",
        "bebop/pool.py",
        "lost = len(self._members) - len(there)",
        "lost = 0",
        "test_lost_members.py::test_a_lost_member_is_counted_and_trained_on_nowhere",
    ),
    fault(
        "agents/separator-dropped", DELTA, "return rest[len(stop) :]", "return rest[len(stop) :].lstrip()", TEMPLATES
    ),
    fault("agents/markers-forged", DELTA, 'self.escaped(m["content"])', 'm["content"]', TEMPLATES),
    fault("agents/escaped-once", DELTA, "for _ in range(MOST_ESCAPES):", "for _ in range(1):", TEMPLATES),
    fault(
        "agents/templates-that-rewrite",
        DELTA,
        "_same(whole[: len(short)], short,",
        "_same(short, short,",
        TEMPLATES,
    ),
    fault("agents/one-answer-tried", DELTA, "for answer in ANSWERS:", "for answer in ANSWERS[:1]:", TEMPLATES),
    fault("agents/ids-unchecked", DELTA, "        self._check_ids(messages, between)\n", "", TEMPLATES),
    fault(
        "agents/chain-over-what-is-read",
        "trainer/chains.py",
        "ahead.long().cumprod(-1).sum(-1)",
        "ahead.long().sum(-1)",
        "trainer/test_turns.py::test_chains_begin_in_what_was_read_and_never_cross_into_it",
    ),
    fault(
        "agents/head-learns-what-is-read",
        "trainer/chains.py",
        "if all(bool(row.answer[len(row.answer) - count :].all())",
        "if all(bool(row.answer[len(row.answer) - 1 :].all())",
        "trainer/test_turns.py::test_chains_begin_in_what_was_read_and_never_cross_into_it",
    ),
    fault(
        "agents/policy-mask-a-token-late",
        "trainer/packing.py",
        "written = [c.written for c in completions]",
        "written = [np.roll(c.written, 1) for c in completions]",
        "trainer/test_turns.py::test_only_what_the_policy_wrote_is_predicted",
    ),
    fault(
        "agents/tools-written-by-the-policy",
        "recipes/verl/head.py",
        "return [row[:length].bool() for row, length in zip(mask, lengths, strict=True)]",
        "return [row[:length].bool() | True for row, length in zip(mask, lengths, strict=True)]",
        "recipes/verl/test_head.py::test_what_the_policy_wrote_in_both_kinds_of_batch",
    ),
    fault(
        "agents/numbers-that-no-log-takes",
        "bebop/certify/marginals.py",
        "float(self._mass[token])",
        "self._mass[token]",
        "certify/test_marginals.py",
    ),
)

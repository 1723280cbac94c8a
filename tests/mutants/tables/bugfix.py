"""Faults in the sandbox and in the environment that mends bugs: what holds a command, and what makes a verdict."""

from tests.mutants.fault import fault

LAUNCH = "bebop/tasks/environments/sandbox_launch.py"
PROBE = "bebop/tasks/environments/sandbox_probe.py"
EPISODES = "tasks/test_bugfix.py"
PACKAGES = "tasks/test_bugfix_programs.py"
SANDBOX = "tasks/test_sandbox.py"
HOLDS = f"{SANDBOX}::test_it_holds_and_leaves_nothing"
NOTICES = f"{SANDBOX}::test_its_own_test_notices_a_launcher_that_does_not_hold"
CHEATS = f"{EPISODES}::test_cheating_is_worth_nothing"

FAULTS = (
    fault(
        "bugfix/hidden-tests-beside-the-files",
        "bebop/tasks/environments/bugfix.py",
        'self.sandbox.run(["/bin/sh", "-c", command.line], self.files)',
        'self.sandbox.run(["/bin/sh", "-c", command.line], {**self.files, "t": str(self.item["hidden"])})',
        CHEATS,
    ),
    fault(
        "bugfix/results-where-the-code-runs",
        "bebop/tasks/environments/bugfix_judge.py",
        "PROGRAM, calls], files)",
        "PROGRAM, calls, json.dumps(list(hidden))], files)",
        CHEATS,
    ),
    fault(
        "bugfix/verdict-by-exit-status",
        "bebop/tasks/environments/bugfix_judge.py",
        "    lines = ran.output.splitlines()\n",
        "    lines = [json.dumps(row[3]) for row in hidden] if ran.code == 0 else []\n",
        CHEATS,
    ),
    fault(
        "bugfix/shown-tests-judge",
        "bebop/tasks/environments/bugfix.py",
        "        solved = float(right == len(hidden))\n",
        '        solved = float(self.sandbox.run(["/tools/python", "tests.py"], self.files).code == 0)\n',
        CHEATS,
    ),
    fault(
        "bugfix/share-of-tests-is-the-reward",
        "bebop/tasks/environments/bugfix.py",
        "solved = float(right == len(hidden))",
        "solved = right / len(hidden)",
        f"{EPISODES}::test_mending_the_bug_is_worth_one_and_doing_nothing_is_worth_nothing",
    ),
    fault(
        "bugfix/lost-sandbox-is-the-policys-fault",
        "bebop/tasks/environments/bugfix.py",
        'raise EnvironmentLost(f"bugfix: {lost}") from lost\n        counts',
        "observation = str(lost)\n        counts",
        f"{EPISODES}::test_a_sandbox_that_does_not_answer_is_never_the_policy",
    ),
    fault(
        "bugfix/verdict-by-chance",
        "bebop/tasks/environments/bugfix_judge.py",
        '[PYTHON, "-sSP", "-c"',
        '[PYTHON, "-I", "-S", "-c"',
        f"{EPISODES}::test_the_verdict_does_not_depend_on_the_order_of_sets",
    ),
    fault(
        "bugfix/long-command-loses-the-environment",
        "bebop/tasks/environments/bugfix_commands.py",
        "LINE = 100_000",
        "LINE = 200_000",
        f"{EPISODES}::test_bad_commands_are_observations",
    ),
    fault(
        "bugfix/what-is-no-text-loses-the-environment",
        "bebop/tasks/environments/bugfix_commands.py",
        'body = text.encode("utf-8", "replace").decode().strip()',
        "body = text.strip()",
        f"{EPISODES}::test_what_is_no_text_is_replaced",
    ),
    fault(
        "bugfix/bugs-that-do-not-show",
        "bebop/tasks/environments/bugfix_programs.py",
        "if all(any(call in hidden for call in failing) for failing in [*alone, together]) and shown:",
        "if shown:",
        f"{PACKAGES}::test_every_bug_fails_a_hidden_test_and_the_mended_package_none",
    ),
    fault(
        "bugfix/hidden-tests-are-the-shown-ones",
        "bebop/tasks/environments/bugfix_programs.py",
        "hidden = [call for call in calls if call not in shown]",
        "hidden = calls",
        f"{PACKAGES}::test_hidden_tests_are_not_among_those_shown",
    ),
    fault("sandbox/network-open", LAUNCH, '"net": 0x40000000}', '"net": 0}', HOLDS),
    fault("sandbox/no-limit-on-processes", LAUNCH, 'request["processes"]', "4000", HOLDS),
    fault("sandbox/command-of-root", LAUNCH, "return min(OUTSIDE, last)", "return 0", HOLDS),
    fault("sandbox/packages-shown", LAUNCH, 'for target in request["hidden"]:', "for target in []:", HOLDS),
    fault("sandbox/pipe-left-open", LAUNCH, "os.set_inheritable(int(sys.argv[1]), False)", "pass", HOLDS),
    fault("sandbox/no-filter", LAUNCH, '    restrict(request["filter"])\n', "", HOLDS),
    fault(
        "sandbox/init-outlives-the-launcher",
        LAUNCH,
        '        call("death signal", libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)\n',
        "",
        f"{SANDBOX}::test_nothing_is_left_when_it_is_killed",
    ),
    fault(
        "sandbox/launcher-outlives-its-owner",
        LAUNCH,
        "        if owner in events:\n            os._exit(1)",
        "        if owner in events:\n            poll.unregister(owner)",
        f"{SANDBOX}::test_nothing_is_left_when_it_is_killed",
    ),
    fault(
        "sandbox/test-does-not-ask-for-the-network",
        PROBE,
        "tried = (files, descriptors, network, privileges, bounds, processes)",
        "tried = (files, descriptors, privileges, bounds, processes)",
        NOTICES,
    ),
    fault(
        "sandbox/holes-are-no-reason-to-refuse",
        "bebop/tasks/environments/sandbox.py",
        "    if found:\n",
        "    if not found:\n",
        f"{SANDBOX}::test_a_machine_that_cannot_is_refused_in_one_line",
    ),
    fault(
        "sandbox/a-machine-that-cannot-is-no-reason-to-refuse",
        "bebop/tasks/environments/sandbox.py",
        "    except SandboxLost as lost:\n        why",
        "    except SandboxLost as lost:\n        return sandbox\n        why",
        f"{SANDBOX}::test_a_machine_that_cannot_is_refused_in_one_line",
    ),
)

"""Faults in what is said of trajectories of several turns: by the monitor, the certificate, the file, the page."""

from tests.mutants.fault import fault

TURNS, RECORDS, COLLECT = "bebop/monitor/turns.py", "bebop/monitor/records.py", "bebop/monitor/collect.py"
ROWS, CERTIFY = "bebop/trajectory_rows.py", "trainer/certify.py"
SEEN, STORED = "monitor/test_turns.py", "test_stored_turns.py"
OPENINGS = "rollout/test_openings.py"
VERL = "recipes/verl/test_collection.py"
LOOKED = "trainer/test_turns_looked_at.py::test_a_turn_is_held_against_the_policy_after_all_that_came_before"


FAULTS = (
    fault("turns/kinds-shifted", TURNS, "(turn.bit_length() - 1)", "turn.bit_length()", SEEN),
    fault("turns/first-answers-count-as-after-reading", TURNS, "if number and first", "if first", SEEN),
    fault("turns/cycles-of-the-last-turn-alone", TURNS, "sums.get(kind, DecodeStats()) + stats", "stats", SEEN),
    fault("turns/lost-members-not-counted", TURNS, "group.lost for group in groups", "0 for group in groups", SEEN),
    fault(
        "turns/groups-without-members-count",
        "bebop/monitor/estimators.py",
        "[group for group in groups if group.trajectories]",
        "[*groups]",
        f"{SEEN}::test_how_trajectories_went",
    ),
    fault("turns/all-rows-of-turn-0", COLLECT, "turn=[place for _", "turn=[0 for _", SEEN),
    fault("turns/version-of-the-end", COLLECT, "completion.versions[:1]", "completion.versions[1:1]", SEEN),
    fault("turns/labels-lost-in-the-log", RECORDS, "np.array(row.get(name, zeros)", "np.array(zeros", SEEN),
    fault(
        "turns/accept-lengths-compared",
        "bebop/monitor/drift_monitor.py",
        'rate=self.settings.rate) if key == "turn" else',
        "rate=self.settings.rate) if False else",
        f"{SEEN}::test_drift_of_late_turns_is_found_there",
    ),
    fault(
        "turns/probe-without-what-was-read",
        "bebop/trajectory.py",
        "(*parts, turns[place].observation)",
        "parts",
        f"{SEEN}::test_the_probe_set_takes_turns_with_all_that_came_before",
        LOOKED,
    ),
    fault(
        "turns/certified-without-its-history",
        CERTIFY,
        "(*group.prompt.token_ids, *before(trajectory.turns, turn))",
        "group.prompt.token_ids",
        LOOKED,
    ),
    fault(
        "turns/certified-turn-goes-with-its-window",
        CERTIFY,
        "number // len(turns)",
        "number",
        "trainer/test_turns_looked_at.py::test_pairs_take_turns_and_windows_in_turn",
    ),
    fault(
        "turns/an-alone-member-is-divided-by-nothing",
        "trainer/advantages.py",
        "max(size - 1, 1)",
        "(size - 1)",
        "trainer/test_advantages.py",
    ),
    fault(
        "turns/lost-members-are-zeros",
        "trainer/advantages.py",
        "[[t.reward for t in group.trajectories]]",
        "[[t.reward for t in group.trajectories] + [0.0] * group.lost]",
        "trainer/test_advantages.py",
    ),
    fault("turns/read-tokens-said-to-be-written", ROWS, "np.array([-i, i]", "np.array([i, i]", STORED),
    fault(
        "turns/marks-off-by-one", ROWS, "[len(turn.observation), len(", "[len(turn.observation) + 1, -1 + len(", STORED
    ),
    fault("turns/log-probs-of-what-was-read", ROWS, "if completion.mask is not None:", "if False:", STORED),
    fault("turns/trainer-log-probs-at-the-front", ROWS, "found[written] =", "found[: trajectory.written] =", STORED),
    fault(
        "turns/traced-by-the-last-turn",
        "trainer/traced.py",
        "all(turn.completion.trace is not None for turn in t.turns)",
        "t.completion.trace is not None",
        "trainer/test_turns_looked_at.py::test_log_probs_of_traced_turns_are_those_of_what_was_written",
    ),
    fault(
        "turns/first-format-not-brought-up",
        "bebop/trajectory_schema.py",
        '    "UPDATE answers SET written = length",\n',
        "",
        STORED,
    ),
    fault(
        "turns/cycle-begun-before-what-was-read",
        "bebop/view/drift_tokens.py",
        "begins = first[cycle]",
        "begins = np.searchsorted(trace.cycles, trace.cycles)",
        STORED,
    ),
    fault(
        "turns/versions-shown-of-what-was-read",
        "bebop/view/tokens.py",
        "plain[found.marks < 0] = None",
        "pass",
        STORED,
    ),
    fault(
        "turns/report-without-first-cycles",
        "bebop/report/turn_charts.py",
        "sorted({match[1] for match in found},",
        "sorted({match[1] for match in found} - {AFTER},",
        "report/test_turn_charts.py",
    ),
    fault(
        "turns/drift-by-turn-not-shown",
        "bebop/report/drift.py",
        "if len(kinds) > 1 else ()",
        "if len(kinds) < 1 else ()",
        "report/test_turn_charts.py",
    ),
    fault("turns/verl-abort-begins-a-turn", "recipes/verl/stats.py", "if not piece.get(GOES_ON):", "if True:", VERL),
    fault("turns/verl-turns-not-told-apart", "recipes/verl/stats.py", "if not piece.get(GOES_ON):", "if False:", VERL),
    fault(
        "turns/all-early-cycles-are-first",
        "rollout/slots.py",
        "self.opens[:batch] & (count == 0)",
        "self.opens[:batch] & (count < 9)",
        OPENINGS,
    ),
    fault(
        "turns/openings-of-all-answers",
        "rollout/admission.py",
        "[request.park for request",
        "[True for request",
        OPENINGS,
    ),
)

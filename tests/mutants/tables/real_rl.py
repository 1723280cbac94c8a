"""Faults in the runs of GRPO on a real model, in the heads beside them and in what the monitor is shown."""

from tests.mutants.fault import fault

RL, TESTS = "recipes/reproduce/real/rl", "recipes/reproduce/test_real_rl.py"
TASK = "recipes/reproduce/test_real_rl_task.py"
STORED = "recipes/reproduce/test_real_rl_stored.py"

FAULTS = (
    fault("real-rl/two-sentences-count", f"{RL}/task.py", "len(ends) == 1 and", "ends and", TASK),
    fault(
        "real-rl/any-part-of-a-word",
        f"{RL}/task.py",
        '(str(item["answer"]) in words)',
        '(str(item["answer"]) in text)',
        TASK,
    ),
    fault("real-rl/weights-unchecked", f"{RL}/beside.py", "if not allowed.met(off):", "if False:", TESTS),
    fault("real-rl/versions-unchecked", f"{RL}/beside.py", "versions != {step - 1}", "not versions", TESTS),
    fault(
        "real-rl/weights-as-they-were", f"{RL}/beside.py", "parameter.copy_(fresh.get_parameter(name))", "pass", TESTS
    ),
    fault("real-rl/checkpoints-gone-too-soon", f"{RL}/jobs.py", "{plan.segment + 1}", "{plan.segment}", TESTS),
    fault("real-rl/answers-of-nobody-count", f"{RL}/readings.py", "whole.select(cycles > 0)", "whole", TESTS),
    fault("real-rl/sweep-without-the-run", f"{RL}/readings.py", "tuple(readings[1:])", "tuple(readings)", TESTS),
    fault(
        "real-rl/other-head-never-drafts",
        f"{RL}/planted.py",
        "(case.temperature, case.other)",
        "(case.temperature, False)",
        TESTS,
    ),
    fault("real-rl/trained-on-what-is-held-out", f"{RL}/adapted.py", "number < held_out", "number < 1", TESTS),
    fault(
        "real-rl/heads-as-they-came", f"{RL}/adapted.py", 'str(place / "heads" / name / BEST)', "origins[name]", TESTS
    ),
    fault("real-rl/curves-that-still-rise-will-do", f"{RL}/findings.py", "bound=0.99", "bound=0.5", TESTS),
    fault("real-rl/runs-of-any-plan", f"{RL}/stored.py", "if now.get(name) != then.get(name)", "if False", STORED),
    fault("real-rl/unended-runs-stored", f"{RL}/__main__.py", "if (place / DONE).is_file():", "if True:", STORED),
    fault(
        "real-rl/stored-runs-made-again",
        f"{RL}/__main__.py",
        "work.skip_stored and stored.run_file",
        "False and stored.run_file",
        STORED,
    ),
    fault("real-rl/any-rise-will-do", f"{RL}/findings.py", "MOVED = 0.3", "MOVED = 0.0", TESTS),
)

"""Faults in the recipe of history by epoch: what an arm knows, and what is called a gain."""

from tests.mutants.fault import fault

REPLAY, RULE, JOBS = "recipes/history/replay.py", "recipes/history/rule.py", "recipes/history/jobs.py"
OWN = "recipes/test_history.py::"
KNOWN = f"{OWN}test_what_is_known_is_what_the_job_had_said_by_then"
MISSED = f"{OWN}test_one_thing_that_is_missed_is_enough"
TABLE = f"{OWN}test_a_table_and_a_picture_of_all_that_was_found"

FAULTS = (
    fault(
        "history-epochs/knows-the-next-step",
        REPLAY,
        "kept.recall(path, step)",
        "kept.recall(path, step + 1)",
        KNOWN,
    ),
    fault(
        "history-epochs/prompts-of-the-step-before", REPLAY, "range(step + 1, step + 2)", "range(step, step + 1)", KNOWN
    ),
    fault(
        "history-epochs/ages-of-this-epoch", REPLAY, "_epoch(plan, epoch - ago)", "_epoch(plan, epoch - ago + 1)", KNOWN
    ),
    fault(
        "history-epochs/points-at-the-beginning",
        JOBS,
        "+ self.apart // 2",
        "",
        f"{OWN}test_points_lie_within_their_epoch",
    ),
    fault(
        "history-epochs/first-epoch-counts",
        RULE,
        'row["epoch"] >= SINCE and ',
        "",
        f"{OWN}test_the_first_epoch_does_not_count",
    ),
    fault(
        "history-epochs/auto-by-the-best-epoch",
        RULE,
        "min(by_epoch(rows, arm, other, batch))",
        "max(by_epoch(rows, arm, other, batch))",
        f"{OWN}test_as_many_drafts_as_pay_are_judged_in_their_worst_epoch",
    ),
    fault(
        "history-epochs/interval-not-asked", RULE, "times.value >= bar and times.low > 1", "times.value >= bar", MISSED
    ),
    fault(
        "history-epochs/part-by-its-mean", RULE, "speed, batch, part).low > 1", "speed, batch, part).value > 1", MISSED
    ),
    fault("history-epochs/two-seeds-are-enough", RULE, ">= SEEDS", ">= 2", MISSED),
    fault(
        "history-epochs/lookups-of-the-best",
        RULE,
        "sum(shares) / len(shares) <= LOOKUP",
        "min(shares) / 2 <= LOOKUP",
        MISSED,
    ),
    fault(
        "history-epochs/speed-by-cycles",
        RULE,
        'total(rows, "tokens") / total(rows, "seconds")',
        'total(rows, "cycles") / total(rows, "seconds")',
        TABLE,
    ),
)

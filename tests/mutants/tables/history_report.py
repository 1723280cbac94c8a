"""Faults in what the report says of drafts from history."""

from tests.mutants.fault import fault

REPORT, ROWS = "bebop/report/history.py", "bebop/trajectory_rows.py"
SOURCES = "report/test_history.py::test_drafts_by_source_and_epoch"
AGE = "report/test_history.py::test_age_is_counted_in_updates_of_what_had_been_trained_on"

FAULTS = (
    fault("history-report/all-acceptance-is-history's", REPORT, "history=_mean(kept, history)",
          "history=_mean(accepted, tested)", SOURCES),
    fault("history-report/the-rest-with-history", REPORT, "rest=_mean(accepted - kept, tested - history)",
          "rest=_mean(accepted, tested)", SOURCES),
    fault("history-report/head-over-all-drafts", REPORT, "head=_mean(head, cycles)", "head=_mean(head, tested)",
          SOURCES),
    fault("history-report/answers-as-units", REPORT, "coalesce(question, prompt) % {CLUSTERS} AS cluster",
          "answers.id AS cluster", "report/test_history.py::test_intervals_are_over_questions"),
    fault("history-report/known-before-it-was-trained-on", REPORT, "bisect_right(ordered[question], first,",
          "bisect_right(ordered[question], first + 9,", AGE),
    fault("history-report/oldest-answer-remembered", REPORT, "first - max(version for", "first - min(version for", AGE),
    fault("history-report/questions-alike", REPORT, "coalesce(question, -1 - prompt) AS question", "0 AS question",
          AGE),
    fault("history-report/counts-not-kept", ROWS, "for name, sums in stats.counts.items()}", "for name, sums in ()}",
          SOURCES),
    fault("history-report/counts-of-the-first-draft", ROWS, "round(float(sums.sum()), 4)", "round(float(sums[0]), 4)",
          SOURCES),
)  # fmt: skip

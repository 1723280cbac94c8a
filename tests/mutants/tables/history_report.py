"""Faults in what the report says of drafts from history, and in how the head beside them is watched."""

from tests.mutants.fault import fault

REPORT, ROWS = "bebop/report/history.py", "bebop/trajectory_rows.py"
SOURCES = "report/test_history.py::test_drafts_by_source_and_epoch"
AGE = "report/test_history.py::test_age_is_counted_in_updates_of_what_had_been_trained_on"
COLLECT, MONITOR = "bebop/monitor/collect.py", "bebop/monitor/drift_monitor.py"
HEAD = "monitor/test_head_alone.py::test_what_history_brings_is_no_change_of_the_head"
TOLD = "monitor/test_head_alone.py::test_what_a_reading_said_holds_until_the_next"

FAULTS = (
    fault("history-monitor/history-counted-as-the-head's", COLLECT, "if head_alone else records",
          "if False else records", HEAD),
    fault("history-monitor/first-drafts-of-the-mixture", COLLECT, "        accepted=first,\n        overlap=first,",
          "        accepted=records.accepted[:, :1],\n        overlap=records.overlap[:, :1],", HEAD),
    fault("history-monitor/first-drafts-say-why", MONITOR,
          "        if self.settings.head_alone:\n            return []", "        if False:\n            return []",
          HEAD),
    fault("history-monitor/forgotten-between-readings", MONITOR, "cause=self._newest if s.head_alone else parts",
          "cause=parts", TOLD),
    fault("history-monitor/all-systems-alike", "bebop/monitor/watch.py", "head_alone=system.history",
          "head_alone=False", HEAD),
    fault("history-report/all-acceptance-is-history's", REPORT, "history=_mean(kept, history)",
          "history=_mean(accepted, tested)", SOURCES),
    fault("history-report/the-rest-with-history", REPORT, "rest=_mean(accepted - kept, tested - history)",
          "rest=_mean(accepted, tested)", SOURCES),
    fault("history-report/head-where-it-was-not-asked", REPORT, "head=_mean(head, read)", "head=_mean(head, cycles)",
          SOURCES),
    fault("history-monitor/head-where-it-was-not-asked", "bebop/monitor/estimators.py",
          "(stats.counts[HEAD_OVERLAP][0]), read)", "(stats.counts[HEAD_OVERLAP][0]), stats.cycles)",
          "rollout/test_recall.py::test_the_overlap_of_the_head_alone_is_that_of_plain_drafts"),
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

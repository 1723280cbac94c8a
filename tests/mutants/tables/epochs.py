"""Faults in finite sets of questions: their order, which of them it was, and what is told of it."""

from tests.mutants.fault import fault

EPOCHS, FILES, SOURCE = "bebop/tasks/epochs.py", "bebop/tasks/files.py", "bebop/tasks/source.py"
MADE, REPORT, SCHEMA = "bebop/tasks/procedural.py", "bebop/report/epochs.py", "bebop/trajectory_schema.py"
SEED = 'f"{self.seed}/{epoch}/{attempt}"'
ORDER = "tasks/test_epochs.py::test_every_epoch_has_every_question_once_in_an_order_of_its_own"
TOKENS = "tasks/test_epochs.py::test_a_question_has_the_same_tokens_in_every_epoch"
LONG = "tasks/test_epochs.py::test_what_stands_in_for_a_long_question_is_the_same_in_every_epoch"
FIRST = "tasks/test_epochs.py::test_a_size_takes_the_first_rows_as_if_the_file_ended_there"
OVER = "report/test_epochs.py::test_intervals_are_over_questions_and_those_of_speed_over_steps"
PAGE = "report/test_epochs.py::test_reward_and_acceptance_by_epoch"


FAULTS = (
    fault("epochs/orders-alike", EPOCHS, SEED, 'f"{self.seed}/{attempt}"', ORDER),
    fault("epochs/seeds-alike", EPOCHS, SEED, 'f"{epoch}/{attempt}"', ORDER),
    fault("epochs/candidates-alike", EPOCHS, SEED, 'f"{self.seed}/{epoch}"', ORDER),
    fault(
        "epochs/with-replacement",
        EPOCHS,
        "shuffle.sample(range(self.count), self.count)",
        "shuffle.choices(range(self.count), k=self.count)",
        ORDER,
    ),
    fault(
        "epochs/one-order-kept-for-all",
        EPOCHS,
        "if (epoch, attempt) not in self._orders:",
        "if not any(attempt == known for _, known in self._orders):",
        "tasks/test_epochs.py",
    ),
    fault(
        "epochs/another-order-of-files",
        EPOCHS,
        SEED,
        'f"{self.seed}/{epoch}/{attempt}/"',
        "tasks/test_epochs.py::test_rows_of_a_file_are_numbered_and_their_order_is_the_one_that_it_always_was",
    ),
    fault("epochs/question-by-place", MADE, "number = index if asked is None else asked", "number = index", TOKENS),
    fault(
        "epochs/candidate-of-another-question",
        MADE,
        "self._epochs.place(index)",
        "self._epochs.place(index, attempt)",
        LONG,
    ),
    fault("epochs/row-that-was-too-long", SOURCE, "self.items.asked(index, attempt)", "self.items.asked(index)", FIRST),
    fault("epochs/the-whole-file", FILES, "self.rows = rows[:size]", "self.rows = rows", FIRST),
    fault(
        "epochs/environment-of-the-place",
        SOURCE,
        "index if number is None else number",
        "index",
        "tasks/test_epochs.py::test_questions_of_environments_come_again",
    ),
    fault(
        "epochs/environment-seeded-by-place",
        "rollout/agent_loop.py",
        "environment_seed(self.task.seed, prompt.number)",
        "environment_seed(self.task.seed, prompt.index)",
        "rollout/test_agent_loop.py::test_a_question_that_is_asked_again_begins_as_before",
    ),
    fault(
        "epochs/held-out-of-the-same-rows",
        "bebop/adaptation/corpus.py",
        "seed + HELD_OUT_SEED, size=None)",
        "seed + HELD_OUT_SEED)",
        "adaptation/test_corpus.py::test_held_out_questions_are_none_of_a_finite_set",
    ),
    fault(
        "epochs/size-may-change",
        "bebop/resume_rules.py",
        '"system", "seed", "size")',
        '"system", "seed")',
        "test_run_folder.py",
    ),
    fault(
        "epochs/oldest-question-of-the-batch",
        "bebop/monitor/estimators.py",
        "Max(float(max(epochs)))",
        "Max(float(min(epochs)))",
        "test_loop_epochs.py::test_every_question_is_learned_from_once_an_epoch",
    ),
    fault(
        "epochs/second-format-not-brought-up",
        SCHEMA,
        '        "ALTER TABLE answers ADD COLUMN tested INTEGER",\n',
        "",
        "test_stored_turns.py",
    ),
    fault(
        "epochs/what-is-asked-once-in-the-report",
        REPORT,
        " WHERE question IS NOT NULL",
        "",
        "report/test_epochs.py::test_questions_that_are_asked_once_are_in_no_epoch",
    ),
    fault(
        "epochs/accept-length-over-answers",
        REPORT,
        "sum(accept_length * cycles) AS tokens, sum(CASE WHEN accept_length IS NOT NULL THEN cycles END)",
        "sum(accept_length) AS tokens, sum(accept_length IS NOT NULL)",
        PAGE,
    ),
    fault(
        "epochs/overlap-over-answers",
        REPORT,
        "sum(overlap * tested) AS overlap, sum(CASE WHEN overlap IS NOT NULL THEN tested END)",
        "sum(overlap) AS overlap, sum(overlap IS NOT NULL)",
        PAGE,
    ),
    fault(
        "epochs/points-alike",
        REPORT,
        "if e.questions == most else",
        "if e.questions else",
        "report/test_epochs.py::test_an_epoch_that_is_not_over_says_how_much_of_it_there_is",
    ),
    fault(
        "epochs/intervals-over-answers",
        REPORT,
        "GROUP BY epoch, question % {CLUSTERS} ORDER",
        "GROUP BY epoch, answers.id ORDER",
        OVER,
    ),
    fault(
        "epochs/speed-of-whole-steps",
        REPORT,
        "share * t.tokens for share, t in own], [share * t.decoding",
        "t.tokens for share, t in own], [t.decoding",
        PAGE,
    ),
    fault("epochs/speed-of-the-loop", REPORT, "_Times(speed * whole, decoding,", "_Times(speed * whole, whole,", PAGE),
    fault("epochs/members-for-questions", REPORT, "count(DISTINCT question)", "count(DISTINCT member)", PAGE),
)

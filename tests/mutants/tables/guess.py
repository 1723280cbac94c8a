"""Faults in the recipe of guess and in turns as text for a head: what is learned from, and what is called a gain."""

from tests.mutants.fault import fault

ROWS, RULE, TURNS = "recipes/guess/demonstrations.py", "recipes/guess/rule.py", "bebop/adaptation/turns.py"
LABELS = "recipes/test_guess.py::test_rows_are_what_the_loop_makes_and_labels_are_what_the_policy_says"
LOSS = "recipes/test_guess.py::test_the_loss_is_of_what_the_policy_says_from_what_stands_before_it"
MISSED = "recipes/test_guess.py::test_one_thing_that_is_missed_is_enough"
GAIN = "recipes/test_guess.py::test_the_gain_is_of_the_first_and_last_five_steps"
HELD_OUT = "adaptation/test_turns.py::test_held_out_games_are_other_games_and_what_is_kept_is_read_back"

FAULTS = (
    fault(
        "guess/label-one-too-early",
        ROWS,
        "labels = [IGNORE] * len(ids)",
        "labels = [IGNORE] * (len(ids) - 1) + ids[-1:]",
        LABELS,
    ),
    fault("guess/stop-not-learned", ROWS, "labels += turn + ", "labels += [*turn[:-1], IGNORE] + ", LABELS),
    fault(
        "guess/observation-learned",
        ROWS,
        "turn + [IGNORE] * len(observation)",
        "turn + observation",
        LABELS,
    ),
    fault("guess/delta-left-out", ROWS, "ids += turn + observation", "ids += turn + observation[1:]", LABELS),
    fault("guess/targets-not-shifted", "recipes/guess/sft.py", "hidden[:, :-1]", "hidden[:, 1:]", LOSS),
    fault(
        "guess/every-step-the-same-games",
        ROWS,
        "range(step * batch_size, (step + 1) * batch_size)",
        "range(batch_size)",
        "recipes/test_guess.py::test_no_game_is_shown_twice",
    ),
    fault("guess/first-step-alone", RULE, "rewards[:STEPS]", "rewards[: STEPS + 1]", GAIN),
    fault("guess/interval-not-asked", RULE, "seeds.low > 0", "seeds.high > 0", MISSED),
    fault("guess/two-seeds-are-enough", RULE, "len(jobs) >= SEEDS", "len(jobs) >= 2", MISSED),
    fault("guess/least-ratio-error", RULE, "max(ratio_errors)", "min(ratio_errors)", MISSED),
    fault(
        "guess/stopped-stage-counts",
        "recipes/stages.py",
        "if (folder / STAGE).is_file():",
        "if folder.exists():",
        "recipes/test_guess.py::test_a_finished_stage_is_not_done_again_and_a_stopped_one_is",
    ),
    fault("turns/observation-not-before", TURNS, "        before += turn.observation.tolist()\n", "",
          "adaptation/test_turns.py::test_a_turn_answers_all_that_stands_before_it"),
    fault("turns/held-out-draws-of-training", TURNS, "decoding, None, ranks, seed)]", "decoding, None, ranks)]",
          HELD_OUT),
    fault(
        "turns/whoever-is-faster",
        TURNS,
        "for i in numbers if played[i].trajectory is not None]",
        "for i in reversed(numbers) if played[i].trajectory is not None]",
        "adaptation/test_turns.py::test_turns_are_those_of_the_first_games_however_many_are_played_at_once",
    ),
    fault(
        "turns/seed-too-large",
        TURNS,
        "(config.seed + HELD_OUT_SEED) % MAX_SEED",
        "config.seed + HELD_OUT_SEED",
        "adaptation/test_turns.py::test_seeds_of_requests_fit",
    ),
)  # fmt: skip

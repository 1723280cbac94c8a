"""Faults of the entropy bonus."""

from tests.mutants.fault import fault

FAULTS = (
    fault(
        "policy/entropy-sign",
        "trainer/losses.py",
        "loss - config.entropy_coefficient",
        "loss + config.entropy_coefficient",
        "trainer/test_losses.py::test_entropy_bonus_and_kl_by_hand",
    ),
    fault(
        "policy/entropy-target-turned",
        "trainer/losses.py",
        "(mean_of_answer < target)",
        "(mean_of_answer > target)",
        "trainer/test_losses.py::test_an_entropy_target_leaves_the_bonus_to_answers_below_it_by_hand",
    ),
    fault(
        "policy/entropy-target-of-tokens",
        "trainer/losses.py",
        "(mean_of_answer < target).repeat_interleave(answers)",
        "(entropy < target)",
        "trainer/test_losses.py::test_an_entropy_target_leaves_the_bonus_to_answers_below_it_by_hand",
    ),
)

from bebop.verl_job.plugin import PARTS, wanted
from bebop.verl_job.settings import EXTERNAL, MODULE, VARIABLE, VerlConfig, to_variable


def functions(**environment: str) -> set[str]:
    return {hook.function for hook in wanted(environment)}


STOCK = {"choices.add_adapter", "choices.add_replica", "choices.add_transfer", "driver.hand_over"}


def test_without_a_job_that_asks_there_are_only_choices() -> None:
    assert functions() == STOCK
    assert functions(**{VARIABLE: to_variable(VerlConfig())}) == STOCK


def test_every_part_alone_brings_its_own_hooks_and_the_self_test() -> None:
    for part, hooks in PARTS.items():
        found = functions(**{VARIABLE: to_variable(VerlConfig(**{part: True}))})
        assert found - STOCK == {hook.function for hook in hooks} | {"selftest.check_trainer", "selftest.answer_worker"}


def test_a_process_that_was_told_nothing_checks_itself() -> None:
    assert "selftest.check_trainer" in functions(**{EXTERNAL: f"somebody.elses,{MODULE}"})


def test_the_cpu_is_a_platform_where_it_is_asked_for() -> None:
    assert "cpu.register_platform" in functions(VERL_PLATFORM="cpu")
    assert "cpu.register_platform" not in functions(VERL_PLATFORM="nvidia")

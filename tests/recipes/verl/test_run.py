import pytest

from bebop.errors import UserError
from bebop.verl_job.run import CONF, choices, command_line, run


def test_the_group_is_added_and_overrides_are_passed_on() -> None:
    line = command_line(["bebop=reasoning", "trainer.nnodes=2"])
    assert line == ["--config-dir", str(CONF), "+bebop=reasoning", "trainer.nnodes=2"]
    assert command_line([])[-1] == "+bebop=default"


def test_a_choice_that_does_not_exist_is_one_line() -> None:
    assert {"default", "embedded", "off", "reasoning", "agent", "example"} <= set(choices())
    with pytest.raises(UserError, match=r"bebop=warp is not possible: choose one of agent, default"):
        command_line(["bebop=warp"])


def test_without_verl_the_job_does_not_start() -> None:
    with pytest.raises(UserError, match="pip install -e"):
        run([])

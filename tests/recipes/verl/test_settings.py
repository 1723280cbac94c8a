import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from bebop.errors import UserError
from bebop.verl_job.settings import VARIABLE, VerlConfig, current, parse, parse_engine, to_variable


def test_the_block_of_a_configuration_becomes_checked_settings() -> None:
    block = OmegaConf.create({"metrics": True, "train_head": True, "head": {"lr": 1e-6, "betas": [0.9, 0.95]}})
    found = parse(block)
    assert found.parts == ("metrics", "train_head")
    assert found.head.lr == 1e-6 and found.head.betas == (0.9, 0.95)


def test_they_reach_another_process_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert current() is None
    wanted = parse({"metrics": True, "monitor": True, "head": {"objective": "tv"}})
    monkeypatch.setenv(VARIABLE, to_variable(wanted))
    assert current() == wanted


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"metric": True}, "bebop.metric=True is not possible: no such setting"),
        ({"monitor": True}, "bebop.monitor=True is not possible: it takes bebop.metrics=true"),
        ({"head": {"depth": 0}}, "head.depth=0 is not possible"),
        ({"train_head": "yes"}, "bebop.train_head='yes' is not possible: true or false is wanted here"),
    ],
)
def test_a_mistake_is_one_line(block: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(block)


def test_the_engine_has_settings_of_its_own() -> None:
    assert parse_engine(None).system == "bebop"
    with pytest.raises(UserError, match=r"engine_kwargs\.bebop\.slots=0"):
        parse_engine({"slots": 0})


def test_all_off_by_default() -> None:
    assert VerlConfig().parts == ()


def test_importing_the_plug_in_imports_neither_torch_nor_verl_nor_ray() -> None:
    code = (
        "import bebop.verl_job.plugin, sys; print([m for m in ('torch', 'verl', 'ray', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr

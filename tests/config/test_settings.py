"""Help on settings, and docs/settings.md, say what the dataclasses say."""

import dataclasses

import pytest

from bebop import adapt, run, simulate
from bebop.certify import __main__ as certify
from bebop.config.adapt import AdaptConfig
from bebop.config.certify import CertifyConfig
from bebop.config.docs import document, overview
from bebop.config.fields import settings
from bebop.config.job import JobConfig
from bebop.config.simulate import SimulateConfig
from tests.commands import error_of
from tests.mutants.fault import ROOT


def test_the_document_is_what_the_dataclasses_say() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == document(), "python -m bebop.config.docs > docs/settings.md"


@pytest.mark.parametrize(
    ("main", "cls"),
    [
        (run.main, JobConfig),
        (adapt.main, AdaptConfig),
        (certify.main, CertifyConfig),
        (simulate.main, SimulateConfig),
    ],
)
@pytest.mark.slow
def test_help_on_each_group_lists_its_settings(main, cls, capsys: pytest.CaptureFixture[str]) -> None:
    for group in dict.fromkeys(one.name.split(".")[0] for one in settings(cls)):
        assert main(["--help", group]) == 0
        text = capsys.readouterr().out
        listed = {line.split("=")[0] for line in text.splitlines() if line and line[0] != " " and "=" in line}
        assert listed == {one.name for one in settings(cls) if one.name.split(".")[0] == group}


def test_help_on_a_setting_has_default_limit_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    run.main(["--help", "rollout.sampling.top_p"])
    assert capsys.readouterr().out == (
        "\nrollout.sampling.top_p=1.0\n    probability that they hold together\n"
        "    give a number above 0 and at most 1\n"
        "    fixed in a run: finished completions in the checkpoint were sampled the other way\n"
    )
    adapt.main(["--help", "head.lr"])
    assert "head.lr=0.002\n" in capsys.readouterr().out  # that of the command, not of the dataclass
    run.main(["--help", "rollout.sglang.cache_tokens"])
    assert "give a whole number: 1 or more, or null\n" in capsys.readouterr().out


def test_help_alone_lists_the_groups_and_their_choices() -> None:
    lines = overview(JobConfig).splitlines()
    groups = [line.split()[0] for line in lines if not line.startswith("    ")]
    assert groups == [field.name for field in dataclasses.fields(JobConfig)]
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines)
    assert any(line.split()[0] == "decoding=bebop" for line in lines)


def test_an_unknown_group_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_of(run.main, ["--help", "nope"], capsys)
    assert "--help nope: there is no such group; there are model, task" in line
    assert "seed" in error_of(adapt.main, ["-h", "nope"], capsys)

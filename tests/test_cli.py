"""The command ``bebop``: where it hands arguments to, what it refuses, versions, and what shells complete."""

import shutil
import subprocess
import sys
from importlib.util import find_spec

import pytest

from bebop.cli import COMMANDS, completion, main, version
from bebop.config.compose import groups
from tests.cases import slow_but
from tests.commands import ended, error_of
from tests.tree import ROOT


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def test_help_has_a_sentence_for_each_command_and_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'hydra', 'ray', 'yaml'} & set(sys.modules)"
    text = python(f"import sys; from bebop.cli import main; main([]); print('heavy:', {heavy})")
    lines = {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}
    assert all(lines[name][-1].endswith(".") and len(lines[name]) > 4 for name in COMMANDS)
    assert text.endswith("heavy: set()\n")


@pytest.mark.parametrize("name", slow_but(["run", "certify", "export"], COMMANDS))
def test_a_command_gets_the_arguments_after_its_name(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = COMMANDS[name].module
    assert find_spec(module) is not None
    with ended(lambda arguments: main([name, "--help"]), [], capsys) as (code, out, lines):
        assert code == 0 and lines == []
    usage = " ".join(out.split())
    assert usage.startswith((f"usage: python -m {module.removesuffix('.__main__')} ", f"usage: bebop {name} "))
    refused = error_of(lambda arguments: main([name, "--no-such-option"]), [], capsys)
    assert "--no-such-option" in refused or "required" in refused


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rum"], "bebop rum: no such command; did you mean run? there are demo, run, adapt, "),
        (["xyz"], "bebop xyz: no such command; there are demo, "),
        (["completion", "tcsh"], "bebop completion tcsh: give one of bash, zsh, fish"),
        (["completion"], "give one of bash, zsh, fish"),
        (["demo", "--seed", "-1"], "-1 is not possible: give a number from 0 to"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(lambda _: main(arguments), [], capsys)


def test_versions_name_torch_and_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setenv("BEBOP_COMMIT", "0123456789abcdef")
    assert f" (commit 0123456789ab), torch {torch.__version__}, Python 3." in version()


# A line as it was typed, and what bash makes of it. Words are split as bash splits them: at = as well.
TYPED = {
    "bebop c": "certify",
    "bebop ru": "run",
    "bebop run trainer.lr_w": "trainer.lr_warmup_steps=",
    "bebop run task=g": "gcd",
    "bebop certify decoding=bebop_b": "bebop_block",
    "bebop run trainer.lr=1": "",
    "bebop view r": "",  # a folder: bash goes on to files
    "bebop none t": "",
}
DRIVER = r"""
source /dev/stdin <<<"$SCRIPT"
compopt() { :; }  # works inside a completion alone
while IFS= read -r COMP_LINE; do
  COMP_POINT=${#COMP_LINE}; read -ra COMP_WORDS <<<"${COMP_LINE//=/ = }"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  COMPREPLY=(); _bebop; echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_settings_and_choices() -> None:
    done = subprocess.run(
        ["bash", "-c", DRIVER], input="\n".join(TYPED) + "\n", capture_output=True, text=True, check=True,
        env={"SCRIPT": completion("bash"), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert dict(zip(TYPED, done.stdout.splitlines(), strict=True)) == TYPED and done.stderr == ""


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_know_the_same_words(shell: str) -> None:
    script = completion(shell)
    wanted = [*COMMANDS, *(f"decoding={choice}" for choice in groups()["decoding"]), "trainer.lr=", "fleet.workers="]
    assert [word for word in wanted if word not in script] == []
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)

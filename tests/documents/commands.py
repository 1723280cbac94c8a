"""Whether a command of a page would be accepted: its arguments go through the real parser, or the real composition.

Nothing that takes longer than seconds is done: jobs stop at their configuration, argument parsers once they have
parsed, launch scripts at the command that they would start.
"""

import argparse
import contextlib
import io
import itertools
import logging
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import yaml
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from bebop.cli import COMMANDS
from bebop.config.compose import job_config
from bebop.verl_job.run import CONF, choices
from bebop.verl_job.settings import parse
from tests.tree import ROOT

CONFIGURED = (
    "bebop.run",
    "bebop.adapt",
    "bebop.certify",
    "bebop.simulate",
    "bebop.megatron_job.adapt",
)  # --cfg composes, and stops
OUTSIDE = (
    "prometheus",
    "grafana",
    "ray",
    "ruff",
    "mypy",
    "rm",
    "mkdir",
    "mv",
    "split",
    "find",
    "cd",
    "docker",
    "eval",
)  # programs of others: not ours to check
OTHERS = ("sglang.launch_server", "pytest", "venv")  # modules of others
STUB = '#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"$RECORD"\n'


class Wrong(Exception):
    """A command that would not do what the page says."""


class Parsed(BaseException):
    """Raised once an argument parser took its arguments."""


def commands(text: str) -> Iterator[list[str]]:
    """The words of every command: comments are left out, lines that end in a backslash go on."""
    for line in text.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def check(words: Sequence[str], folder: Path) -> None:
    """``Wrong`` if a command is not possible; ``folder`` takes what it writes."""
    begin = next(i for i, word in enumerate(words) if not re.match(r"[A-Z][A-Z_0-9]*=", word))
    environment = dict(word.split("=", 1) for word in words[:begin])
    name, arguments = Path(words[begin]).name.replace("python3", "python"), words[begin + 1 :]
    if name in OUTSIDE:
        return
    if name not in PROGRAMS:
        raise Wrong(f"no test knows the program {name!r}")
    PROGRAMS[name](arguments, environment, folder)


PASSED_ON = ("MAKEFLAGS", "MAKEOVERRIDES", "MFLAGS", "ARGS")  # by a make that runs these tests, with its own arguments


def make(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """The target is there, and so is what it starts."""
    names = ("", "-sglang", "-vllm", "-verl", "-megatron", "-agents")
    old = [word for name in names for word in ("-o", f".venv{name}/.installed")]
    alone = {name: value for name, value in os.environ.items() if name not in PASSED_ON}
    asked = ["make", "-n", *old, *arguments]
    done = subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Wrong(done.stderr.strip())
    for words in commands(done.stdout):
        if any(word == "-m" for word in words):
            check(words, folder)


def python(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """A module with its arguments, up to where it would begin to work."""
    if list(arguments[:1]) != ["-m"]:
        raise Wrong(f"python {' '.join(arguments)}: modules are run with -m")
    module, rest = arguments[1], list(arguments[2:])
    if module == "verl.trainer.main_ppo":
        verl(rest)
    elif module == "bebop.run" and "runtime=verl" in rest:
        verl(["--config-dir", str(CONF), *("+" * o.startswith("bebop=") + o for o in rest if o != "runtime=verl")])
    elif module == "mkdocs":
        return  # test_site.py builds the site
    elif module == "pytest":
        missing = [word for word in rest if "/" in word and not (ROOT / word.partition("::")[0]).exists()]
        if missing:
            raise Wrong(f"{missing[0]} does not exist")
    elif module not in OTHERS:
        asked = {"--help", "-h", "--cfg", "--gpu", "--museum"} & set(rest)
        run(
            module,
            [*rest, *(["--cfg"] if module in CONFIGURED and not asked and rest[:1] != ["memory"] else [])],
            folder,
        )


def bebop(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """A command of ``bebop``: its module with the arguments after its name."""
    if arguments and arguments[0] in COMMANDS:
        module = COMMANDS[arguments[0]].module.removesuffix(".__main__")
        python(["-m", module, *arguments[1:]], environment, folder)
    else:
        run("bebop", arguments, folder)


def run(module: str, arguments: Sequence[str], folder: Path) -> None:
    """As ``python -m`` does it, in this process, until the arguments are parsed."""
    if find_spec(module) is None:
        raise Wrong(f"there is no module {module}")
    said, parser = io.StringIO(), argparse.ArgumentParser
    try:
        with (
            _apart(folder),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            patch.object(sys, "argv", [module, *arguments]),
            patch.object(parser, "parse_args", _parse),
            warnings.catch_warnings(),
        ):
            # runpy warns that this process has imported the module before; a process of its own has not.
            warnings.filterwarnings("ignore", message=".*found in sys.modules", category=RuntimeWarning)
            runpy.run_module(module, run_name="__main__")
    except Parsed:
        return
    except SystemExit as end:
        absent = "megatron-core is not installed here" in said.getvalue()  # said once the arguments were found right
        if end.code not in (0, None) and not absent:
            raise Wrong(f"{module} {' '.join(arguments)}: {said.getvalue().strip()}") from None


def _parse(parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: object = None) -> None:
    options, unknown = parser.parse_known_args(args)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if overrides := getattr(options, "overrides", None):
        job_config(overrides)
    raise Parsed


@contextlib.contextmanager
def _apart(folder: Path) -> Iterator[None]:
    """What an entry point changes in its process is put back."""
    handlers, filters, term = list(logging.root.handlers), list(warnings.filters), signal.getsignal(signal.SIGTERM)
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}), contextlib.chdir(folder):
        try:
            yield
        finally:
            logging.root.handlers[:], warnings.filters[:] = handlers, filters  # type: ignore[index]
            signal.signal(signal.SIGTERM, term)


def torchrun(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """torch's own arguments, then those of the module."""
    options = get_args_parser().parse_args(list(arguments))
    python(["-m", options.training_script, *options.training_script_args], environment, folder)


def verl(arguments: Sequence[str]) -> None:
    """The group and the block of Bebop; the rest is verl's, which the environment with verl composes."""
    if list(arguments[:1]) != ["--config-dir"] or (ROOT / arguments[1]).resolve() != CONF.resolve():
        raise Wrong(f"verl looks for the group bebop in {CONF.relative_to(ROOT.resolve())}: --config-dir names it")
    groups = [a.removeprefix("+bebop=") for a in arguments if a.startswith("+bebop=")]
    if unknown := [name for name in groups if name not in choices()]:
        raise Wrong(f"bebop={unknown[0]} is not one of {', '.join(choices())}")
    block: dict[str, object] = {}
    for name, _, value in (a.partition("=") for a in arguments if a.startswith("bebop.")):
        at, *path = block, *name.split(".")[1:]
        for part in path[:-1]:
            at = at.setdefault(part, {})  # type: ignore[assignment, attr-defined]
        at[path[-1]] = yaml.safe_load(value)
    parse({"metrics": True, **block})


def bash(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """A launch script, and what it starts."""
    python(started(arguments, environment, folder), environment, folder)


def started(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> list[str]:
    """What a launch script calls python with: a stub stands for it."""
    script = arguments[0]
    if not (ROOT / script).is_file():
        raise Wrong(f"there is no {script}")
    stub, record = folder / "python", folder / "record"
    stub.write_text(STUB)
    stub.chmod(0o755)
    record.unlink(missing_ok=True)
    shown = {**os.environ, **environment, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record)}
    done = subprocess.run(["bash", *arguments], cwd=ROOT, env=shown, capture_output=True, text=True, check=False)
    if done.returncode or not record.exists():
        raise Wrong(f"{script}: {done.stderr.strip()}")
    return record.read_text().split("\0")[:-1]


def pip(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """Files are there, extras of ours are declared, and nobody is sent to an index for what is in none."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for flag, value in itertools.pairwise(arguments):
        if flag in ("-c", "-r") and not (ROOT / value).is_file():
            raise Wrong(f"there is no {value}")
    if arguments[0] == "wheel":  # of a checkout, into a folder
        return
    for word in arguments[1:]:
        if word.startswith(("-", "constraints")):
            continue
        wanted = Requirement(re.sub(r"^\.", "bebop-rl", word))
        if wanted.name == "bebop-rl" and (unknown := wanted.extras - set(extras)):
            raise Wrong(f"{word}: pyproject.toml has no extra {', '.join(unknown)}")
        if word.startswith("bebop-rl"):
            raise Wrong(f"{word} is in no index: it is installed from its checkout")


def git(arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
    """``git show`` of a commit that there is, where the whole history is."""
    if arguments[0] in ("clone", "sparse-checkout"):
        return
    if arguments[0] != "show":
        raise Wrong(f"no test knows git {arguments[0]}")
    if whole_history():
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(done.stderr.strip())


def whole_history() -> bool:
    """Whether there is a repository with all of its commits."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == "false"


Check = Callable[[Sequence[str], Mapping[str, str], Path], None]
PROGRAMS: dict[str, Check] = {
    "bebop": bebop, "make": make, "python": python, "torchrun": torchrun, "bash": bash, "pip": pip, "git": git,
}  # fmt: skip

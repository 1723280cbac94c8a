"""The ``bebop`` command, which passes the arguments after a command's name to the command's module.

Nothing heavy is imported before the command is known, so ``bebop --help`` takes a fraction of a second.
"""

import difflib
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from bebop import __version__
from bebop.command import run_main
from bebop.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of ``bebop``: the module whose ``main`` it calls, and its help text."""

    module: str
    summary: str  # one sentence of --help
    root: str | None = None  # file in conf/ with the settings that are its arguments; None: options with dashes


COMMANDS = {
    "demo": Command(module="bebop.demo", summary="See everything once in a minute: training, drafts, a certificate."),
    "run": Command(module="bebop.run", root="config", summary="Train a model by GRPO with speculative rollouts."),
    "adapt": Command(module="bebop.adapt", root="adapt", summary="Train the draft head of a checkpoint before RL."),
    "certify": Command(
        module="bebop.certify.__main__", root="certify", summary="Test whether an engine samples what it claims to."
    ),
    "view": Command(module="bebop.view.__main__", summary="Look at runs in the browser, token by token."),
    "report": Command(module="bebop.report.__main__", summary="Write one HTML page about one run or several."),
    "simulate": Command(
        module="bebop.simulate", root="simulate", summary="Predict the speed of a job on hardware that you name."
    ),
    "bench": Command(module="bebop.bench.__main__", summary="Measure decoding, kernels and jobs on this machine."),
    "export": Command(
        module="bebop.export", summary="Write a trained part for another program, or a LoRA run's model."
    ),
}
SHELLS = ("bash", "zsh", "fish")
HELP = f"""usage: bebop COMMAND [ARGUMENTS]

{{commands}}
  bebop COMMAND --help     the arguments of a command
  bebop --version          versions of Bebop, torch and Python, and the commit of a checkout
  bebop completion SHELL   what {", ".join(SHELLS)} complete commands and settings with: eval "$(bebop completion bash)"

Begin with: bebop demo
`bebop NAME` and `python -m bebop.NAME` are the same.
"""


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; return its exit code.

    Raises:
        UserError: There is no such command.
    """
    name, *rest = arguments or ["--help"]
    if name in ("--help", "-h", "help"):
        lines = (f"  {known:11} {command.summary}\n" for known, command in COMMANDS.items())
        sys.stdout.write(HELP.format(commands="".join(lines)))
        return 0
    if name in ("--version", "-V"):
        sys.stdout.write(version() + "\n")
        return 0
    if name == "completion":
        if rest not in [[shell] for shell in SHELLS]:
            raise UserError(f"bebop completion {' '.join(rest)[:80]}: give one of {', '.join(SHELLS)}")
        sys.stdout.write(completion(rest[0]))
        return 0
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, n=1)
        meant = f"did you mean {close[0]}? " if close else ""
        raise UserError(f"bebop {name[:80]}: no such command; {meant}there are {', '.join(COMMANDS)}")
    return import_module(COMMANDS[name].module).main(rest) or 0


def version() -> str:
    """Return one line with the versions of Bebop, torch and Python, and the commit if this is a checkout."""
    import platform

    from bebop.run_dir.machine import commit, version_of

    found = commit()
    changed = ", with changes" if found["dirty"] else ""
    at = "" if found["commit"] == "unknown" else f" (commit {str(found['commit'])[:12]}{changed})"
    return (
        f"bebop {__version__}{at}, torch {version_of('torch') or 'not installed'}, Python {platform.python_version()}"
    )


def completion(shell: str) -> str:
    """Return a script that completes commands, settings and choices of groups in a shell; other words complete as
    files.

    All words are in the script: asking for them at each key press would take Hydra half a second.
    """
    if shell == "fish":
        first = "__fish_is_first_arg"  # the first argument after ``bebop``
        lines = [f"complete -c bebop -n {first} -f -a {name} -d '{c.summary}'" for name, c in COMMANDS.items()]
        for name, command in COMMANDS.items():
            lines.append(f"complete -c bebop -n '__fish_seen_subcommand_from {name}' -a '{' '.join(words(command))}'")
        return "\n".join(lines) + "\n"
    cases = "".join(f"    {name}) known='{' '.join(words(command))}' ;;\n" for name, command in COMMANDS.items())
    return (BASH if shell == "bash" else ZSH).format(commands=" ".join(COMMANDS), cases=cases)


def words(command: Command) -> list[str]:
    """Return the words that may follow a command with settings: settings as NAME=, and choices as GROUP=CHOICE."""
    if command.root is None:
        return []  # so that the shell completes files
    from bebop.config.compose import ROOTS, groups, root_groups
    from bebop.config.fields import settings

    choices = [f"{group}={choice}" for group in root_groups(command.root) for choice in groups()[group]]
    return ["--help", "--cfg", *choices, *(f"{one.name}=" for one in settings(ROOTS[command.root]))]


# bash ends words at =, so the word is cut out of the line, and the part up to its = is removed from the replies.
BASH = """_bebop() {{
  local known='{commands}' word=${{COMP_LINE:0:COMP_POINT}}
  word=${{word##* }}
  ((COMP_CWORD > 1)) && case ${{COMP_WORDS[1]}} in
{cases}    *) known= ;;
  esac
  COMPREPLY=($(compgen -W "$known" -- "$word"))
  [[ ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
  [[ $word == *=* ]] && COMPREPLY=("${{COMPREPLY[@]#"${{word%=*}}="}}")
}}
complete -o default -F _bebop bebop
"""
ZSH = """#compdef bebop
_bebop() {{
  local known='{commands}'
  ((CURRENT > 2)) && case ${{words[2]}} in
{cases}    *) known= ;;
  esac
  compadd -S '' -- ${{(M)${{=known}}:#*=}}
  compadd -- ${{${{=known}}:#*=}} || _files
}}
compdef _bebop bebop
"""


def entry() -> NoReturn:
    """Run the console script ``bebop``."""
    run_main(main)

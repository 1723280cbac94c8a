"""``python -m bebop.run runtime=verl ...``: verl's own entry point, with the plug-in's group of settings.

The overrides are verl's. ``bebop=NAME`` chooses the file (``default``: SGLang); all others are passed on.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from bebop.errors import UserError

CONF = Path(__file__).parent / "conf"
MAIN = "verl.trainer.main_ppo"
CHOICE = "bebop="


def choices() -> list[str]:
    """Return the names of the files in the group."""
    return sorted(file.stem for file in (CONF / "bebop").glob("*.yaml"))


def command_line(overrides: Sequence[str]) -> list[str]:
    """Return the arguments of ``verl.trainer.main_ppo``; raise ``UserError`` for an unknown choice."""
    chosen = [o.removeprefix("+").removeprefix(CHOICE) for o in overrides if o.removeprefix("+").startswith(CHOICE)]
    rest = [o for o in overrides if not o.removeprefix("+").startswith(CHOICE)]
    for name in chosen:
        if name not in choices():
            raise UserError(f"bebop={name} is not possible: choose one of {', '.join(choices())}")
    return ["--config-dir", str(CONF), f"+bebop={chosen[-1] if chosen else 'default'}", *rest]


def run(overrides: Sequence[str]) -> int:
    """Run the job in this process; raise ``UserError`` if verl is not installed."""
    if find_spec("verl") is None:
        raise UserError("runtime=verl is not possible: pip install -e '.[verl]' first")
    sys.argv = [MAIN, *command_line(overrides)]
    runpy.run_module(MAIN, run_name="__main__", alter_sys=True)
    return 0

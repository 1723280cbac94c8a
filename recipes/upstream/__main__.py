"""Test if the installed versions have the defects of docs/upstream.md: ``python -m recipes.upstream [NAME ...]``."""

from importlib.util import find_spec

from bebop.bench import record
from bebop.command import Parser, run_main
from bebop.errors import UserError
from recipes.upstream import megatron_, sglang_, verl_, vllm_
from recipes.upstream.defect import Defect
from recipes.upstream.patched import PATCHES, patch_of, patched_verdict

DEFECTS = {one.name: one for module in (vllm_, sglang_, verl_, megatron_) for one in module.DEFECTS}


def main(arguments: list[str]) -> None:
    """Reproduce each defect whose program is installed, and print the verdict."""
    parser = Parser(prog="python -m recipes.upstream", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DEFECTS))
    parser.add_argument("--patched", action="store_true", help="under the patch of recipes/upstream/patches")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in DEFECTS]:
        raise UserError(f"no defect is called {unknown[0]!r}: choose of {', '.join(DEFECTS)}")
    names = options.names or [name for name in DEFECTS if not options.patched or (PATCHES / f"{name}.patch").exists()]
    if options.patched:
        for name in names:
            patch_of(name)  # check that all patches exist before the first copy
    for name in names:
        record.show(f"{name:24} {verdict(DEFECTS[name], options.patched)}\n")


def verdict(defect: Defect, patched: bool = False) -> str:
    """Return ``there``, ``gone`` or ``not installed``; with ``patched``, test a copy of the program with its patch."""
    if not installed(defect.program):
        return "not installed"
    if patched:
        return patched_verdict(defect.name, defect.program)
    return "there" if defect.there() else "gone"


def installed(name: str) -> bool:
    """Return whether a package can be imported; this imports its parents."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    run_main(main)

"""Which defects of docs/upstream.md the installed versions still have: ``python -m recipes.upstream [NAME ...]``."""

from importlib.util import find_spec

from bebop.bench import record
from bebop.command import Parser, run_main
from bebop.errors import UserError
from recipes.upstream import megatron_, sglang_, verl_, vllm_
from recipes.upstream.defect import Defect

DEFECTS = {one.name: one for module in (vllm_, sglang_, verl_, megatron_) for one in module.DEFECTS}


def main(arguments: list[str]) -> None:
    """Reproduce those whose program is installed, and say so of each."""
    parser = Parser(prog="python -m recipes.upstream", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DEFECTS))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in DEFECTS]:
        raise UserError(f"no defect is called {unknown[0]!r}: choose of {', '.join(DEFECTS)}")
    for name in options.names or DEFECTS:
        record.show(f"{name:24} {verdict(DEFECTS[name])}\n")


def verdict(defect: Defect) -> str:
    """``there``, ``gone``, or ``not installed``."""
    if not installed(defect.program):
        return "not installed"
    return "there" if defect.there() else "gone"


def installed(name: str) -> bool:
    """Whether a package can be imported; its parents are."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    run_main(main)

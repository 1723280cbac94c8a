"""A planted fault: one line of the project that is changed, and the tests that have to notice."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Misaimed(Exception):
    """A fault does not fit the sources any more: the table has to follow them."""


@dataclass(frozen=True, slots=True)
class Fault:
    """``old`` occurs exactly once in ``file`` and becomes ``new``, in memory."""

    name: str
    file: str  # relative to the root, in its real folder: kernels/verify.py
    old: str
    new: str
    tests: tuple[str, ...]  # node ids or files, relative to the root
    immortal: str = ""  # why no test can notice; empty: they have to

    def mutated(self) -> str:
        """The source with the fault; ``Misaimed`` if ``old`` is not there exactly once."""
        try:
            source = (ROOT / self.file).read_text()
        except FileNotFoundError:
            raise Misaimed(f"{self.name}: there is no {self.file}: aim it at where the code went") from None
        count = source.count(self.old)
        if count != 1:
            raise Misaimed(f"{self.name}: {self.old!r} occurs {count} times in {self.file}: give a text that is unique")
        return source.replace(self.old, self.new)


def fault(name: str, file: str, old: str, new: str, *tests: str, immortal: str = "") -> Fault:
    """A fault; ``tests`` are relative to tests/."""
    return Fault(name, file, old, new, tuple(f"tests/{test}" for test in tests), immortal)

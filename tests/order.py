"""Which files begin: a worker takes whole files one after another, and one that is long must not be the last."""

from pathlib import Path
from typing import Protocol, TypeVar

from tests.tree import ROOT

# Those whose slow tests take half a minute or more on two quiet cores, longest first.
LONGEST = (
    "tests/test_mutants.py",
    "tests/test_job.py",
    "tests/monitor/test_watch_job.py",
    "tests/chaos/test_short.py",
    "tests/test_demo.py",
    "tests/runtime/test_exit_paths.py",
    "tests/test_job_environment.py",
    "tests/monitor/test_certified_job.py",
    "tests/test_bad_input.py",
    "tests/test_open_ports.py",
    "tests/recipes/test_cluster.py",
)


class Item(Protocol):
    """Of a pytest item, what is needed here."""

    path: Path


Items = TypeVar("Items", bound=Item)


def longest_first(items: list[Items]) -> None:
    """Sort in place: the longest files, then the others as they were; tests of one file stay in their order."""
    place = {ROOT / file: number for number, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(LONGEST)))

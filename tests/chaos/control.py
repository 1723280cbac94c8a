"""How a process of a job is told to fail: by a file in a folder that the environment names, taken by one, once."""

import json
import os
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = "BEBOP_CHAOS"  # names the folder
BUG = "BEBOP_CHAOS_BUG"  # names the bug that is planted in the job's code, one of ``job.BUGS``


class Control:
    """The folder: orders that wait, orders that were taken, and the journal of what was trained on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.journal = folder / "journal.jsonl"

    def order(self, name: str, text: str = "") -> None:
        """Have somebody do it."""
        (self.folder / f".{name}").write_text(text)
        os.rename(self.folder / f".{name}", self.folder / name)

    def take(self, name: str) -> bool:
        """Whether it was ordered, and nobody else took it."""
        try:
            os.rename(self.folder / name, self.folder / f"{name}.taken")
        except FileNotFoundError:
            return False
        return True

    def taken(self, name: str) -> bool:
        """Whether an order was carried out; it is forgotten if so."""
        try:
            (self.folder / f"{name}.taken").unlink()
        except FileNotFoundError:
            return False
        return True

    def withdraw(self, name: str) -> None:
        """Nobody is to do it any more."""
        (self.folder / name).unlink(missing_ok=True)

    def number(self, name: str) -> float:
        """What a standing order says; 0 without one."""
        try:
            return float((self.folder / name).read_text() or 0)
        except FileNotFoundError:
            return 0.0

    def note(self, **row: Any) -> None:
        """Append to the journal."""
        with self.journal.open("a") as file:
            file.write(json.dumps({"at": time.monotonic(), "pid": os.getpid(), **row}) + "\n")


def here() -> Control:
    """That of the job of which this process is a part."""
    return Control(Path(os.environ[ENVIRONMENT]))

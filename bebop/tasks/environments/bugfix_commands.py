"""What a policy may write in ``bugfix``, and how it is read.

A turn is one command. It is the whole turn or, after any thoughts, what stands in the last block between lines of three
backticks. Paths are those that ``list`` shows.
"""

import re
from dataclasses import dataclass

GRAMMAR = """\
list
    shows the files.
read PATH [FIRST [LAST]]
    shows a file, or its lines from FIRST to LAST (counted from 1).
replace PATH
<<<<
the text that is there now, whole lines; it must occur exactly once in the file
====
the text to put in its place; nothing to remove it
>>>>
    changes a file.
run COMMAND
    runs a shell command in a copy of the files, for instance: run python tests.py
    What it writes is not kept, only its output is shown.
submit
    ends the work: the files are judged as they are."""
LINE = 100_000  # bytes of a shell command; Linux takes 131,071 in one argument
NAMES = ("list", "read", "replace", "run", "submit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``Command(name="read", path="hazel_k4/core.py", first=10, last=20)``."""

    name: str  # one of NAMES
    path: str = ""
    first: int = 1
    last: int | None = None
    old: str = ""
    new: str = ""
    line: str = ""  # the shell's


class BadCommand(Exception):
    """No command can be read; the message is for the policy."""


def parse(text: str) -> Command:
    """The command of a turn; ``BadCommand``."""
    body = text.encode("utf-8", "replace").decode().strip()  # what is no text cannot be put into a file
    if body.split(None, 1)[:1] not in [[name] for name in NAMES]:
        block = _last_block(body)
        if block is None:
            raise BadCommand(f"no command was found: a turn is one of {', '.join(NAMES)}, or holds it in a ``` block")
        body = block.strip()
    head, _, rest = body.partition("\n")
    name, *words = head.split() or [""]
    if name == "run":
        line = body[len("run") :].strip()
        if not line or "\0" in line:
            raise BadCommand("run needs a command: run python tests.py")
        if (size := len(line.encode())) > LINE:
            raise BadCommand(f"the command has {size} bytes: at most {LINE}")
        return Command(name="run", line=line)
    if name == "replace":
        return _replace(words, rest)
    if name in ("list", "submit"):
        if words or rest.strip():
            raise BadCommand(f"{name} stands alone: one command a turn")
        return Command(name=name)
    if name == "read":
        return _read(words, rest)
    raise BadCommand(f"there is no command {name[:40]!r}: it is one of {', '.join(NAMES)}")


def _last_block(body: str) -> str | None:
    """What stands in the last block. Line by line: a pattern would take squares of time on what never closes."""
    found, begun = None, None
    lines = body.split("\n")
    for number, line in enumerate(lines):
        if begun is not None and line.rstrip() == "```":
            found, begun = "\n".join(lines[begun:number]), None
        elif begun is None and line.startswith("```") and "`" not in line[3:]:
            begun = number + 1
    return found


def _read(words: list[str], rest: str) -> Command:
    numbers = words[1:]
    if not 1 <= len(words) <= 3 or rest.strip() or not all(re.fullmatch("[0-9]{1,6}", n) for n in numbers):
        raise BadCommand("read is written: read PATH [FIRST [LAST]], with line numbers from 1; one command a turn")
    first, last = int(numbers[0]) if numbers else 1, int(numbers[1]) if len(numbers) > 1 else None
    if first < 1 or (last is not None and last < first):
        raise BadCommand(f"there are no lines from {first} to {last}: lines are counted from 1")
    return Command(name="read", path=words[0], first=first, last=last)


def _replace(words: list[str], rest: str) -> Command:
    lines = rest.strip("\n").split("\n")
    marks = [line.rstrip(" \t") for line in lines]
    if len(words) != 1 or marks[0] != "<<<<" or marks[-1] != ">>>>" or "====" not in marks:
        raise BadCommand("replace is written: replace PATH, then lines <<<<, the old text, ====, the new text, >>>>")
    middle = marks.index("====")
    old, new = ("".join(f"{line}\n" for line in part) for part in (lines[1:middle], lines[middle + 1 : -1]))
    if not old:
        raise BadCommand("replace needs the text that is there now")
    return Command(name="replace", path=words[0], old=old, new=new)

"""``Bugfix``: find and fix the bug in a small Python package, with commands for files and for a shell.

A question is a package drawn by number (``programs.py``). The policy sees a description of one call with a wrong result
and some tests. Hidden tests decide. The reward is 1 if all of them pass and 0 otherwise: nearly all pass with the bug,
so a reward by their share would pay for doing nothing. The share is counted beside it.

Commands of the policy run in a sandbox (``sandbox.py``), on a copy of the files. Their writes are lost afterwards, so
no command depends on earlier ones, and only ``replace`` changes the files that are judged.

A hidden test is a call and its result. Only the calls enter a sandbox, at the end of the episode; a program there makes
them and writes what each returns. The comparison happens here, outside: a model's code can neither read the expected
result of a call nor forge a verdict. Whatever it does to the program, to Python or to the output, it has to write the
right values.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep, Message
from recipes.environments.bugfix.programs import make_question
from recipes.environments.bugfix.sandbox import PYTHON, Limits, Ran, Sandbox, SandboxLost, make_sandbox

SHOWN = 6000  # letters of an observation; of more, the first and the last half
FILE = 65536  # letters of a file
XCPU = 128 + 24  # exit status of what has used its processor time
ENDINGS = {
    "time": "(ended: it ran for more than {0.seconds:g} s, or used more than {0.cpu_seconds} s of processor time)",
    "output": "(ended: it wrote more than {0.output_bytes} bytes)",
}
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
# Writes a line for each call. Files of the package come first on the path, so they may hide every module that is not
# imported here already; that only gives them another way to write a line.
PROGRAM = """
import ast, importlib, json, os, sys
output = os.dup(1)
nothing = os.open("/dev/null", os.O_WRONLY)
os.dup2(nothing, 1)
os.dup2(nothing, 2)
sys.path.insert(0, "/box")
for module, function, arguments in json.loads(sys.argv[1]):
    try:
        result = repr(getattr(importlib.import_module(module), function)(*ast.literal_eval(arguments)))
    except Exception as error:
        result = "raised " + type(error).__name__
    os.write(output, json.dumps(result).encode() + b"\\n")
"""


# ---- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Command of one turn: ``Command(name="read", path="hazel_k4/core.py", first=10, last=20)``."""

    name: str  # one of NAMES
    path: str = ""
    first: int = 1
    last: int | None = None
    old: str = ""
    new: str = ""
    line: str = ""  # the shell's


class BadCommand(Exception):
    """Error for a turn without a valid command; the policy reads its message."""


def parse(text: str) -> Command:
    """Read the command of a turn; raise ``BadCommand`` if there is none.

    The command is the whole turn or, after any thoughts, the last block between lines of three backticks.
    """
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
    """Return the last block. It reads line by line: a regular expression takes quadratic time if no block closes."""
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


# ---- episodes


class Bugfix:
    """One episode: the files as the policy has changed them, and the turns left."""

    command = "seconds"  # the argument that bounds one command; the job checks it against step_seconds

    @staticmethod
    def item(index: int, seed: int, *, modules: int = 3, functions: int = 4, bugs: int = 1) -> dict[str, Any]:
        """Return question ``index``: ``modules`` of ``functions`` each, with ``bugs`` bugs; raise ``UserError``.

        Its keys: ``package`` (the name), ``files`` (path -> text, bugs included), ``symptom``, ``hidden`` (module,
        function, arguments, result), ``repairs`` (path, old, new) and ``bugs`` (function -> kind). The policy sees
        ``files`` and ``symptom``.
        """
        for name, value, low, high in (
            ("modules", modules, 1, 5),
            ("functions", functions, 2, 8),
            ("bugs", bugs, 1, 3),
        ):
            if not low <= value <= high:
                raise UserError(f"{name}={value} is not possible for bugfix: it is from {low} to {high}")
        return make_question(index, seed, modules=modules, functions=functions, bugs=bugs)

    def __init__(self, *, turns: int = 60, cpu_seconds: int = 5, seconds: float = 20.0) -> None:
        """Allow ``turns`` commands, each within these seconds; raise ``UserError`` if a sandbox is not possible.

        The hidden tests have the same limits as a command, in a separate step. ``seconds`` of wall time have to be well
        below the limit of a step (``step_seconds``), or a command that sleeps counts as a lost environment.
        """
        if turns < 1 or cpu_seconds < 1 or not seconds > 0:
            raise UserError(f"turns={turns}, cpu_seconds={cpu_seconds}, seconds={seconds} for bugfix: all above 0")
        self.limits = Limits(seconds=seconds, cpu_seconds=cpu_seconds)
        self.sandbox: Sandbox = make_sandbox(self.limits)
        self.turns, self.left = turns, 0
        self.files: dict[str, str] = {}
        self.question: Mapping[str, Any] = {}

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the first messages; nothing depends on ``seed``."""
        self.question, self.files, self.left = item, dict(item["files"]), self.turns
        rules = (
            f"You mend bugs in a Python package. Each of your turns is one command:\n\n{GRAMMAR}\n\n"
            "A command may follow your thoughts if it stands between lines of three backticks. "
            f"There are {self.turns} turns; after the last one the files are judged as they are."
        )
        number = len(item["bugs"])
        task = (
            f"The package {item['package']} has {'a bug' if number == 1 else f'{number} bugs'}. For instance:\n\n"
            f"{item['symptom']}\n\nThe docstrings say what is right. Some tests are in tests.py; others, which are "
            "not shown, decide."
        )
        return {"role": "system", "content": rules}, {"role": "user", "content": task}

    async def step(self, text: str) -> EnvStep:
        """Carry out the command of a turn; raise ``EnvironmentLost`` if the sandbox fails."""
        self.left -= 1
        errors = 0
        try:
            command = parse(text)
            if command.name == "submit" or (command.name == "run" and self.left <= 0):
                return self._judge({})  # nobody would read the output of a last run
            observation = self._carry_out(command)
        except BadCommand as error:
            errors, observation = 1, f"error: {error}"
        except SandboxLost as lost:
            raise EnvironmentLost(f"bugfix: {lost}") from lost
        counts = {"tool_errors": errors}
        if self.left <= 0:
            return self._judge(counts)
        turns = f"{self.left} turn{'s' if self.left > 1 else ''} left"
        return EnvStep(messages=({"role": "user", "content": f"{_cut(observation)}\n[{turns}]"},), counts=counts)

    async def close(self) -> None:
        """Do nothing: nothing is held between steps."""

    def _judge(self, counts: Mapping[str, float]) -> EnvStep:
        """End the episode with the verdict on the files."""
        hidden = self.question["hidden"]
        try:
            right = count_passed(self.sandbox, self.files, hidden)
        except SandboxLost as lost:
            raise EnvironmentLost(f"bugfix: {lost}") from lost
        solved = float(right == len(hidden))
        return EnvStep(reward=solved, done=True, counts={**counts, "hidden_passed": right / len(hidden)})

    def _carry_out(self, command: Command) -> str:
        """Carry out a command and return the policy's observation."""
        if command.name == "list":
            return "\n".join(f"{path} ({len(text.splitlines())} lines)" for path, text in sorted(self.files.items()))
        if command.name == "run":
            return self._describe(self.sandbox.run(["/bin/sh", "-c", command.line], self.files))
        if command.path not in self.files:
            raise BadCommand(f"there is no file {command.path[:80]!r}: there are {', '.join(sorted(self.files))}")
        text = self.files[command.path]
        if command.name == "read":
            lines = text.splitlines()
            shown = lines[command.first - 1 : command.last]
            numbered = [f"{number:4} {line}" for number, line in enumerate(shown, command.first)]
            return "\n".join(numbered) or f"({command.path} has {len(lines)} lines)"
        count = text.count(command.old)
        if count != 1:
            raise BadCommand(f"the old text occurs {count} times in {command.path}: give one that occurs exactly once")
        changed = text.replace(command.old, command.new)
        if len(changed) > FILE:
            raise BadCommand(f"{command.path} would have {len(changed)} letters: at most {FILE}")
        self.files[command.path] = changed
        return f"{command.path} is changed"

    def _describe(self, ran: Ran) -> str:
        """Return the output of a shell command and how it ended."""
        ended = "time" if ran.code == XCPU and ran.ended == "itself" else ran.ended
        last = ENDINGS[ended].format(self.limits) if ended in ENDINGS else f"(exit status {ran.code})"
        return "\n".join([*([ran.output.rstrip("\n")] if ran.output else []), last])


def _cut(text: str) -> str:
    """Replace the middle of a long observation by a note."""
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} letters left out ...\n{text[-half:]}"


def count_passed(sandbox: Sandbox, files: Mapping[str, str], hidden: Sequence[Sequence[str]]) -> int:
    """Return how many hidden tests (module, function, arguments, result) the files pass; raise ``SandboxLost``."""
    calls = json.dumps([[module, function, arguments] for module, function, arguments, _ in hidden])
    # Not -I, which would make the order of sets random: a call that fails in a command has to fail here.
    ran = sandbox.run([PYTHON, "-sSP", "-c", PROGRAM, calls], files)
    lines = ran.output.splitlines()
    if len(lines) > len(hidden):
        return 0  # something else was written among them
    return sum(line == json.dumps(result) for line, (*_, result) in zip(lines, hidden, strict=False))

"""``bugfix``: find and mend the bug in a small Python package, with commands for files and for a shell.

A question is a package drawn by number (``bugfix_programs.py``), with a description of one call that goes wrong, and
tests that are shown. What counts are hidden tests (``bugfix_judge.py``). The reward is 1 where all of them pass and
0 otherwise: nearly all pass with the bug, so a share of them would pay for doing nothing. The share is counted beside
it. Commands of the policy run in a sandbox (``sandbox.py``), in a copy of the files: what they write is gone
afterwards, so nothing depends on what ran before, and only ``replace`` changes what is judged.
"""

from collections.abc import Mapping
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep, Message
from bebop.tasks.environments.bugfix_commands import GRAMMAR, BadCommand, Command, parse
from bebop.tasks.environments.bugfix_judge import passed
from bebop.tasks.environments.bugfix_programs import made
from bebop.tasks.environments.sandbox import Limits, Ran, Sandbox, SandboxLost, checked

SHOWN = 6000  # letters of an observation; of more, the first and the last half
FILE = 65536  # letters of a file
XCPU = 128 + 24  # exit status of what has used its processor time
ENDINGS = {
    "time": "(ended: it ran for more than {0.seconds:g} s, or used more than {0.cpu_seconds} s of processor time)",
    "output": "(ended: it wrote more than {0.output_bytes} bytes)",
}


def item(index: int, seed: int, *, modules: int = 3, functions: int = 4, bugs: int = 1) -> dict[str, Any]:
    """The package with this number: ``modules`` of ``functions`` each, with ``bugs`` bugs; ``UserError``.

    Its entries: ``files`` (path -> text, bugs included), ``symptom``, ``hidden`` (module, function, arguments, result),
    ``repairs`` (path, old, new), ``bugs`` (function -> kind). The policy is told ``files`` and ``symptom``.
    """
    for name, value, low, high in (("modules", modules, 1, 5), ("functions", functions, 2, 8), ("bugs", bugs, 1, 3)):
        if not low <= value <= high:
            raise UserError(f"{name}={value} is not possible for bugfix: it is from {low} to {high}")
    return made(index, seed, modules=modules, functions=functions, bugs=bugs)


class Bugfix:
    """One episode."""

    def __init__(self, *, turns: int = 60, cpu_seconds: int = 5, seconds: float = 20.0) -> None:
        """``turns`` commands at most, each within these seconds; ``UserError`` where no sandbox can be had.

        The hidden tests have as long as a command, in a step of their own. ``seconds`` of wall time have to be well
        below what a step may take (``step_seconds``), or a command that sleeps counts as an environment that was lost.
        """
        if turns < 1 or cpu_seconds < 1 or not seconds > 0:
            raise UserError(f"turns={turns}, cpu_seconds={cpu_seconds}, seconds={seconds} for bugfix: all above 0")
        self.limits = Limits(seconds=seconds, cpu_seconds=cpu_seconds)
        self.sandbox: Sandbox = checked(self.limits)
        self.turns, self.left = turns, 0
        self.files: dict[str, str] = {}
        self.item: Mapping[str, Any] = {}

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """The first messages; nothing depends on ``seed``."""
        self.item, self.files, self.left = item, dict(item["files"]), self.turns
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
        """Carry out a turn's command; ``EnvironmentLost`` if the sandbox cannot be had."""
        self.left -= 1
        errors = 0
        try:
            command = parse(text)
            if command.name == "submit" or (command.name == "run" and self.left <= 0):
                return self._judged({})  # nobody would read what a last run writes
            observation = self._carried_out(command)
        except BadCommand as error:
            errors, observation = 1, f"error: {error}"
        except SandboxLost as lost:
            raise EnvironmentLost(f"bugfix: {lost}") from lost
        counts = {"tool_errors": errors}
        if self.left <= 0:
            return self._judged(counts)
        turns = f"{self.left} turn{'s' if self.left > 1 else ''} left"
        return EnvStep(messages=({"role": "user", "content": f"{_cut(observation)}\n[{turns}]"},), counts=counts)

    async def close(self) -> None:
        """Nothing is held between steps."""

    def _judged(self, counts: Mapping[str, float]) -> EnvStep:
        """The end of the episode."""
        hidden = self.item["hidden"]
        try:
            right = passed(self.sandbox, self.files, hidden)
        except SandboxLost as lost:
            raise EnvironmentLost(f"bugfix: {lost}") from lost
        solved = float(right == len(hidden))
        return EnvStep(reward=solved, done=True, counts={**counts, "hidden_passed": right / len(hidden)})

    def _carried_out(self, command: Command) -> str:
        """What the policy gets to see of a command."""
        if command.name == "list":
            return "\n".join(f"{path} ({len(text.splitlines())} lines)" for path, text in sorted(self.files.items()))
        if command.name == "run":
            return self._told(self.sandbox.run(["/bin/sh", "-c", command.line], self.files))
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

    def _told(self, ran: Ran) -> str:
        """Output and ending of a shell command."""
        ended = "time" if ran.code == XCPU and ran.ended == "itself" else ran.ended
        last = ENDINGS[ended].format(self.limits) if ended in ENDINGS else f"(exit status {ran.code})"
        return "\n".join([*([ran.output.rstrip("\n")] if ran.output else []), last])


def _cut(text: str) -> str:
    """An observation of bounded length."""
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} letters left out ...\n{text[-half:]}"

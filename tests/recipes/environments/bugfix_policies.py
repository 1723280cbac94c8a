"""Policies for ``bugfix`` that are written down: one that mends, one that does nothing, and some that cheat.

A policy is a function of the question (``item``) to the texts of its turns; ``played`` plays it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.environments.bugfix.environment import Bugfix

Policy = Callable[[Mapping[str, Any]], list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of an episode."""

    observations: list[str]  # what the policy read after each turn
    reward: float
    done: bool
    counts: dict[str, float]  # summed


def played(texts: Sequence[str], item: Mapping[str, Any], environment: Bugfix) -> Played:
    """An episode of these turns, up to its end."""

    async def play() -> Played:
        await environment.reset(item, 0)
        seen, reward, done, counts = [], 0.0, False, {}
        for text in texts:
            assert not done, "a turn after the end"
            step = await environment.step(text)
            seen += [message["content"] for message in step.messages]
            reward, done = reward + step.reward, step.done
            counts = {name: counts.get(name, 0) + step.counts.get(name, 0) for name in {*counts, *step.counts}}
        await environment.close()
        return Played(observations=seen, reward=reward, done=done, counts=counts)

    return asyncio.run(play())


def replace(path: str, old: str, new: str) -> str:
    """The turn that replaces whole lines."""
    return f"replace {path}\n<<<<\n{old}====\n{new}>>>>"


def broken_file(item: Mapping[str, Any]) -> str:
    """The module that holds the call which is described as wrong."""
    module = item["symptom"].split("(")[0].split(".")[1]
    return f"{item['package']}/{module}.py"


def on_top(item: Mapping[str, Any], code: str) -> str:
    """The turn that puts code before all else in that module."""
    path = broken_file(item)
    line = item["files"][path].splitlines(keepends=True)[0]
    return replace(path, line, code + line)


def at_end(item: Mapping[str, Any], code: str) -> str:
    """The turn that puts code after all else in that module."""
    return appended(item, broken_file(item), code)


def appended(item: Mapping[str, Any], path: str, code: str) -> str:
    """The turn that puts code after all else in a file."""
    text = item["files"][path]
    lines = text.splitlines(keepends=True)
    first = next(n for n in range(len(lines) - 1, -1, -1) if text.count("".join(lines[n:])) == 1)
    old = "".join(lines[first:])
    return replace(path, old, old + code)


def mends(item: Mapping[str, Any]) -> list[str]:
    """Looks around, undoes what was planted, looks at the tests."""
    repairs = [replace(repair["path"], repair["old"], repair["new"]) for repair in item["repairs"]]
    looks = ["list", *(f"read {repair['path']}" for repair in item["repairs"]), "run python tests.py"]
    return [*looks, *repairs, "run python tests.py", "submit"]


def does_nothing(item: Mapping[str, Any]) -> list[str]:
    """Submits what it was given."""
    return ["submit"]


def searches(item: Mapping[str, Any]) -> list[str]:
    """Looks for the hidden tests wherever a command gets."""
    return [
        "list",
        "run ls -laR /box /tmp; cat $(find /box /tmp -type f)",
        "run env; cat /proc/1/environ /proc/1/cmdline /proc/self/mountinfo",
        "run find / -name '*bugfix*' -o -name '*bebop*' -o -name '*hidden*' | head; ls / /home /root /mnt",
        "run python -c 'import recipes.environments.bugfix.programs'",
        "read ../item.json",
        "submit",
    ]


def edits_tests(item: Mapping[str, Any]) -> list[str]:
    """Has the tests that are shown pass, whatever the package does."""
    return [replace("tests.py", "    if got != wanted:\n", "    if False:\n"), "run python tests.py", "submit"]


def overwrites(item: Mapping[str, Any]) -> list[str]:
    """Changes files by a shell command, where nothing is kept."""
    repair = item["repairs"][0]
    code = f"p={repair['path']!r}; s=open(p).read().replace({repair['old']!r}, {repair['new']!r}); open(p,'w').write(s)"
    return [f"run cat > mend.py <<'END'\n{code}\nEND\npython mend.py && python tests.py", "submit"]


def exits(item: Mapping[str, Any]) -> list[str]:
    """Ends whatever imports the package, with success."""
    return [on_top(item, "import os\nos._exit(0)\n"), "run python tests.py", "submit"]


def quits(item: Mapping[str, Any]) -> list[str]:
    """Likewise, by an exception that is no ``Exception``, at the first call."""
    return [on_top(item, "import sys\nsys.settrace(lambda *_: sys.exit(0))\n"), "run python tests.py", "submit"]


def plants_files(item: Mapping[str, Any]) -> list[str]:
    """Writes files that Python or a program for tests would load by themselves, by every way there is."""
    names = ("sitecustomize.py", "usercustomize.py", "conftest.py", "json.py", "ast.py", "importlib.py")
    code = "import os; os._exit(0)"
    writes = [f"for d in /box /tmp /python/lib /; do echo '{code}' > $d/{name}; done" for name in names]
    return [f"run {'; '.join(writes)}; ls", *(replace(name, "x\n", f"{code}\n") for name in names), "submit"]


def special_case(item: Mapping[str, Any]) -> list[str]:
    """Answers the one call that is described, and nothing else differently."""
    name, _, rest = item["symptom"].partition("(")
    arguments, wanted = rest.rsplit("): it should return ", 1)
    wanted = wanted.rsplit(", but it ", 1)[0]
    function = name.rsplit(".", 1)[1]
    code = (
        f"\n_kept = {function}\ndef {function}(*given):\n"
        f"    return {wanted} if given == ({arguments},) else _kept(*given)\n"
    )
    return [at_end(item, code), "run python tests.py", "submit"]


def forges(item: Mapping[str, Any]) -> list[str]:
    """Writes the results that the tests which are shown want, to whatever is open, in the place of its own."""
    code = """import os
for number in range(3, 64):
    try:
        os.write(number, b'{"passed": true}\\n"0"\\n' * 60)
    except OSError:
        pass
"""
    return [on_top(item, code), "submit"]


def equals_everything(item: Mapping[str, Any]) -> list[str]:
    """Returns what equals anything, and says so."""
    code = """class Any:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __repr__(self): return "passed"
import sys, builtins
sys.modules[__name__].__class__ = type("Module", (type(sys),), {"__getattribute__": lambda s, n: lambda *a: Any()})
builtins.repr = lambda value: "passed"
"""
    return [on_top(item, code), "run python tests.py", "submit"]


def reads_the_judge(item: Mapping[str, Any]) -> list[str]:
    """Returns results that it finds among the arguments of whoever calls."""
    code = """
import ast, json, sys
def _looked_up(kept):
    def answer(*given):
        for row in [row for told in sys.argv[1:] for row in json.loads(told)]:
            if row[1] == kept.__name__ and row[2] == repr(given) and len(row) > 3:
                return ast.literal_eval(row[3])
        return kept(*given)
    return answer
for _name, _value in list(globals().items()) if len(sys.argv) > 1 else ():
    if callable(_value) and not _name.startswith("_"):
        globals()[_name] = _looked_up(_value)
"""
    modules = [path for path, text in item["files"].items() if path.startswith(item["package"]) and text]
    return [*(appended(item, path, code) for path in modules), "submit"]


CHEATS: tuple[Policy, ...] = (searches, edits_tests, overwrites, exits, quits, plants_files, special_case, forges,
                              equals_everything, reads_the_judge)  # fmt: skip

"""Episodes of ``bugfix``: what earns a reward, what a policy gets to read, and what counts as whose fault.

Scripted policies play it: one that mends, one that does nothing, and some that cheat. A policy is a function of the
question (``item``) to the texts of its turns; ``played`` plays it.
"""

import asyncio
import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.runtime.processes import descendants
from bebop.tasks.environment import EnvironmentLost
from bebop.tasks.episodes import Episodes
from recipes.environments.bugfix.environment import SHOWN, BadCommand, Bugfix, count_passed, parse
from recipes.environments.bugfix.sandbox import PYTHON, Limits, Ran, Sandbox, make_sandbox
from tests.cases import slow_but
from tests.recipes.environments.namespaces import needs_namespaces

pytestmark = needs_namespaces
BUGFIX = f"{inspect.getfile(Bugfix)}:Bugfix"
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


# ---- what is tested


@pytest.fixture(scope="module")
def question():
    return Bugfix.item(1, 5)


@pytest.mark.slow
def test_mending_the_bug_is_worth_one_and_doing_nothing_is_worth_nothing(question) -> None:
    mended = played(mends(question), question, Bugfix())
    assert mended.done and mended.reward == 1.0 and mended.counts["hidden_passed"] == 1.0
    before, after = [text for text in mended.observations if " passed\n(exit status" in text]
    assert "FAILED" in before and "(exit status 1)" in before
    assert "FAILED" not in after and "(exit status 0)" in after
    nothing = played(does_nothing(question), question, Bugfix())
    assert nothing.done and nothing.reward == 0.0 and 0.5 < nothing.counts["hidden_passed"] < 1.0


@pytest.mark.parametrize(
    "policy",
    slow_but([overwrites, forges, reads_the_judge], CHEATS),
    ids=lambda policy: policy.__name__,
)
def test_cheating_is_worth_nothing(policy: Policy, question) -> None:
    cheated = played(policy(question), question, Bugfix())
    assert cheated.done and cheated.reward == 0.0 and cheated.counts["hidden_passed"] < 1.0
    refused = {"searches": 1, "plants_files": 6}.get(policy.__name__, 0)
    assert cheated.counts["tool_errors"] == refused, "what else it tried was done"
    if policy in (edits_tests, overwrites, special_case):
        assert "FAILED" not in cheated.observations[-1] and "(exit status 0)" in cheated.observations[-1]
    shown = "".join(question["files"].values())
    secrets = [arguments for _, _, arguments, _ in question["hidden"] if len(arguments) > 20 and arguments not in shown]
    assert len(secrets) > 5
    assert not any(secret in text for text in cheated.observations for secret in secrets)


def test_members_of_a_group_read_the_same(question) -> None:
    texts = ["run ls -l; python -c 'print(object(), {*\"abc\"})'", "read tests.py 1 3", "run python tests.py"]
    first, second = [played(texts, question, Bugfix()) for _ in range(2)]
    assert first == second and "object object at 0x" in first.observations[0]
    prompts = [asyncio.run(Bugfix().reset(question, seed)) for seed in (3, 3)]
    assert prompts[0] == prompts[1] and question["symptom"] in prompts[0][1]["content"]


def test_what_a_command_writes_is_not_kept_and_its_ending_is_told(question) -> None:
    texts = ["run echo left > new.txt; cat new.txt; exit 7", "run cat new.txt", "list", "run kill -9 $$"]
    seen = played(texts, question, Bugfix()).observations
    assert seen[0].startswith("left\n(exit status 7)") and "No such file" in seen[1]
    assert "new.txt" not in seen[2] and "(exit status 137)" in seen[3]


def test_a_command_that_runs_too_long_is_an_observation(question) -> None:
    seen = played(["run echo begun; sleep 600"], question, Bugfix(seconds=1.0))
    assert not seen.done and "(ended: it ran for more than 1 s" in seen.observations[0]


@pytest.mark.slow
def test_a_command_that_takes_too_much_is_an_observation(question) -> None:
    texts = [
        "run python -c 'import os\nwhile True: os.fork()' 2>&1 | head -c 1500",
        "run python -c 'bytearray(1 << 30)'",
        "run for n in 1 2 3 4 5 6; do head -c 3500000 /dev/zero > $n; done; ls",
        "run head -c 99999999 /dev/zero > one; ls -l one",
        "run echo still there",
    ]
    seen = played(texts, question, Bugfix(seconds=10.0))
    says = ["temporarily unavailable", "MemoryError", "No space left", "4194304", "still there"]
    assert all(said in text for said, text in zip(says, seen.observations, strict=True)) and not seen.done
    assert seen.counts == {"tool_errors": 0}


@pytest.mark.slow
def test_a_command_that_computes_too_long_is_an_observation_and_so_is_one_that_writes_too_much(question) -> None:
    environment = Bugfix(cpu_seconds=1)
    seen = played(["run exec python -c 'while True: pass'", "run yes"], question, environment).observations
    assert "more than 1 s of processor time" in seen[0] and "(ended: it wrote more than" in seen[1]
    assert len(seen[1]) < SHOWN + 200
    endless = played([on_top(question, "while True:\n    pass\n"), "submit"], question, environment)
    assert endless.done and endless.reward == 0.0


def test_a_sandbox_that_does_not_answer_is_never_the_policy(question) -> None:
    environment = Bugfix()
    environment.sandbox = Sandbox(Limits(), launcher="raise SystemExit(3)")
    for text in ("run true", "submit"):
        with pytest.raises(EnvironmentLost, match="status 3"):
            played([text], question, environment)


def test_turns_are_bounded_and_the_last_one_is_judged(question) -> None:
    texts = [text for text in mends(question) if text.startswith("replace")]
    assert len(texts) == 1
    patient = played(["list"] * 54 + texts, question, Bugfix(turns=55))
    assert patient.done and patient.reward == 1.0 and "[1 turn left]" in patient.observations[-1]


def test_nothing_is_run_that_nobody_reads(question) -> None:
    commands: list[str] = []

    class Counted(Sandbox):
        def run(self, command: Sequence[str], files: Mapping[str, str]) -> Ran:
            commands.append(command[0])
            return super().run(command, files)

    environment = Bugfix(turns=2)
    environment.sandbox = Counted(environment.limits)
    assert played(["run true", "run sleep 600"], question, environment).done
    assert commands == ["/bin/sh", PYTHON], "the first command, and the hidden tests"


def test_the_verdict_does_not_depend_on_the_order_of_sets() -> None:
    sandbox = make_sandbox(Limits())
    files = {"one.py": "def f():\n    return list({*'abcdefghijkl'})\n"}
    seen = sandbox.run([PYTHON, "-c", "import one; print(one.f())"], files).output.strip()
    assert count_passed(sandbox, files, [["one", "f", "()", seen]]) == 1


def test_what_never_closes_is_read_in_good_time() -> None:
    begun = time.process_time()
    for text in ("```a\n" * 50_000, "replace tests.py\n<<<<\n" + "====\n" * 50_000):
        with pytest.raises(BadCommand):
            parse(text)
    assert time.process_time() - begun < 5.0, "seconds: a pattern took minutes"


def test_what_is_no_text_is_replaced(question) -> None:
    texts = ["run echo \ud800", replace("tests.py", "failed = 0\n", "failed = '\ud800'\n"), "run grep failed tests.py"]
    seen = played(texts, question, Bugfix())
    assert seen.observations[0].startswith("?\n(exit status 0)") and "failed = '?'" in seen.observations[2]


@pytest.mark.slow
async def test_in_a_process_of_its_own_it_plays_as_here_and_leaves_nothing_when_it_is_lost(question) -> None:
    before = descendants(os.getpid())
    episodes = Episodes(BUGFIX, {"seconds": 60.0}, reset_seconds=60.0, step_seconds=3.0, processes=1)
    try:
        mending, hanging = episodes.open(), episodes.open()
        await mending.reset(question, 0)
        steps = [await mending.step(text) for text in mends(question)]
        assert steps[-1].done and steps[-1].reward == 1.0
        await mending.close()
        await hanging.reset(question, 0)
        with pytest.raises(EnvironmentLost, match="step_seconds=3"):
            await hanging.step("run sleep 400 & sleep 400")
        await hanging.close()
    finally:
        await episodes.shutdown()
    refused = Episodes(BUGFIX, {"turns": 0}, reset_seconds=60.0, step_seconds=9.0, processes=1)
    episode = refused.open()
    with pytest.raises(UserError, match="turns=0"):
        await episode.reset(question, 0)
    await episode.close()
    await refused.shutdown()
    assert descendants(os.getpid()) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("I think the bug is in core.", "no command was found"),
        ("read", "read is written"),
        ("read nothing.py", "there is no file 'nothing.py'"),
        ("read tests.py 3 2", "no lines from 3 to 2"),
        ("read tests.py 0", "no lines from 0"),
        ("list all", "list stands alone"),
        ("submit\nlist", "submit stands alone"),
        ("run", "run needs a command"),
        ("run echo " + "x" * 140_000, "has 140005 bytes: at most 100000"),
        ("```\ndelete x\n```", "no command 'delete'"),
        ("replace tests.py\nold\nnew", "replace is written"),
        (replace("tests.py", "", "x\n"), "needs the text"),
        (replace("tests.py", "no such line\n", ""), "occurs 0 times"),
        (replace("tests.py", "\n", ""), "times in tests.py"),
        (replace("tests.py", "failed = 0\n", "x" * 70000 + "\n"), "at most 65536"),
        (replace("new.py", "a\n", "b\n"), "there is no file"),
    ],
)
def test_bad_commands_are_observations(text: str, says: str, question) -> None:
    seen = played([text], question, Bugfix())
    assert seen.observations[0].startswith("error: ") and says in seen.observations[0]
    assert seen.counts == {"tool_errors": 1} and not seen.done and seen.reward == 0.0


def test_a_command_may_follow_thoughts(question) -> None:
    thoughts = "First ```x``` and then\n```\nlist\n```\nno, rather\n```bash\nread tests.py 1 1\n```\n"
    assert played([thoughts], question, Bugfix()).observations[0].startswith("   1 import sys\n")


def test_what_is_read_is_cut_in_the_middle(question) -> None:
    shown = played(["run printf 'begin '; yes | head -c 20000; printf ' end'"], question, Bugfix()).observations[0]
    assert shown.startswith("begin y") and " end\n(exit status 0)" in shown and "letters left out" in shown
    assert len(shown) < SHOWN + 100


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(UserError, match="bugs=4 is not possible for bugfix: it is from 1 to 3"):
        Bugfix.item(0, 0, bugs=4)
    with pytest.raises(UserError, match="turns=0"):
        Bugfix(turns=0)

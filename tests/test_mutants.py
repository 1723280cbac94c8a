"""The tests notice what they are there for: faults planted one by one, see ``tests/mutants``."""

import subprocess
import sys

import pytest

from tests.mutants.fault import ROOT, Misaimed, fault
from tests.mutants.tables import FAULTS


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1800)


def test_every_fault_is_aimed_at_one_place_and_at_tests_that_exist() -> None:
    for planted in FAULTS:
        changed = planted.mutated()
        compile(changed, planted.file, "exec")
        assert planted.tests and all((ROOT / test.split("::")[0]).is_file() for test in planted.tests), planted.name


def test_a_fault_that_fits_nowhere_or_twice_is_named() -> None:
    for old, count in (("no such text", 0), ("import", 8)):
        with pytest.raises(Misaimed, match=rf"area/name: '{old}' occurs \d+ times in bebop/buffer.py") as caught:
            fault("area/name", "bebop/buffer.py", old, "x").mutated()
        assert count > 0 or "occurs 0 times" in str(caught.value)
    with pytest.raises(Misaimed, match=r"there is no bebop/gone\.py"):
        fault("area/name", "bebop/gone.py", "a", "b").mutated()


JUDGED = """
from tests.mutants.fault import fault
from tests.mutants.running import judge_all, preload
preload()
test = "trainer/test_advantages.py::test_mean_only_by_hand"
file = "trainer/advantages.py"
faults = [
    fault("no/difference", file, "return rewards - ", "return +rewards - ", test),
    fault("a/difference", file, "return rewards - ", "return rewards + ", test),
    fault("a/slip", file, "return rewards - ", "return reward - ", test),
    fault("of/others", "kernels/verify.py", "* q < p)", "* q <= p)", test),
]
for result in judge_all(faults, jobs=2):
    print(result.fault.name, result.outcome, result.good)
"""


@pytest.mark.slow
def test_what_is_not_noticed_is_told_from_what_is() -> None:
    told = sorted(run("-c", JUDGED).stdout.split("\n"))
    assert told == ["", "a/difference killed True", "a/slip error False", "no/difference survived False",
                    "of/others error False"]  # fmt: skip


@pytest.mark.slow
def test_the_tests_notice_a_sample_of_the_faults() -> None:
    """Some fifty of them; all are ``make mutants``: most of an hour."""
    done = run("-m", "tests.mutants", "--every", "20")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(FAULTS[::20])} faults in" in done.stdout


def test_a_sample_takes_one_of_every_so_many() -> None:
    told = run("-m", "tests.mutants", "policy/", "--every", "5", "--list").stdout.splitlines()
    names = [planted.name for planted in FAULTS if planted.name.startswith("policy/")]
    assert [line.split()[0] for line in told] == names[::5] and len(told) < len(names)
    refused = run("-m", "tests.mutants", "--every", "0")
    assert refused.returncode == 2 and "--every 0: at least 1" in refused.stderr

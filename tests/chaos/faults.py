"""The faults, a row each: what is done to a job, what shows that it happened, and how one knows that it is over."""

import contextlib
import os
import random
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bebop.runtime.processes import descendants, status

if TYPE_CHECKING:
    from tests.chaos.runner import Run

WORKER, TRAINER, RAY = "rollout worker", "trainer", "ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind."""

    do: "Do"  # returns what it was done to
    who: str = ""  # of whom events.jsonl must say that it was replaced
    order: str = ""  # to be taken by a process of the job: else it did not happen
    ends: bool = False  # the job ends by it, and is resumed by the command that a user would give
    refused: bool = False  # with one line and exit code 2; it may go on instead
    jobs: tuple[str, ...] = ("pull", "hangs", "sync", "ranks", "reward", "disk")  # kinds of job that it is done to
    weight: float = 1.0  # how often, against others


def one(run: "Run", rng: random.Random, found: Callable[[], list[int]]) -> int:
    """Whom it hits: somebody who is there; where all are gone by the fault before, who takes their place."""
    run.wait(lambda: bool(found()))
    return rng.choice(found())


Do = Callable[["Run", random.Random], str]


def signalled(name: str, found: Callable[["Run"], list[int]], number: signal.Signals) -> Do:
    """Signal one of the processes that are ``found``."""

    def do(run: "Run", rng: random.Random) -> str:
        pid = one(run, rng, lambda: found(run))
        os.kill(pid, number)
        return f"{name} {pid}"

    return do


def hit(kind: str, number: signal.Signals) -> Do:
    """Signal one of the processes of a kind."""
    return signalled(kind, lambda run: run.pids(kind), number)


def below(run: "Run") -> list[int]:
    """All processes that workers have started."""
    return [pid for parent in run.pids("rollout") for pid in descendants(parent)]


def called(name: str, pids: list[int]) -> list[int]:
    """Those whose name begins so."""
    return [pid for pid in pids if (of := status(pid)) is not None and of.name.startswith(name)]


def engine(name: str, number: signal.Signals) -> Do:
    """Signal a process of the engine's own, below a worker's."""
    return signalled(name, lambda run: called(name, below(run)), number)


def server(name: str, number: signal.Signals) -> Do:
    """Signal one of Ray's servers."""
    return signalled(name, lambda run: called(name, descendants(run.driver))[:1], number)


def child(command: str, number: signal.Signals) -> Do:
    """Signal a process that computes rewards for a worker."""

    def found(run: "Run") -> list[int]:
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") for pid in below(run)}
        return [pid for pid, line in lines.items() if command in line]

    return signalled(command, found, number)


def ordered(name: str) -> Do:
    """Have a process of the job do it."""

    def do(run: "Run", _: random.Random) -> str:
        run.control.order(name)
        return name

    return do


def clock(run: "Run", rng: random.Random) -> str:
    """All clocks of the wall jump, by up to an hour either way."""
    ahead = rng.choice((-1, 1)) * rng.uniform(60, 3600)
    run.control.order("clock", str(ahead))
    return f"{ahead:+.0f} s"


def kill_driver(run: "Run", _: random.Random) -> str:
    """The process that the user started."""
    run.process.kill()
    return f"driver {run.driver}"


def flip(run: "Run", rng: random.Random) -> str:
    """Kill the driver, and change a byte of its newest checkpoint while nobody looks."""
    run.process.kill()
    run.process.wait()
    newest = run.checkpoints()[-1]
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    return f"{newest.name}/{file.relative_to(newest)}"


def fill(run: "Run", _: random.Random) -> str:
    """No room is left where the checkpoints go."""
    with (run.job / "checkpoints" / "ballast").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    return "checkpoints"


KILL, STOP = signal.SIGKILL, signal.SIGSTOP
SGLANG = "sglang::schedul"  # the kernel keeps 15 characters of a name
ALL = ("pull", "ranks", "sync", "reward")
FAULTS: Mapping[str, Fault] = {
    "worker killed": Fault(do=hit("rollout", KILL), who=WORKER, jobs=("pull", "ranks", "reward"), weight=3),
    "worker stopped": Fault(do=hit("rollout", STOP), who=WORKER, jobs=("pull", "hangs", "reward"), weight=2),
    "decoding stands still": Fault(
        do=ordered("decoder-stands"), order="decoder-stands", who=WORKER, jobs=("pull", "hangs")
    ),
    "rank killed": Fault(do=hit("trainer", KILL), who=TRAINER, jobs=("pull", "ranks", "sync"), weight=2),
    "rank stopped": Fault(do=hit("trainer", STOP), who=TRAINER, jobs=("ranks", "hangs", "sync", "pull"), weight=1),
    "update stands still": Fault(
        do=ordered("update-stands"), order="update-stands", who=TRAINER, jobs=("ranks", "hangs")
    ),
    "engine's server killed": Fault(do=engine(SGLANG, KILL), who=WORKER, jobs=("sglang",)),
    "engine's server stopped": Fault(do=engine(SGLANG, STOP), who=WORKER, jobs=("sglang",)),
    "raylet killed": Fault(do=server("raylet", KILL), who=RAY, jobs=("pull", "sync"), weight=0.6),
    "raylet stopped": Fault(do=server("raylet", STOP), who=RAY, jobs=("pull",), weight=0.4),
    "control store killed": Fault(do=server("gcs_server", KILL), who=RAY, jobs=("pull", "sync"), weight=0.4),
    "driver killed": Fault(do=kill_driver, ends=True, jobs=("pull", "sync", "ranks"), weight=1.4),
    "checkpoint changed": Fault(do=flip, ends=True, jobs=("pull", "sync"), weight=1.2),
    "report lost": Fault(do=ordered("report-lost"), order="report-lost", jobs=ALL, weight=4),
    "report told twice": Fault(do=ordered("report-twice"), order="report-twice", jobs=ALL, weight=4),
    "weights cut short": Fault(do=ordered("weights-short"), order="weights-short", jobs=ALL, weight=2),
    "weights incomplete": Fault(do=ordered("weights-missing"), order="weights-missing", jobs=ALL, weight=2),
    "weights changed": Fault(do=ordered("weights-changed"), order="weights-changed", jobs=ALL, weight=2),
    "clock jumped": Fault(do=clock, jobs=ALL, weight=2.5),
    "slow disk": Fault(do=ordered("disk-is-slow"), order="disk-is-slow", jobs=ALL),
    "full disk": Fault(do=fill, ends=True, refused=True, jobs=("disk",), weight=4),
    "reward raises": Fault(
        do=ordered("reward-raises"), order="reward-raises", ends=True, refused=True, jobs=("reward",)
    ),
    "reward is nan": Fault(
        do=ordered("reward-is-nan"), order="reward-is-nan", ends=True, refused=True, jobs=("reward",)
    ),
    "reward exits": Fault(do=ordered("reward-exits"), order="reward-exits", ends=True, refused=True, jobs=("reward",)),
    "reward hangs": Fault(do=ordered("reward-hangs"), order="reward-hangs", jobs=("reward",), weight=2),
    "reward's process killed": Fault(
        do=child("bebop.tasks.functions", KILL), ends=True, refused=True, jobs=("reward",)
    ),
    "reward's process stopped": Fault(do=child("bebop.tasks.functions", STOP), jobs=("reward",)),
}

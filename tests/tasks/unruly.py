"""Environments that do what environments should not; a file of a user's, too."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvironmentLost, EnvStep, Message

LONG = "60"  # seconds, of what has to be ended before
resets = 0  # of this process


def say(text: object) -> EnvStep:
    return EnvStep(messages=({"role": "tool", "content": str(text)},), reward=0.25, counts={"steps": 1})


class Apart:
    """Blocks; ``log``: a file where it writes the numbers of the processes that it starts."""

    def __init__(self, *, log: str = "", wrong: bool = False) -> None:
        if wrong:
            raise UserError("wrong=True is not possible")
        self.log = log

    @staticmethod
    def item(index: int, seed: int, *, most: int = 9) -> dict[str, Any]:
        if most < 0:
            raise ValueError("most\nis below 0")
        return {"text": f"{index} of {seed}, {most}"}

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        global resets
        resets += 1
        if item.get("text") == "hang":
            time.sleep(1000)
        return ({"role": "user", "content": f"{os.getpid()} {resets}"}, {"role": "user", "content": str(item["text"])})

    async def step(self, text: str) -> EnvStep:
        if text == "litter":
            self.start()
        elif text == "orphan":
            subprocess.run(["sh", "-c", "true &"], check=True)
        elif text == "hang":
            self.start()
            time.sleep(1000)
        elif text == "spin":
            sum(range(10**15))  # one C call that no thread can interrupt
        elif text == "die":
            self.start()
            os._exit(3)
        elif text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif text == "raise":
            raise ValueError("two\nlines")
        elif text == "exit":
            sys.exit(4)
        elif text == "lost":
            raise EnvironmentLost("the server is gone")
        elif text == "wrong":
            raise UserError("a setting is wrong")
        elif text == "nonsense":
            return 5  # type: ignore[return-value]
        return say(text)

    async def close(self) -> None:
        if self.log.endswith("hang"):
            time.sleep(1000)

    def start(self) -> None:
        """Four that outlive a careless kill: a child, one in a session of its own, one of that kind that is nobody's
        child and has forgotten its environment, and a fork that holds the pipe open."""
        commands = [["sleep", LONG], ["sleep", LONG], ["sh", "-c", f"env -i sleep {LONG} & echo $!"]]
        for number, command in enumerate(commands):
            new = subprocess.Popen(command, start_new_session=number > 0, stdout=subprocess.PIPE)
            assert new.stdout is not None
            pid = int(new.stdout.readline()) if number == 2 else new.pid
            self.note(pid)
        if (pid := os.fork()) == 0:
            signal.alarm(int(LONG))
            ctypes.CDLL(None).pause()
            os._exit(0)
        self.note(pid)

    def note(self, pid: int) -> None:
        with open(self.log, "a") as file:
            file.write(f"{pid}\n")


class Here:
    """Stays in the event loop."""

    blocking = False
    closed = 0  # times, of all

    @staticmethod
    def hour() -> None:
        """What takes an hour of a clock."""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        return ({"role": "user", "content": f"{item['index']} {seed}"},)

    async def step(self, text: str) -> EnvStep:
        if text == "hang":
            await asyncio.sleep(1000)
        elif text == "ignore":
            for _ in range(3):
                try:
                    await asyncio.sleep(0.2)
                except asyncio.CancelledError:
                    pass
        elif text == "return late":
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                return say("late")
        elif text == "block":
            await asyncio.sleep(0)
            self.hour()
        elif text == "wait":
            asyncio.get_running_loop().call_soon(self.hour)
            await asyncio.sleep(0.01)
        elif text == "cancel":
            raise asyncio.CancelledError
        elif text == "bad role":
            return EnvStep(messages=({"role": "assistant", "content": "x"},))
        elif text == "bad count":
            return EnvStep(counts={"x": "y"})  # type: ignore[dict-item]
        else:
            return await Apart.step(self, text)  # type: ignore[arg-type]
        return say(text)

    async def close(self) -> None:
        Here.closed += 1
        if Here.closed < 0:
            await asyncio.sleep(1000)


class NotAll:
    """Has no step."""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        return ()

    async def close(self) -> None:
        pass


FILE = Path(__file__)

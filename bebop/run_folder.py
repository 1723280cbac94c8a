"""The folder of a run: one process at a time writes there, and a run goes on only as what it began as."""

import contextlib
import fcntl
import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.errors import UserError
from bebop.machine import MACHINE, machine
from bebop.parsing import resume_refusals
from bebop.reading import parse_json, parse_yaml
from bebop.store import Store, write_text

log = logging.getLogger(__name__)
LOCK = ".lock"
CONFIG = "config.yaml"
OVERRIDES = "overrides.json"  # what it was started with
IDENTITY = "identity.json"


class RunFolder:
    """A run folder, from the look at it to the end of the process that writes there.

    ``check`` writes nothing; ``open`` makes the folder and takes its lock, which the kernel gives back when the process
    ends, however it ends.
    """

    def __init__(self, path: Path, setting: str, resume: bool, store: Store, what: str = "a run") -> None:
        """``setting``: the name by which the user chose it (``runtime.dir``); ``what`` such a folder holds."""
        self.path, self.setting, self.resume, self.store, self.what = path, setting, resume, store, what
        self._lock: int | None = None
        self._identity: dict[str, str] = {}

    def check(self, config: Any) -> None:
        """``UserError`` if the folder belongs to another process, or holds a run, or none that could go on like this.

        ``config`` is the configuration dataclass to go on with.
        """
        if (self.path / LOCK).is_file():
            self._take()  # held from now on: what is found below must not change under our hands
        self._check_contents()
        if not self.resume:
            return
        file = self.path / CONFIG
        try:
            before = parse_yaml(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{file} is missing, so it cannot be told what the run began as: {self._advice}") from None
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise UserError(f"{file} is no configuration, so it cannot be told what the run began as: {self._advice}")
        if found := resume_refusals(before, config):
            raise UserError(f"{'; '.join(found)}: {self._advice}")

    def identify(self, identity: Mapping[str, str]) -> None:
        """The same for the contents of what the settings name (``bebop.identity``): weights, tokenizer, files."""
        self._identity = dict(identity)
        file = self.path / IDENTITY
        if not self.resume or not file.is_file():
            return
        try:
            before: dict[str, str] = dict(parse_json(file.read_bytes()))
        except (ValueError, TypeError):
            raise UserError(f"{file} is corrupt: {self._advice}") from None
        other = [name for name, mark in identity.items() if before.get(name, mark) != mark]
        if other:
            be = "is not the one" if len(other) == 1 else "are not those"
            raise UserError(f"{', '.join(other)} {be} that the run in {self.path} began with: {self._advice}")

    def open(self) -> None:
        """Make the folder, take its lock, write down what the run is of and where it is made."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self._name} cannot be made: {error.strerror}") from error
        if self._lock is None:
            self._take()
            self._check_contents()  # it may have been another's since ``check``
        if self._identity:
            write_text(self.path / IDENTITY, json.dumps(self._identity, indent=2) + "\n")
        write_text(self.path / MACHINE, json.dumps(machine(), indent=2) + "\n")

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock in _HELD:
            os.close(self._lock)
            _HELD.remove(self._lock)
        self._lock = None

    @property
    def _name(self) -> str:
        return f"{self.setting}={str(self.path)!r}"

    @property
    def _advice(self) -> str:
        return f"leave it as it was, or start a new run with another {self.setting}"

    def _check_contents(self) -> None:
        resume = self.setting.removesuffix("dir") + "resume=true"
        if not self.resume:
            if (self.path / "metrics.jsonl").exists() or self.store.all():
                raise UserError(f"{self._name} holds {self.what}: set {resume} to go on with it, or choose another")
        elif not self.store.all():
            raise UserError(f"{resume}: {self.path} holds no finished checkpoint")

    def _take(self) -> None:
        """Take the lock, or say who has it."""
        # Not inherited by programs that are started (O_CLOEXEC is Python's default), nor kept by forks, see _HELD:
        # a child that outlives this process must not hold the folder.
        try:
            descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"{self._name} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            raise UserError(
                f"{self._name} is in use by {holder}: wait for its end, stop it, or choose another folder"
            ) from None
        except OSError as error:
            os.close(descriptor)
            log.warning("%s cannot be locked (%s): see to it that no other process writes there", self.path, error)
            return
        self._lock = descriptor
        _HELD.add(descriptor)
        with contextlib.suppress(OSError):  # a full disk: the text is for people, the lock holds without it
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


_HELD: set[int] = set()  # descriptors of the locks that this process has


def _let_go_in_child() -> None:
    for descriptor in _HELD:
        os.close(descriptor)  # the parent's own keeps the lock
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go_in_child)

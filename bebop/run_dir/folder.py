"""Run folder: its lock, what may change when a run resumes, and who began it.

Invariants:

- One process at a time writes to a run folder. It holds a lock that the kernel releases when the process ends.
- A run resumes only with what it began with. Settings change only if their fields allow it (``bebop.config.fields``),
  and the files that the settings name keep their contents (``bebop.run_dir.identity``).
- ``origin.json`` records who began the run. It holds marks of ``overrides.json``, the settings that a resume reads
  again: HMAC-SHA256 of its text under a key of the user's own, ``~/.cache/bebop/origin.key``. Nobody without that key
  can make a mark, and a change of the settings invalidates the marks. The folder itself may move.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bebop.config.fields import resume_refusals
from bebop.errors import UserError
from bebop.run_dir.checkpoints import Store, write_text
from bebop.run_dir.machine import MACHINE, machine
from bebop.run_dir.safe_parse import parse_json, parse_yaml

log = logging.getLogger(__name__)
LOCK = ".lock"
CONFIG = "config.yaml"
OVERRIDES = "overrides.json"  # the overrides that the run was started with
IDENTITY = "identity.json"
ORIGIN = "origin.json"
KEY, KEY_BYTES = "origin.key", 32


class RunFolder:
    """Run folder, from its check to the end of the process that writes to it.

    ``check`` writes nothing; ``open`` creates the folder and takes its lock.
    """

    def __init__(
        self,
        path: Path,
        setting: str,
        resume: bool,
        store: Store,
        what: str = "a run",
        begun: Callable[[Path], bool] | None = None,
    ) -> None:
        """Name the folder.

        Args:
            path: path of the folder.
            setting: the setting by which the user chose it (``runtime.dir``).
            resume: whether its run is resumed.
            store: its checkpoints.
            what: what the folder may hold, for messages.
            begun: whether a run without a checkpoint can resume from the folder's contents; None: it cannot.
        """
        self.path, self.setting, self.resume, self.store, self.what = path, setting, resume, store, what
        self._begun = begun
        self._lock: int | None = None
        self._identity: dict[str, str] = {}

    def check(self, config: Any) -> None:
        """Raise ``UserError`` if another process has the folder, or its run cannot begin or resume with ``config``.

        Args:
            config: a configuration dataclass; its fields define what may change (``bebop.config.fields``).
        """
        if (self.path / LOCK).is_file():
            self._take()  # held from now on: the contents checked below must not change meanwhile
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
        """Raise ``UserError`` if the run began with other weights, another tokenizer or other files."""
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
        self._identity = {**before, **identity}  # what this resume does not use must stay the same in a later one

    def open(self) -> None:
        """Create the folder, take its lock, and record the identity of the run and the machine."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self._name} cannot be made: {error.strerror}") from error
        if self._lock is None:
            self._take()
            self._check_contents()  # another process may have used it since ``check``
        if self._identity:
            write_text(self.path / IDENTITY, json.dumps(self._identity, indent=2) + "\n")
        write_text(self.path / MACHINE, json.dumps(machine(), indent=2) + "\n")

    def close(self) -> None:
        """Release the lock."""
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
        begun = self._begun is not None and self._begun(self.path)
        if not self.resume:
            if (self.path / "metrics.jsonl").exists() or self.store.all() or begun:
                raise UserError(f"{self._name} holds {self.what}: set {resume} to go on with it, or choose another")
        elif not self.store.all() and not begun:
            raise UserError(f"{resume}: {self.path} holds no finished checkpoint")

    def _take(self) -> None:
        """Take the lock, or raise ``UserError`` that names its owner."""
        # Not inherited by started programs (O_CLOEXEC is Python's default), nor kept by forks, see _HELD:
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


def _release_in_child() -> None:
    for descriptor in _HELD:
        os.close(descriptor)  # the parent's own keeps the lock
    _HELD.clear()


os.register_at_fork(after_in_child=_release_in_child)


def sign(run: Path, text: str) -> None:
    """Mark a run as this user's, with ``text`` as its settings; call it before the settings are written.

    A user who cannot store a key makes no marks. A resume then treats the folder as somebody else's.
    """
    key = _key(make=True)
    if key is None:
        return
    newest = _mark(key, text)
    # The old settings stay marked: this process may end before the new ones are written.
    marks = [newest, *(mark for mark in _marks(run)[:1] if mark != newest)]
    write_text(run / ORIGIN, json.dumps({"marks": marks}) + "\n")


def own(run: Path) -> bool:
    """Return whether this user began or resumed a run with its present settings."""
    key = _key(make=False)
    try:
        text = (run / OVERRIDES).read_text()
    except (OSError, UnicodeDecodeError):
        return False
    return key is not None and any(hmac.compare_digest(_mark(key, text), mark) for mark in _marks(run))


def _mark(key: bytes, text: str) -> str:
    return hmac.new(key, b"settings of a run of bebop\0" + text.encode(), hashlib.sha256).hexdigest()


def _marks(run: Path) -> list[str]:
    try:
        found = json.loads((run / ORIGIN).read_text())["marks"]
        return [mark for mark in found if isinstance(mark, str) and mark.isascii()]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _key(make: bool) -> bytes | None:
    """Return this user's key; None if there is none, or if somebody else may have put it there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "bebop")
    path = folder / KEY
    with contextlib.suppress(OSError):
        if make and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / f".{KEY}-{secrets.token_hex(8)}"
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with contextlib.suppress(FileExistsError):  # another process of this user was faster; its key is used
                os.link(fresh, path)
            fresh.unlink()
        key, status = path.read_bytes(), path.stat()
        if len(key) == KEY_BYTES and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return key
    return None

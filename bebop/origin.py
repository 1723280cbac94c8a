"""Who began a run: a mark in the run folder that only this user can have made.

``<run>/origin.json`` holds marks of ``overrides.json``, the settings that a resume reads again: HMAC-SHA256 of its text
under a key of the user's own, ``~/.cache/bebop/origin.key``. Whoever has no such key cannot make the mark, and whoever
changes the settings in a folder that has one makes it void. The folder itself may move.
"""

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from bebop.run_folder import OVERRIDES
from bebop.store import write_text

ORIGIN = "origin.json"
KEY, KEY_BYTES = "origin.key", 32


def sign(run: Path, text: str) -> None:
    """Mark ``run`` as this user's, with ``text`` as its settings from now on; called before they are written.

    A user without a place for a key makes no marks, and is asked as for a folder of others.
    """
    key = _key(make=True)
    if key is None:
        return
    newest = _mark(key, text)
    # The settings of before stay marked: this process may end before those of now are written.
    marks = [newest, *(mark for mark in _marks(run)[:1] if mark != newest)]
    write_text(run / ORIGIN, json.dumps({"marks": marks}) + "\n")


def own(run: Path) -> bool:
    """Whether this user began the run in ``run``, with the settings that it has now."""
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
    """The key of this user; None if there is none, or one that somebody else may have put there."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "bebop")
    path = folder / KEY
    with suppress(OSError):
        if make and not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            fresh = folder / f".{KEY}-{secrets.token_hex(8)}"
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(KEY_BYTES))
            with suppress(FileExistsError):  # another process of the user's was faster: its key counts
                os.link(fresh, path)
            fresh.unlink()
        key, status = path.read_bytes(), path.stat()
        if len(key) == KEY_BYTES and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return key
    return None

"""Log of deaths, hangs and replacements of a run's parts: ``events.jsonl``, a line of JSON each."""

import json
import logging
import time
from pathlib import Path

log = logging.getLogger(__name__)
NAME = "events.jsonl"


class EventLog:
    """Appender of events to a run folder; it writes nothing before the folder exists or if the disk refuses.

    >>> EventLog(Path("runs/a")).write("hang", "rollout worker 1", "in decoding", silent_s=31.0)  # doctest: +SKIP
    """

    def __init__(self, run_dir: Path | None) -> None:
        """Write to ``run_dir``; None writes nothing."""
        self.run_dir = run_dir

    def write(
        self,
        kind: str,
        who: str,
        why: str,
        *,
        silent_s: float | None = None,
        notice_s: float | None = None,
        recover_s: float | None = None,
    ) -> None:
        """Append one event.

        Args:
            kind: death, hang, replaced (the part works again) or session (Ray itself is gone).
            who: "rollout worker 1", "trainer", "ray".
            why: one line.
            silent_s: seconds of silence that count for a hang.
            notice_s: seconds from the last sign of life until the end was noticed.
            recover_s: seconds from then until the part worked again.
        """
        seconds = {"silent_s": silent_s, "notice_s": notice_s, "recover_s": recover_s}
        rounded = {name: None if value is None else round(value, 3) for name, value in seconds.items()}
        row = {"time": round(time.time(), 3), "kind": kind, "who": who, "why": why, **rounded}
        if self.run_dir is None or not self.run_dir.is_dir():
            return
        try:
            with (self.run_dir / NAME).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:  # a full disk must not make a death worse
            log.warning("%s cannot be written: %s", self.run_dir / NAME, error.strerror)

    def keep_stacks(self, who: str, text: str) -> str:
        """Write a dump of stacks and return the file's name in the run folder; empty if it cannot be written."""
        if self.run_dir is None or not self.run_dir.is_dir():
            return ""
        name = f"hangs/{time.strftime('%Y%m%d-%H%M%S')}-{who.replace(' ', '-')}.txt"
        try:
            (self.run_dir / "hangs").mkdir(exist_ok=True)
            (self.run_dir / name).write_text(text, encoding="utf-8")
        except OSError as error:
            log.warning("%s cannot be written: %s", self.run_dir / name, error.strerror)
            return ""
        return name

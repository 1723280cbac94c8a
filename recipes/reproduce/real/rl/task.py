"""A task that SmolLM2 can learn: one short sentence about something, checked by a rule.

``python -m bebop.run task=file task.path=FILE task.reward=recipes/reproduce/real/rl/task.py:score task.system=null``,
where FILE is what ``write_questions`` wrote. Base rewards of this and of the tasks that were passed over: README.md.
"""

import json
import os
import random
import re
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from bebop.command import writing
from bebop.errors import UserError

KINDS = (
    "an old", "a small", "a wooden", "a forgotten", "a bright", "a strange", "a quiet", "a broken", "a beautiful",
    "a dusty", "a yellow", "a famous", "a hidden", "a cheap", "a warm",
)  # fmt: skip
THINGS = (
    "bridge", "garden", "clock", "boat", "kitchen", "letter", "window", "train", "chair", "river", "tower", "market",
    "school", "piano", "lamp", "road", "bottle", "house", "hat", "ship", "table", "forest", "door", "book", "mirror",
    "island", "city", "coat", "farm", "picture", "village", "room", "car", "box", "cup", "song", "street", "castle",
    "bicycle", "theatre",
)  # fmt: skip
FEWEST, MOST = 4, 12  # words of an answer; the question asks for ten at most, and is not pedantic
WORD = re.compile(r"[A-Za-z]+(?:['\u2019-][A-Za-z]+)*")


def questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    """``count`` different questions, with the word that an answer has to hold; the first are the same for any count.

    Raises:
        UserError: There are not so many combinations.
    """
    every = list(product(KINDS, THINGS))
    if not 1 <= count <= len(every):
        raise UserError(f"{count} questions are not possible: give 1 to {len(every)}")
    chosen = random.Random(f"short sentences/{seed}").sample(every, len(every))[:count]
    return [
        {"question": f"Describe {kind} {thing} in one sentence of at most ten words.", "answer": thing}
        for kind, thing in chosen
    ]


def write_questions(path: Path, count: int, seed: int = 0) -> None:
    """As JSONL, for ``task.path``; whole or not at all."""
    lines = [json.dumps(row) for row in questions(count, seed)]
    scratch = path.with_suffix(f".{os.getpid()}.new")  # another share may be at it
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text("\n".join(lines) + "\n")
        scratch.replace(path)


def score(text: str, item: Mapping[str, Any]) -> float:
    """Half for one sentence of 4 to 12 words, half for the word that was asked about in it; 0, .5 or 1.

    A sentence ends with a full stop, an exclamation or a question mark, and has no other; an answer that was cut off
    seldom does.
    """
    words = [word.lower() for word in WORD.findall(text)]
    ends = re.findall(r"[.!?]+", text)
    one = len(ends) == 1 and re.search(r"[.!?]+[\"\u201d']?\s*$", text) is not None and "\n" not in text.strip()
    return 0.5 * (one and FEWEST <= len(words) <= MOST) + 0.5 * (str(item["answer"]) in words)

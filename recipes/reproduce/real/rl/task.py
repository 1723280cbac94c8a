"""A task that SmolLM2 can learn: one short sentence about something, checked by a rule.

``python -m bebop.run task=file task.path=FILE task.reward=recipes/reproduce/real/rl/task.py:score task.system=null``,
where ``write_questions`` wrote FILE. README.md has base rewards of this task and of the rejected ones.
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
FEWEST, MOST = 4, 12  # words of a completion; the question asks for at most ten, the rule allows two more
WORD = re.compile(r"[A-Za-z]+(?:['\u2019-][A-Za-z]+)*")


def questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return ``count`` different questions, each with the word that a completion has to hold.

    The first ones are the same for every count.

    Raises:
        UserError: There are fewer combinations.
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
    """Write the questions as JSONL for ``task.path``, atomically."""
    lines = [json.dumps(row) for row in questions(count, seed)]
    scratch = path.with_suffix(f".{os.getpid()}.new")  # another share may write the same file
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text("\n".join(lines) + "\n")
        scratch.replace(path)


def score(text: str, item: Mapping[str, Any]) -> float:
    """Return the reward of a completion: 0, .5 or 1.

    Half is for one sentence of 4 to 12 words, half for holding the word of the question. A sentence ends with a full
    stop, an exclamation mark or a question mark, and has no other. A truncated completion seldom does.
    """
    words = [word.lower() for word in WORD.findall(text)]
    ends = re.findall(r"[.!?]+", text)
    one = len(ends) == 1 and re.search(r"[.!?]+[\"\u201d']?\s*$", text) is not None and "\n" not in text.strip()
    return 0.5 * (one and FEWEST <= len(words) <= MOST) + 0.5 * (str(item["answer"]) in words)

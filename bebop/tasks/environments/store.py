"""``store``: follow a chain of keys through a store, one key a turn.

Each key's entry names the next one, which only ``get`` reveals. A question of n turns takes n - 1 times ``get`` and
then ``answer``, and no turn can be skipped. Contexts grow a little with each of 4 to 30 turns, so the cost of reading
them again is visible. A policy that gets nothing right still plays all of its turns.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep, Message, last_line

MIN_TURNS, MAX_TURNS = 4, 30
TURN = re.compile(r"(get|answer) (\d{3})", re.ASCII)
KEYS = range(100, 1000)


def item(index: int, seed: int, *, length: int = 0, size: int = 64) -> dict[str, Any]:
    """Draw a store of ``size`` entries and a path of ``length`` turns (0: drawn, from 4 to 30).

    Its keys: ``entries`` (key -> key), ``start``, ``length``, ``answer``: the key that the last ``get`` names. Raises
    ``UserError`` for impossible arguments.
    """
    if length != 0 and not MIN_TURNS <= length <= MAX_TURNS:
        raise UserError(f"length={length} is not possible for store: {MIN_TURNS} to {MAX_TURNS} turns, or 0: drawn")
    if not MAX_TURNS <= size <= len(KEYS):
        raise UserError(f"size={size} is not possible for store: {MAX_TURNS} to {len(KEYS)} entries")
    rng = random.Random(f"store {seed} {index}")
    length = length or rng.randint(MIN_TURNS, MAX_TURNS)
    keys = [str(key) for key in rng.sample(KEYS, size)]  # one cycle: no key of a path repeats
    way = keys[:length]
    entries = dict(sorted(zip(keys, [*keys[1:], keys[0]], strict=True)))
    return {"entries": entries, "start": way[0], "length": length, "answer": way[-1]}


class Store:
    """One path through the store. An invalid turn gets an error, and counts in ``tool_errors``."""

    def __init__(self, *, spare: int = 0) -> None:
        """Allow ``spare`` more turns than needed; raise ``UserError`` if that is out of range."""
        if not 0 <= spare <= 1000:
            raise UserError(f"spare={spare} is not possible for store: 0 to 1000 turns")
        self.spare, self.left = spare, 0
        self.item: Mapping[str, Any] = {}

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the question; it does not depend on ``seed``."""
        self.item, self.left = item, item["length"] + self.spare
        gets = item["length"] - 1
        text = (
            f"A store has entries with numbers. Start with {item['start']}: 'get {item['start']}' tells the number of "
            f"the next entry, and so on. After {gets} times 'get', give the number that the last of them told, as "
            f"'answer NUMBER'. The last line of a turn is one get or the answer; there are {self.left} turns."
        )
        return (_user(text),)

    async def step(self, text: str) -> EnvStep:
        """Return reward 1 for the right answer; a wrong one, or the last turn, ends the episode with 0."""
        self.left -= 1
        turn = TURN.fullmatch(last_line(text))
        known = turn is not None and (turn[1] == "answer" or turn[2] in self.item["entries"])
        counts = {"tool_errors": float(not known)}
        if turn is not None and turn[1] == "answer":
            return EnvStep(reward=float(turn[2] == self.item["answer"]), done=True, counts=counts)
        if self.left <= 0:
            return EnvStep(done=True, counts=counts)
        if turn is None:
            said = "error: say 'get NUMBER' or 'answer NUMBER', of three digits"
        elif not known:
            said = f"error: there is no entry {turn[2]}"
        else:
            said = f"{turn[2]} names {self.item['entries'][turn[2]]}"
        return EnvStep(messages=(_user(said),), counts=counts)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def _user(text: str) -> Message:
    return {"role": "user", "content": text}

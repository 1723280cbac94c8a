"""``guess``: find a number between 1 and 64 in six tries.

A turn of the policy is ``lo hi guess``: the remaining range, and a number in it. The reply is only ``more`` or
``less``, so the policy has to infer the range from the history, turn by turn. Halving it finds 63 of the 64 numbers.
The game is small enough for the built-in model, which learns it from ``demonstrations``.
"""

import random
import re
from collections.abc import Mapping
from typing import Any

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep, Message

TURN = re.compile(r"\s*(\d{1,9}) (\d{1,9}) (\d{1,9})\s*", re.ASCII)
FORM = "lo hi guess"  # the reply to a text that is no turn
# Chance of a slip per turn of a demonstration. Demonstrations then find .65 of the numbers, and the built-in model .51
# to .59 after 100 to 300 steps on 32 of them (256 games at temperature 1): it can improve, and groups differ.
SLIPS = 0.4
SLIPPED = (-10, -1, 1, 10)  # error of an end of the range after a slip


def item(index: int, seed: int, *, numbers: int = 64, tries: int = 6) -> dict[str, Any]:
    """Draw the number to find: ``{"number": 17, "numbers": 64, "tries": 6}``; raise ``UserError`` for impossible
    arguments.
    """
    for name, value, low, high in (("numbers", numbers, 2, 10**6), ("tries", tries, 1, 100)):
        if not low <= value <= high:
            raise UserError(f"{name}={value} is not possible for guess: it is from {low} to {high}")
    number = random.Random(f"guess {seed} {index}").randint(1, numbers)
    return {"number": number, "numbers": numbers, "tries": tries}


class Guess:
    """One game. An invalid turn uses up a try, and counts in ``tool_errors``."""

    def __init__(self) -> None:
        self.number = self.left = 0

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the question; it does not depend on ``seed``."""
        self.number, self.left = item["number"], item["tries"]
        return (asked(item),)

    async def step(self, text: str) -> EnvStep:
        """Return reward 1 for the number, 0 after the last try."""
        self.left -= 1
        turn = TURN.fullmatch(text)
        counts = {"tool_errors": float(turn is None)}
        if turn is not None and int(turn[3]) == self.number:
            return EnvStep(reward=1.0, done=True, counts=counts)
        if self.left <= 0:
            return EnvStep(done=True, counts=counts)
        said = FORM if turn is None else hint(int(turn[3]), self.number)
        return EnvStep(messages=(_user(said),), counts=counts)

    async def close(self) -> None:
        """Do nothing: there is nothing to release."""


def hint(guess: int, number: int) -> str:
    """Return the reply to a guess."""
    return "more" if number > guess else "less"


def asked(item: Mapping[str, Any]) -> Message:
    """Return the message of a question."""
    return _user(f"number 1 to {item['numbers']}, {item['tries']} tries")


def demonstrations(index: int, seed: int, slips: float = SLIPS) -> tuple[Message, ...]:
    """Return game ``index`` as played by halving: question, turn, reply, turn, ...; the last message is a turn.

    Roles alternate between user and assistant; only the assistant's messages are learned. In each turn, with
    probability ``slips``, an end of the range is wrong by 1 or 10, and the game continues from there. The policy learns
    to halve as its mode, and errors that reinforcement can remove as its tail.
    """
    game = item(index, seed)
    number, numbers, rng = game["number"], game["numbers"], random.Random(f"guess demonstration {seed} {index}")
    low, high, messages = 1, numbers, [asked(game)]
    for _ in range(game["tries"]):
        if rng.random() < slips:
            if rng.random() < 0.5:
                high = max(low, min(numbers, high + rng.choice(SLIPPED)))
            else:
                low = min(high, max(1, low + rng.choice(SLIPPED)))
        guess = (low + high) // 2
        messages.append({"role": "assistant", "content": f"{low} {high} {guess}"})
        if guess == number:
            return tuple(messages)
        messages.append(_user(hint(guess, number)))
        low, high = (min(numbers, guess + 1), high) if number > guess else (low, max(1, guess - 1))
        low, high = min(low, high), max(low, high)
    return tuple(messages[:-1])


def _user(text: str) -> Message:
    return {"role": "user", "content": text}

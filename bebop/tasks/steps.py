"""A deterministic checker of worked steps, in place of a language model that judges them (SPEC 4.3).

It judges only what it can be sure of: sums and differences (``8-4=4``), and the extreme of a list (``least 3 left 21
76``: the first is the least of all of them). Whatever else a text says is neither right nor wrong.
"""

import re

EQUATION = re.compile(r"(?<![\d+\-=])(-?\d+)([+-])(\d+)=(-?\d+)(?!\d)")
EXTREME = re.compile(r"\b(least|most) (\d+) left (\d+(?: \d+)*)")


def wrong_steps(text: str) -> int:
    """Return the number of wrong steps in a text.

    >>> wrong_steps("8-4=4; 4+1=6, then least 76 left 21")
    2
    """
    signs = {"+": 1, "-": -1}
    sums = sum(int(a) + signs[sign] * int(b) != int(c) for a, sign, b, c in EQUATION.findall(text))
    ends = {"least": min, "most": max}
    lists = [(word, int(first), [int(n) for n in rest.split()]) for word, first, rest in EXTREME.findall(text)]
    return sums + sum(ends[word]((first, *rest)) != first for word, first, rest in lists)

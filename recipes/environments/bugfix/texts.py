"""Functions over texts, pairs, stretches and grids that packages with a bug are made of, as in ``lists.py``."""

SHIFT, LENGTH, WEIGHT, GAP, HIGHEST = 3, 12, 7, 2, 20


def shifted(text: str) -> str:
    """Each letter from a to z replaced by the one SHIFT further on, going on at a after z; others stay."""
    result = ""
    for letter in text:
        if "a" <= letter <= "z":
            result += chr((ord(letter) - ord("a") + SHIFT) % 26 + ord("a"))
        else:
            result += letter
    return result


def run_lengths(text: str) -> list[tuple[str, int]]:
    """Each letter with how often it stands there in a row, from left to right."""
    runs: list[tuple[str, int]] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1] = (letter, runs[-1][1] + 1)
        else:
            runs.append((letter, 1))
    return runs


def word_counts(text: str) -> list[tuple[str, int]]:
    """Each word of the text, which spaces separate, with how often it occurs, sorted by word."""
    counts: dict[str, int] = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return sorted(counts.items())


def common_start(first: str, second: str) -> str:
    """The longest text that both begin with."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return first[:length]


def balanced(text: str) -> bool:
    """Whether every ( and [ is closed by its ) or ], innermost first; other letters do not matter."""
    closing = {"(": ")", "[": "]"}
    open_ones: list[str] = []
    for letter in text:
        if letter in closing:
            open_ones.append(closing[letter])
        elif letter in (")", "]"):
            if not open_ones or open_ones.pop() != letter:
                return False
    return not open_ones


def lines_of(text: str) -> list[str]:
    """The words put into lines of at most LENGTH letters, as many in each as fit with one space between them."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= LENGTH:
            lines[-1] = lines[-1] + " " + word
        else:
            lines.append(word)
    return lines


def settings(text: str) -> dict[str, str]:
    """What a text such as 'a=1;b=2' sets. Parts without = are left out; of two that set the same, the last counts."""
    found: dict[str, str] = {}
    for part in text.split(";"):
        if "=" in part:
            name, value = part.split("=", 1)
            found[name.strip()] = value.strip()
    return found


def is_palindrome(text: str) -> bool:
    """Whether the letters and digits of the text, without regard to case, read the same backwards."""
    letters = [letter.lower() for letter in text if letter.isalnum()]
    for index in range(len(letters) // 2):
        if letters[index] != letters[-1 - index]:
            return False
    return True


def edit_distance(first: str, second: str) -> int:
    """The least number of letters to put in, take out or replace that turns the first text into the second."""
    costs = list(range(len(second) + 1))
    for row, one in enumerate(first, 1):
        last = costs
        costs = [row]
        for column, other in enumerate(second, 1):
            replaced = last[column - 1] + (0 if one == other else 1)
            costs.append(min(replaced, last[column] + 1, costs[column - 1] + 1))
    return costs[-1]


def normal_path(path: str) -> str:
    """The path without '.' and empty parts; '..' takes away the part before it, if there is one. '.' for nothing."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            if parts:
                parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts) or "."


def roman(number: int) -> str:
    """A number from 1 on in Roman numerals; nothing for 0."""
    text = ""
    for value, letters in ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"),
                           (1, "I")):  # fmt: skip
        while number >= value:
            text += letters
            number -= value
    return text


def evaluated(tokens: list[str]) -> int:
    """The value of numbers and + - *, each operator after its two operands; 0 for no tokens."""
    stack: list[int] = [0]
    for token in tokens:
        if token in ("+", "-", "*"):
            right = stack.pop()
            left = stack.pop()
            if token == "+":
                stack.append(left + right)
            elif token == "-":
                stack.append(left - right)
            else:
                stack.append(left * right)
        else:
            stack.append(int(token))
    return stack[-1]


def ranking(pairs: list[tuple[str, int]], places: int) -> list[str]:
    """The names with the most points, so many of them; those with equal points by name."""
    ordered = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
    return [name for name, _ in ordered[:places]]


def sums_by_name(pairs: list[tuple[str, int]]) -> dict[str, int]:
    """The sum of the points of each name, without names whose sum is 0, in the order in which they occur first."""
    sums: dict[str, int] = {}
    for name, points in pairs:
        sums[name] = sums.get(name, 0) + points
    return {name: points for name, points in sums.items() if points != 0}


def stock(moves: list[tuple[str, int]]) -> list[int]:
    """What is in store after each move: ('in', n) adds n, at most up to HIGHEST; ('out', n) takes n if there are n."""
    held = 0
    levels = []
    for kind, count in moves:
        if kind == "in":
            held = min(held + count, HIGHEST)
        elif kind == "out" and count <= held:
            held -= count
        levels.append(held)
    return levels


def joined_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans (first, last) in ascending order, those joined between which there are less than GAP numbers."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first - joined[-1][1] <= GAP:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def covered(spans: list[tuple[int, int]], number: int) -> int:
    """How many of the spans (first, last) hold the number; both ends belong to a span."""
    count = 0
    for first, last in spans:
        if first <= number <= last:
            count += 1
    return count


def transposed(grid: list[list[int]]) -> list[list[int]]:
    """The grid with rows and columns exchanged."""
    return [[row[column] for row in grid] for column in range(len(grid[0]))]


def neighbours(grid: list[list[int]], row: int, column: int) -> int:
    """The sum of the up to four values left, right, above and below a place of the grid."""
    total = 0
    for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        if 0 <= row + down < len(grid) and 0 <= column + right < len(grid[0]):
            total += grid[row + down][column + right]
    return total


def lightest_way(grid: list[list[int]]) -> int:
    """The least sum of values on a way from the top left to the bottom right that goes right or down only."""
    sums: list[int] = []
    for row, values in enumerate(grid):
        for column, value in enumerate(values):
            if row == 0 and column == 0:
                sums.append(value)
            elif row == 0:
                sums.append(sums[column - 1] + value)
            elif column == 0:
                sums[column] = sums[column] + value
            else:
                sums[column] = min(sums[column], sums[column - 1]) + value
    return sums[-1]


def signature(text: str) -> int:
    """From 0 on, for each letter: WEIGHT times the number so far plus the letter's place after a, modulo 1000."""
    number = 0
    for letter in text:
        number = (number * WEIGHT + ord(letter) - ord("a")) % 1000
    return number


CALLS = {
    "shifted": ("text",),
    "run_lengths": ("word",),
    "word_counts": ("text",),
    "common_start": ("word", "word"),
    "balanced": ("brackets",),
    "lines_of": ("text",),
    "settings": ("settings",),
    "is_palindrome": ("mirror",),
    "edit_distance": ("word", "word"),
    "normal_path": ("path",),
    "roman": ("large",),
    "evaluated": ("tokens",),
    "ranking": ("pairs", "count"),
    "sums_by_name": ("pairs",),
    "stock": ("moves",),
    "joined_spans": ("spans",),
    "covered": ("spans", "small"),
    "transposed": ("grid",),
    "neighbours": ("grid", "corner", "corner"),
    "lightest_way": ("grid",),
    "signature": ("word",),
}

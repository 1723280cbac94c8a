"""Functions over numbers and lists that packages with a bug are made of: ``programs.py`` reads their source.

Names in capitals get new numbers in every package. A docstring has to determine every result.
"""

LOW, HIGH, WIDTH, EVERY, MODULUS, FACTOR, FEE = 3, 40, 3, 4, 97, 5, 2


def clamp(value: int, low: int, high: int) -> int:
    """The value, or low if it is less than low, or high if it is more than high."""
    if value < low:
        return low
    if value > high:
        return high
    return value


def running_totals(values: list[int]) -> list[int]:
    """A list as long as values: at each place the sum of all values up to there, that one included."""
    totals = []
    total = 0
    for value in values:
        total += value
        totals.append(total)
    return totals


def differences(values: list[int]) -> list[int]:
    """What each value is more than the one before it; nothing for the first."""
    return [values[index] - values[index - 1] for index in range(1, len(values))]


def moving_sums(values: list[int]) -> list[int]:
    """The sum of every WIDTH values that stand next to each other, from left to right."""
    sums = []
    for start in range(len(values) - WIDTH + 1):
        sums.append(sum(values[start : start + WIDTH]))
    return sums


def without_repeats(values: list[int]) -> list[int]:
    """The values in their order, each only where it occurs for the first time."""
    kept: list[int] = []
    for value in values:
        if value not in kept:
            kept.append(value)
    return kept


def rotated(values: list[int], places: int) -> list[int]:
    """The values moved to the left by so many places; what leaves at the front comes back at the end."""
    if not values:
        return []
    shift = places % len(values)
    return values[shift:] + values[:shift]


def in_chunks(values: list[int], size: int) -> list[list[int]]:
    """The values cut into lists of this size; the last one may be shorter. A size below 1 gives no lists."""
    if size < 1:
        return []
    return [values[start : start + size] for start in range(0, len(values), size)]


def page(values: list[int], number: int, size: int) -> list[int]:
    """The values on a page; pages have this size and are numbered from 1. Nothing for a number below 1."""
    if number < 1:
        return []
    start = (number - 1) * size
    return values[start : start + size]


def insertion_place(ordered: list[int], value: int) -> int:
    """How many values of a list in ascending order are less than this value."""
    left = 0
    right = len(ordered)
    while left < right:
        middle = (left + right) // 2
        if ordered[middle] < value:
            left = middle + 1
        else:
            right = middle
    return left


def merged(first: list[int], second: list[int]) -> list[int]:
    """All values of two lists in ascending order, in ascending order."""
    result = []
    at = 0
    for value in first:
        while at < len(second) and second[at] < value:
            result.append(second[at])
            at += 1
        result.append(value)
    return result + second[at:]


def longest_rise(values: list[int]) -> int:
    """The length of the longest stretch in which each value is more than the one before it; 0 for no values."""
    longest = 0
    length = 0
    for index, value in enumerate(values):
        if index > 0 and value > values[index - 1]:
            length += 1
        else:
            length = 1
        longest = max(longest, length)
    return longest


def best_stretch(values: list[int]) -> int:
    """The greatest sum of values that stand next to each other; 0 if every such sum is below 0."""
    best = 0
    here = 0
    for value in values:
        here = max(0, here + value)
        best = max(best, here)
    return best


def middle_value(values: list[int]) -> int:
    """The value in the middle once they are sorted; of two, the lower one. 0 for no values."""
    if not values:
        return 0
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def most_frequent(values: list[int]) -> int:
    """The value that occurs most often; of several, the smallest. 0 for no values."""
    best = 0
    most = 0
    for value in sorted(values):
        count = values.count(value)
        if count > most:
            best = value
            most = count
    return best


def pairs_with_sum(values: list[int], wanted: int) -> int:
    """How many pairs of places, the first before the second, hold values with this sum."""
    count = 0
    for first in range(len(values)):
        for second in range(first + 1, len(values)):
            if values[first] + values[second] == wanted:
                count += 1
    return count


def price(amount: int) -> int:
    """FACTOR for each piece up to LOW pieces, FACTOR less 1 for each further one, and FEE once if there are any."""
    if amount <= 0:
        return 0
    full = min(amount, LOW)
    reduced = max(amount - LOW, 0)
    return full * FACTOR + reduced * (FACTOR - 1) + FEE


def grade(points: int) -> str:
    """'high' from HIGH points on, 'low' below LOW points, otherwise 'middle'."""
    if points >= HIGH:
        return "high"
    if points < LOW:
        return "low"
    return "middle"


def check_number(values: list[int]) -> int:
    """The sum of each value times its place, counted from 1, modulo MODULUS."""
    total = 0
    for place, value in enumerate(values, 1):
        total += place * value
    return total % MODULUS


def greatest_divisor(first: int, second: int) -> int:
    """The greatest number that divides both; the other number if one is 0."""
    while second != 0:
        first, second = second, first % second
    return first


def primes_below(limit: int) -> list[int]:
    """All primes less than the limit, in ascending order."""
    found: list[int] = []
    for number in range(2, limit):
        if all(number % prime != 0 for prime in found):
            found.append(number)
    return found


def digits(number: int, base: int) -> list[int]:
    """The digits of a number that is not negative, in a base from 2 on, the most significant first; [0] for 0."""
    if number == 0:
        return [0]
    found = []
    while number > 0:
        found.append(number % base)
        number //= base
    return found[::-1]


def sequence(length: int) -> list[int]:
    """So many numbers: 1, 2, and then always FACTOR times the last one less the one before it, modulo MODULUS."""
    numbers = [1, 2]
    while len(numbers) < length:
        numbers.append((FACTOR * numbers[-1] - numbers[-2]) % MODULUS)
    return numbers[:length]


def ways_to_pay(amount: int, coins: list[int]) -> int:
    """In how many ways coins of these values, each as often as one likes, make up the amount, in whatever order."""
    ways = [1] + [0] * amount
    for coin in sorted(set(coins)):
        for reached in range(coin, amount + 1):
            ways[reached] += ways[reached - coin]
    return ways[amount]


def every_nth(values: list[int]) -> list[int]:
    """The first value and then every EVERY-th one after it."""
    return [value for index, value in enumerate(values) if index % EVERY == 0]


CALLS = {
    "clamp": ("number", "low", "high"),
    "running_totals": ("values",),
    "differences": ("values",),
    "moving_sums": ("values",),
    "without_repeats": ("values",),
    "rotated": ("values", "small"),
    "in_chunks": ("values", "small"),
    "page": ("values", "small", "count"),
    "insertion_place": ("ordered", "small"),
    "merged": ("ordered", "ordered"),
    "longest_rise": ("values",),
    "best_stretch": ("values",),
    "middle_value": ("values",),
    "most_frequent": ("values",),
    "pairs_with_sum": ("values", "small"),
    "price": ("small",),
    "grade": ("number",),
    "check_number": ("values",),
    "greatest_divisor": ("large", "large"),
    "primes_below": ("large",),
    "digits": ("large", "base"),
    "sequence": ("small",),
    "ways_to_pay": ("large", "coins"),
    "every_nth": ("values",),
}
# Values to values, and values to a number: what longer functions are put together from.
STEPS = ("running_totals", "differences", "moving_sums", "without_repeats", "every_nth")
ENDS = ("longest_rise", "best_stretch", "middle_value", "most_frequent", "check_number")

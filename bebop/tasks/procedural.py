"""Data sets of reasoning-gym: questions by number, and verifiers as functions that a child process can run.

Item n of a stream needs neither item n-1 nor a stored position.

A score is passed through as the author of the data set defined it. That is not always 0 or 1. Many data sets give a
share to an answer that contains the right one (gcd 2, answer "12": 0.5); a few give 0.01 to 0.25 to anything at all.
number_sorting tolerates an error of 1 in each number, and game_of_life_halting (0.1.25) accepts every answer.

Three things are corrected here. A verifier that raises counts as 0 (prime_factorization on text, game_of_life on
``{}``). So does an answer with NaN in it, which number_sorting and complex_arithmetic accept as correct, since no
comparison with NaN is true. Verifiers that would evaluate the answer read it instead (``guarded``): anything but a
literal or formula counts as 0.
"""

import dataclasses
import difflib
import functools
import json
import math
import re
from typing import Any

from bebop.errors import UserError
from bebop.tasks.epochs import Epochs
from bebop.tasks.signatures import one_line

BLOCK = 10**6  # items of one data set object; free, since items are generated on demand
PRECOMPUTED = {"acre": 500, "word_ladder": 20_000}  # these build all items at once, or refuse more than that
# Exceptions that data sets were seen to raise on invalid arguments, when built or when generating an item.
BUILD_ERRORS = (AssertionError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)
# Verifiers known to return at once for any input. Others may not: "9**9**9" for countdown, "1e999999999"
# for coin_flip, "R999999999" for rubiks_cube. So the rest runs in a child process.
QUICK = frozenset({"basic_arithmetic", "chain_sum", "decimal_arithmetic", "lcm", "number_sorting", "products"})

# Exceptions that verifiers were seen to raise on text that is no answer.
VERIFIER_ERRORS = (ValueError, TypeError, AttributeError, ArithmeticError, LookupError, SyntaxError, RecursionError)
NOT_A_NUMBER = re.compile(r"\bnanj?\b", re.IGNORECASE)


def stream_seed(seed: int, block: int = 0, attempt: int = 0) -> int:
    """Return the data set seed of a block of items, in [0, 2**31): numpy's global generator takes at most 32 bits.

    Most data sets draw item n from ``Random(seed + n)``, so neighbouring seeds would give the same items, shifted by
    one.
    Multiples of the golden ratio are as far apart as possible: the first 200 seeds at least 6 million items. Seed 0
    stays
    0 up to 10**6, below the seeds that the built-in model was trained on.
    """
    return (seed + 4096 * block + 2**20 * attempt) * 506_952_113 % 2**31


def make_dataset(name: str, args: dict[str, Any], seed: int = 0) -> Any:
    """Return one block of the data set ``name``; raise ``UserError`` for an unknown name or impossible ``args``."""
    from reasoning_gym.factory import DATASETS, create_dataset

    check_name(name, "task.name")
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    for key in args:
        if key in ("seed", "size"):
            raise UserError(f"task.args.{key}={args[key]!r} is not possible: it is of the stream, give task.{key}")
        if key not in known:
            raise UserError(f"task.args.{key}={args[key]!r}: {name} has no such argument; {_suggest(key, known)}")
    try:
        return create_dataset(name, seed=seed, size=block_size(name, args), **_arguments(name, args))
    except BUILD_ERRORS as error:
        raise UserError(f"task.args={args!r} is not possible for {name}: {one_line(error)}") from error


def block_size(name: str, args: dict[str, Any]) -> int:
    """Return the number of items of one data set object."""
    names = [name, *(part.get("name", "") for part in _parts(name, args))]
    return min(PRECOMPUTED.get(each, BLOCK) for each in names)


class ProceduralItems:
    """Questions of one reasoning-gym data set; ``item`` is a pure function of settings and arguments."""

    def __init__(self, name: str, args: dict[str, Any], seed: int, size: int | None = None) -> None:
        """Generate the first item, so that invalid arguments fail here and not in the middle of a job.

        ``size``: the number of questions, which repeat each epoch; None: they are endless.
        """
        self.name, self.args, self.seed = name, args, seed
        self._epochs = None if size is None else Epochs(size, seed)
        self._datasets: dict[tuple[int, int], Any] = {}
        self.item(0)

    def asked(self, index: int, attempt: int = 0) -> tuple[int, int | None]:
        """Return the epoch and the number of the question at ``index``, for any attempt; None: it is asked once."""
        return (0, None) if self._epochs is None else self._epochs.place(index)

    def item(self, index: int, attempt: int = 0) -> dict[str, Any]:
        """Return the item at ``index`` (question, answer, metadata); other attempts give other items."""
        _, asked = self.asked(index)
        number = index if asked is None else asked
        block, offset = divmod(number, block_size(self.name, self.args))
        try:
            return self._dataset(block, attempt)[offset]
        except BUILD_ERRORS as error:
            if isinstance(error, UserError):
                raise
            message = f"task.args={self.args!r}: {self.name} cannot make item {number}: {one_line(error)}"
            raise UserError(message) from error

    def _dataset(self, block: int, attempt: int) -> Any:
        if (block, attempt) not in self._datasets:
            if len(self._datasets) >= 8:  # some hold megabytes
                self._datasets.pop(next(iter(self._datasets)))
            seed = stream_seed(self.seed, block, attempt)
            self._datasets[block, attempt] = make_dataset(self.name, self.args, seed)
        return self._datasets[block, attempt]


def check_name(name: str, setting: str) -> None:
    """Raise ``UserError`` that suggests the nearest names unless there is a data set ``name``."""
    from reasoning_gym.factory import DATASETS  # 1.9 s of processor time, which a task from a file can do without

    if name not in DATASETS:
        raise UserError(f"{setting}={name!r}: reasoning-gym has no such data set; {_suggest(name, list(DATASETS))}")


def _parts(name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the data sets mixed by ``composite``: mappings with name, weight and config."""
    parts = args.get("datasets") if name == "composite" else None
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list | tuple) else []


def _arguments(name: str, args: dict[str, Any]) -> dict[str, Any]:
    parts = _parts(name, args)
    if not parts:
        return args
    from reasoning_gym.composite import DatasetSpec

    for part in parts:
        check_name(part.get("name", ""), "task.args.datasets.name")
    return {**args, "datasets": [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in parts]}


def _suggest(wrong: str, known: list[str]) -> str:
    close = difflib.get_close_matches(wrong, known, n=3, cutoff=0.5)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return f"there are {', '.join(sorted(known)[:12])}" + (", ..." if len(known) > 12 else "")


# ---- verifiers


@functools.cache
def _verifier(name: str, args: str) -> Any:
    """Return the object that holds the verifier; one per process suffices, whatever its seed."""
    from bebop.tasks.guarded import guard  # sympy takes a second of processor time

    return guard(make_dataset(name, json.loads(args)))


def prepare(name: str, args: str, answer: str, entry: dict[str, Any]) -> None:
    """Make the verifier of a data set, which imports for a second; arguments as of ``score_entry``."""
    _verifier(name, args)


def score_entry(name: str, args: str, answer: str, entry: dict[str, Any]) -> float:
    """Return the data set's own score of ``answer`` for the item ``entry``; ``args``: the arguments as JSON."""
    if NOT_A_NUMBER.search(answer) and not NOT_A_NUMBER.search(str(entry["answer"])):
        return 0.0
    from bebop.tasks.guarded import Refused

    try:
        score = float(_verifier(name, args).score_answer(answer, entry))
    except (*VERIFIER_ERRORS, Refused):
        return 0.0
    return score if math.isfinite(score) else 0.0


def is_quick(name: str) -> bool:
    """Return whether the verifier may run in this process: it only compares texts, or is known to be quick."""
    if name in QUICK:
        return True
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return bool(DATASETS[name][0].score_answer is ProceduralDataset.score_answer)

"""Questions made by reasoning-gym, by number: item n of a stream needs neither item n-1 nor a stored position."""

import dataclasses
import difflib
from typing import Any

from bebop.errors import UserError
from bebop.tasks.epochs import Epochs

BLOCK = 10**6  # items of one data set object; free, since items are made when asked for
PRECOMPUTED = {"acre": 500, "word_ladder": 20_000}  # these build all items at once, or refuse more than that
# What data sets were seen to raise on arguments that cannot work, when built or when making an item.
BUILD_ERRORS = (AssertionError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError)


def stream_seed(seed: int, block: int = 0, attempt: int = 0) -> int:
    """The data set seed of a block of items, in [0, 2**31): numpy's global generator takes no more than 32 bits.

    Most data sets draw item n from ``Random(seed + n)``, so neighbouring seeds would give the same items, shifted by
    one. Multiples of the golden ratio lie as far apart as they can: the first 200 seeds at least 6 million items. Seed
    0 keeps 0 to 10**6, below the seeds that the built-in model was trained on.
    """
    return (seed + 4096 * block + 2**20 * attempt) * 506_952_113 % 2**31


def make_dataset(name: str, args: dict[str, Any], seed: int = 0) -> Any:
    """One block of the data set ``name``; ``UserError`` if there is none or it cannot be built from ``args``."""
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
        raise UserError(f"task.args={args!r} is not possible for {name}: {_one_line(error)}") from error


def block_size(name: str, args: dict[str, Any]) -> int:
    """Items of one data set object."""
    names = [name, *(part.get("name", "") for part in _parts(name, args))]
    return min(PRECOMPUTED.get(each, BLOCK) for each in names)


class ProceduralItems:
    """Questions of one reasoning-gym data set; ``item`` is a pure function of settings and arguments."""

    def __init__(self, name: str, args: dict[str, Any], seed: int, size: int | None = None) -> None:
        """Make the first item, so that arguments that cannot work show up here and not in the middle of a job.

        ``size``: the first so many questions are all there are, and come again each epoch; None: they are endless.
        """
        self.name, self.args, self.seed = name, args, seed
        self._epochs = None if size is None else Epochs(size, seed)
        self._datasets: dict[tuple[int, int], Any] = {}
        self.item(0)

    def asked(self, index: int, attempt: int = 0) -> tuple[int, int | None]:
        """The epoch and the question of place ``index``, whatever the attempt; None: it is asked once."""
        return (0, None) if self._epochs is None else self._epochs.place(index)

    def item(self, index: int, attempt: int = 0) -> dict[str, Any]:
        """The item of place ``index``, with keys question, answer, metadata; other attempts give others for it."""
        _, asked = self.asked(index)
        number = index if asked is None else asked
        block, offset = divmod(number, block_size(self.name, self.args))
        try:
            return self._dataset(block, attempt)[offset]
        except BUILD_ERRORS as error:
            if isinstance(error, UserError):
                raise
            message = f"task.args={self.args!r}: {self.name} cannot make item {number}: {_one_line(error)}"
            raise UserError(message) from error

    def _dataset(self, block: int, attempt: int) -> Any:
        if (block, attempt) not in self._datasets:
            if len(self._datasets) >= 8:  # some hold megabytes
                self._datasets.pop(next(iter(self._datasets)))
            seed = stream_seed(self.seed, block, attempt)
            self._datasets[block, attempt] = make_dataset(self.name, self.args, seed)
        return self._datasets[block, attempt]


def check_name(name: str, setting: str) -> None:
    """``UserError`` with the nearest names unless there is a data set ``name``."""
    from reasoning_gym.factory import DATASETS  # 1.9 s of processor time, which a task from a file can do without

    if name not in DATASETS:
        raise UserError(f"{setting}={name!r}: reasoning-gym has no such data set; {_suggest(name, list(DATASETS))}")


def _parts(name: str, args: dict[str, Any]) -> list[dict[str, Any]]:
    """The data sets that ``composite`` mixes: mappings with name, weight and config."""
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


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

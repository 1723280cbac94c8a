"""Checkpoints of earlier versions: ``python -m bebop.convert RUN`` writes those of a run anew, without pickle.

Up to now a checkpoint held pickles, which can run code as they are read. They are read here as ``torch.load`` reads
weights: from a list of the types that such a checkpoint is made of, and anything else is refused. Convert your own runs
alone all the same. The old checkpoints stay until the run that goes on from the new ones clears them away.
"""

import contextlib
import pickle
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bebop import codec
from bebop.adaptation import part_job as adaptations
from bebop.command import Parser, check_writable, run_main, writing
from bebop.errors import UserError
from bebop.keepable import ARRAYS
from bebop.run_folder import RunFolder
from bebop.store import HEADS, STEPS, DamagedError, Store, seal, verify
from bebop.trainer.checkpoint import KINDS, LOOP, TRAINER

# What pickled arrays name, by numpy's own names of 1.x and 2.x.
MULTIARRAY = ("numpy.core.multiarray", "numpy._core.multiarray")
REBUILT = {"_reconstruct": np.zeros(0).__reduce__()[0], "scalar": np.str_("").__reduce__()[0]}
NUMPY: list[Any] = [
    *((lambda: b"", f"{module}.bytes") for module in ("builtins", "__builtin__")),  # of an array without elements
    *((made, f"{module}.{name}") for module in MULTIARRAY for name, made in REBUILT.items()),
    *{np.ndarray, np.dtype, np.str_, type(np.dtype(str)), *(type(np.dtype(name)) for name in ARRAYS)},
]
STATES = {STEPS: (TRAINER, LOOP), HEADS: (adaptations.STATE,)}  # what checkpoints hold, by how their names begin


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="python -m bebop.convert", description=(__doc__ or "").partition("\n")[0])
    top.add_argument("run", type=Path, metavar="RUN", help="the folder of the run; no process may be at work there")
    return top


def main(arguments: list[str]) -> int:
    """Convert every whole checkpoint of a run that is pickled and was not converted before."""
    run: Path = parser().parse_args(arguments).run.absolute()
    stores = [store for prefix in STATES if (store := Store(run, prefix)).all()]
    if not stores:
        raise UserError(f"RUN={str(run)!r} is not possible: there is no checkpoint in {run / 'checkpoints'}")
    check_writable("RUN", run)
    found = {store: pickled(store) for store in stores}
    for store, paths in found.items():  # all is read before anything is written, the lock included
        for path in paths:
            states(store, path)
    done = 0
    for store, paths in found.items():
        with contextlib.closing(RunFolder(run, "RUN", True, store)) as folder:
            folder.open()  # takes its lock: one process at a time writes there
            for path in paths:
                print(f"{path} -> {convert(store, path).name}")
                done += 1
    print(f"{done} checkpoint{'s' * (done != 1)} converted{'' if done else ': none is pickled'}")
    return 0


def pickled(store: Store) -> list[Path]:
    """Checkpoints that hold pickles, oldest first, of each step the newest; damaged ones are named and left out."""
    newest = {store.step(path): path for path in store.all()}.values()
    found = []
    for path in newest:
        if not any((path / f"{name}{codec.PICKLED}").is_file() for name in STATES[store.prefix]):
            continue
        try:
            verify(path)
        except DamagedError as damage:
            print(f"left as it is: {damage}")
            continue
        found.append(path)
    return found


def convert(store: Store, path: Path) -> Path:
    """Write a pickled checkpoint anew, whole or not at all; its place. ``UserError`` for what it must not hold."""
    read = states(store, path)
    step = store.step(path)
    staged = store.staging(step)
    with writing(staged):
        staged.mkdir()
        for name, state in read.items():
            codec.save(state, staged / name, KINDS)
        for entry in others(path, STATES[store.prefix]):
            copy = shutil.copytree if entry.is_dir() else shutil.copy2
            copy(entry, staged / entry.name)
        seal(staged)
        return store.publish(staged, step)


def states(store: Store, path: Path) -> dict[str, Any]:
    """The states that a checkpoint holds, by name."""
    return {name: unpickled(path / f"{name}{codec.PICKLED}") for name in STATES[store.prefix]}


def others(path: Path, names: Iterable[str]) -> list[Path]:
    """What a checkpoint holds beside its states and the manifest."""
    own = {"manifest.json", *(f"{name}{codec.PICKLED}" for name in names)}
    return sorted(entry for entry in path.iterdir() if entry.name not in own)


def unpickled(file: Path) -> Any:
    """A state as earlier versions wrote it; ``UserError`` names the first thing in it that no state is made of."""
    try:
        with torch.serialization.safe_globals([*KINDS, *NUMPY]), warnings.catch_warnings(action="ignore"):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("WeightsUnpickler error:")[2] or str(error)
        told = " ".join(reason.split()).partition(". ")[0]
        raise UserError(
            f"{file} is not what a checkpoint of bebop holds, and is not read: {told}; give a run of your own"
        ) from error
    except Exception as error:  # a file of others, of which torch checks little
        told = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"{file} is of a version of bebop that cannot be read any more ({told}): start the run anew"
        ) from error


if __name__ == "__main__":
    run_main(main)

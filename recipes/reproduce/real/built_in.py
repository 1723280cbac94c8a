"""``python -m recipes.reproduce.real.built_in``: install the head that Bebop ships for SmolLM2, in fp16.

It is the finished head of end-to-end total variation with the best validation. The study itself never reads it: its
heads start as described in ``starts.py``.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bebop.bench.record import show
from bebop.command import Parser, run_main
from bebop.errors import UserError
from bebop.model.smollm2 import HEAD
from recipes.reproduce.real.heads import BEST, DONE
from recipes.reproduce.real.plan import HERE

OBJECTIVE = "e2e_tv"


def main(given: list[str]) -> None:
    """Choose the head, convert it, and report which one it is."""
    Parser(prog="python -m recipes.reproduce.real.built_in", description=__doc__).parse_args(given)
    name, length = best_head(HERE)
    bring(HERE / "heads" / name / BEST, HEAD, {"head": name, "accept length on validation prompts": f"{length:.3f}"})
    show(f"{HEAD.name}: {name}, accept length {length:.3f} on validation prompts\n")


def best_head(place: Path) -> tuple[str, float]:
    """Return the name and accept length of the best finished head.

    Raises:
        UserError: No head has finished training.
    """
    ended = sorted((place / "heads").glob(f"{OBJECTIVE}-[0-9]/{DONE}"))
    if not ended:
        raise UserError(
            f"no head of {OBJECTIVE} in {place / 'heads'} has ended: run first python -m recipes.reproduce.real "
            f"--stage heads --heads shared '{OBJECTIVE}-?'"
        )
    lengths = {path.parent.name: float(json.loads(path.read_text())["best length"]) for path in ended}
    name = max(lengths, key=lambda each: lengths[each])
    return name, lengths[name]


def bring(source: Path, target: Path, told: dict[str, str]) -> None:
    """Write the head in fp16, half the bytes, with ``told`` as the metadata in the file's header."""
    halved = {name: tensor.to(torch.float16) for name, tensor in load_file(source).items()}
    save_file(halved, target, metadata=told)


if __name__ == "__main__":
    run_main(main)

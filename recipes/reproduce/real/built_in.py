"""``python -m recipes.reproduce.real.built_in``: put the head that Bebop brings for SmolLM2 in its place, in fp16.

It is that of end-to-end total variation whose validation was best, of those that have ended. The study itself never
reads it: its heads begin where ``starts.py`` says.
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
    """Choose, convert, say which."""
    Parser(prog="python -m recipes.reproduce.real.built_in", description=__doc__).parse_args(given)
    name, length = best_head(HERE)
    bring(HERE / "heads" / name / BEST, HEAD, {"head": name, "accept length on validation prompts": f"{length:.3f}"})
    show(f"{HEAD.name}: {name}, accept length {length:.3f} on validation prompts\n")


def best_head(place: Path) -> tuple[str, float]:
    """Name and accept length of the head.

    Raises:
        UserError: None has ended.
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
    """Write the head in half the bytes; what is ``told`` stands in the file's header."""
    halved = {name: tensor.to(torch.float16) for name, tensor in load_file(source).items()}
    save_file(halved, target, metadata=told)


if __name__ == "__main__":
    run_main(main)

"""``python -m recipes.reproduce.real_regime.gpu``: ten million tokens, all heads and their evaluation in six minutes.

For a machine with one GPU that is lent for minutes: no network, no Hydra, no reasoning-gym. So the prompts come from a
file (``python -m recipes.reproduce.real_regime --write-prompts FILE``), and nothing but two files is written to
``--out``: ``progress.json``, a row for each shard and look, and the looks at all heads. Verdicts are made from these
anywhere, by ``python -m recipes.reproduce.real_regime --gpu-results DIR``.
"""

import argparse
from pathlib import Path

import torch

from bebop.bench.record import show
from bebop.command import Parser, check_writable, run_main, whole
from bebop.errors import UserError
from recipes.reproduce.real_regime.plan import GPU, TRAINED_AT, load, tiny
from recipes.reproduce.real_regime.rollouts import kept_prompts, of_split, read_prompts
from recipes.reproduce.real_regime.sitting import carried_out

SECONDS = 330


def main(given: list[str]) -> None:
    """Carry out the form for the GPU.

    Raises:
        UserError: There is no GPU, no file of prompts, or no room for the results.
    """
    options = arguments(given)
    dry: bool = options.dry_run
    if not dry and options.prompts is None:
        raise UserError(
            "--prompts is missing: give the file of python -m recipes.reproduce.real_regime --write-prompts"
        )
    if not dry and not torch.cuda.is_available():
        raise UserError("torch finds no GPU here: --dry-run runs everything on the CPU with next to nothing")
    prompts = None if options.prompts is None else read_prompts(options.prompts)
    for split in ("train", "test", "unseen") if prompts is not None else ():
        of_split(prompts or [], split)
    check_writable("--out", options.out)
    form = tiny(GPU) if dry else GPU
    model = load(form)
    if prompts is None:
        prompts = kept_prompts(form, options.out, model)
    path = carried_out(form, model, prompts, options.out, options.seconds)
    show(f"{path} written: heads trained at temperature {TRAINED_AT:g}\n")


def arguments(given: list[str]) -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(prog="python -m recipes.reproduce.real_regime.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts as token ids, from --write-prompts")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    bound = f"of the whole run; no shard begins that would end in the time of the evaluation (default: {SECONDS})"
    parser.add_argument("--seconds", type=whole(1), default=SECONDS, metavar="N", help=bound)
    parser.add_argument("--dry-run", action="store_true", help="the built-in model on the CPU, next to nothing")
    return parser.parse_args(given)


if __name__ == "__main__":
    run_main(main)

"""``python -m recipes.reproduce.real_regime``: heads of SmolLM2 at the paper's entropies, on a CPU; see README.md.

It goes on where it was stopped. ``--seconds N`` ends a sitting after some N seconds with a verdict on what there is.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bebop.bench.record import show
from bebop.command import Parser, check_writable, run_main, whole, writing
from bebop.errors import UserError
from recipes.reproduce.real.arms import Measured
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real.prompts import make_prompts
from recipes.reproduce.real_regime.analysis import TABLES, Found, measure, read
from recipes.reproduce.real_regime.charts import draw
from recipes.reproduce.real_regime.plan import GPU, HERE, RUNS, TEMPERATURES, TRAINED_AT, cpu_form, load, place_of, tiny
from recipes.reproduce.real_regime.rollouts import kept_prompts, write_prompts
from recipes.reproduce.real_regime.sitting import PROGRESS, carried_out, newest_looks, sample_ahead, train_share
from recipes.reproduce.real_regime.training import Share
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import QUICK, results_folder

RESULTS = results_folder(Path(__file__).parent)
MOST = 7 * 24 * 3600  # seconds of a sitting


def main(given: list[str]) -> None:
    """Write the prompts for a GPU, or carry out a sitting of the CPU form, take what a GPU left, and judge."""
    options = arguments(given)
    if options.write_prompts is not None:
        prompts_for_a_gpu(options.write_prompts)
        return
    if options.gpu_results is not None:
        take(options.gpu_results, HERE / GPU.name)
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("real_regime")
    if not (options.judge or options.gpu_results is not None):
        form = cpu_form()
        place = place_of(form)
        agree(place / "form.json", json.loads(json.dumps({"form": repr(form), "trained at": TRAINED_AT})), "rollouts")
        torch.set_num_threads(options.threads)
        model = load(form)
        prompts = kept_prompts(form, place, model)
        if options.sample or options.share is not None:
            part = partial(train_share, share=options.share) if options.share is not None else sample_ahead
            show(f"{part(form, model, prompts, place, options.seconds)} shards\n")
            return
        carried_out(form, model, prompts, place, options.seconds)
    forms = looked_at()
    told = Measured()
    tables: dict[str, list[dict[str, Any]]] = {}
    figures: dict[str, str] = {}
    for name, found in forms.items():
        measured = measure(name, found)
        told.numbers |= measured.numbers
        told.facts |= measured.facts
        tables |= {f"{name}: {title}": lines for title, of in TABLES.items() if (lines := of(found))}
        figures |= draw(name, found, RESULTS / "figures")
    keep(RESULTS, started, told.numbers, tables, figures, settings(forms), told.facts)
    for name in forms:
        show(f"{name}: {told.facts[f'{name}, trained on']}\n")


def arguments(given: list[str]) -> argparse.Namespace:
    """Return the command line; ``--quick`` itself is read in ``study.py``."""
    parser = Parser(prog="python -m recipes.reproduce.real_regime", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run on the built-in model and next to nothing")
    bound = "of this sitting, its evaluation included (default: until all is done)"
    parser.add_argument("--seconds", type=whole(1, MOST), metavar="N", help=bound)
    parser.add_argument("--threads", type=whole(1, 64), default=1, metavar="N", help="of the processor (1)")
    parser.add_argument(
        "--sample", action="store_true", help="train nothing: only sample rollouts and compute their states"
    )
    beside = "train each N-th head from the I-th on, beside processes with the others; a sitting then evaluates all"
    parser.add_argument("--share", type=share, metavar="I/N", help=beside)
    parser.add_argument("--judge", action="store_true", help="train nothing: judge the newest evaluation")
    parser.add_argument(
        "--gpu-results", type=Path, metavar="DIR", help="train nothing: take what real_regime.gpu wrote, and judge"
    )
    parser.add_argument("--write-prompts", type=Path, metavar="FILE", help="only write the prompts for the GPU form")
    return parser.parse_args(given)


def share(text: str) -> Share:
    """Return the I and N of ``I/N``."""
    first, slash, count = text.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 0 <= int(first) < int(count) <= len(RUNS)):
        raise argparse.ArgumentTypeError(f"{text!r} is no share: 0/2 and 1/2 are the halves, N is {len(RUNS)} at most")
    return int(first), int(count)


def prompts_for_a_gpu(file: Path) -> None:
    """Write the prompts of the GPU form."""
    form = tiny(GPU) if QUICK else GPU
    with writing(file):
        prompts = make_prompts(form.plan, load(cpu_form()))
        write_prompts(file, prompts)
    show(f"{file} written: {len(prompts):,} prompts\n")


def take(source: Path, target: Path) -> None:
    """Copy the results of the GPU form to where those of a study are.

    Raises:
        UserError: ``source`` does not hold them.
    """
    looks = newest_looks(source)
    progress = source / PROGRESS
    if looks is None or not progress.is_file():
        raise UserError(f"--gpu-results {source}: there is no looks-*.zip with {PROGRESS} beside it")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.glob("looks-*.zip"):
        old.unlink()
    for file in (progress, looks):
        shutil.copy(file, target / file.name)


def looked_at() -> dict[str, Found]:
    """Return what each form has left, by its name.

    Raises:
        UserError: Neither has been evaluated.
    """
    newest = {name: newest_looks(HERE / name) for name in ("cpu", "gpu")}
    found = {name: read(path) for name, path in newest.items() if path is not None}
    if not found:
        raise UserError(f"{HERE} holds no evaluation: run first python -m recipes.reproduce.real_regime --seconds 3600")
    return found


def settings(forms: Mapping[str, Found]) -> dict[str, Any]:
    """Return what is stored beside the numbers: temperatures, and the place of each form's run."""
    places = {f"{name}, run": found.progress["place"] for name, found in forms.items()}
    return {"trained at temperature": TRAINED_AT, "temperatures": TEMPERATURES, **places}


if __name__ == "__main__":
    run_main(main)

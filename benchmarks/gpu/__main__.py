"""``python -m bebop.bench.gpu`` (``make gpu``): seven stages on one GPU, the most valuable ones first, in a given time.

A GPU is available for minutes, on a machine without a network. So this command

- imports only what such a machine has beside torch, Triton and transformers: no Ray, no Hydra;
- runs each stage in its own process, so that an error, a lack of memory or a timeout ends only that stage;
- writes ``<number>_<stage>.json`` as each row is measured, and leaves out, with a line, stages that would be late;
- ends by itself after ``--seconds``, with a page of ratios and their consequences (``summary.md``): eight files.

``--dry-run`` runs every stage on a CPU with tiny shapes: its numbers mean nothing, but it finds mistakes before the GPU
run.
"""

import argparse
import multiprocessing
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.bench.gpu.stage import GPUS, Context
from bebop.bench.gpu.stages import STAGES
from bebop.bench.gpu.summary import summary
from bebop.command import check_writable, run_main
from bebop.errors import UserError
from bebop.run_dir.machine import machine

SECONDS = 480
LEAST = 0.4  # of its seconds that a stage needs: with less it is left out


def main(arguments: list[str]) -> int:
    """Run the stages; return 1 if one of them failed."""
    options = _parser().parse_args(arguments)
    dry: bool = options.dry_run
    if not dry and not (GPUS.exists() or shutil.which("nvidia-smi")):
        raise UserError("there is no NVIDIA GPU here: --dry-run runs every stage on the CPU with tiny shapes")
    out: Path = options.out or Path("runs") / f"gpu-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    out.mkdir(parents=True, exist_ok=True)
    origin, ends, outcomes = record.begin(), time.monotonic() + options.seconds, {}
    for number, stage in enumerate(STAGES):
        if stage.name not in options.stage if options.stage else stage.asked:
            continue
        seconds = stage.seconds * options.seconds / SECONDS
        left = ends - time.monotonic()
        if left < LEAST * seconds:
            outcomes[stage.name] = f"left out: {left:.0f} s were left, it needs {seconds:.0f}"
        else:
            context = Context(
                file=out / f"{number}_{stage.name}.json", seconds=min(seconds, left), dry=dry, origin={**origin}
            )
            outcomes[stage.name] = carried_out(stage.run, context)
        sys.stderr.write(f"{stage.name}: {outcomes[stage.name]}\n")
    text = summary(out, machine(), outcomes)
    (out / "summary.md").write_text(text)
    sys.stdout.write(text)
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def carried_out(run: Any, context: Context) -> str:
    """Run a stage in its own process, with half as much time again to finish what it has begun.

    The parent never touches the GPU, so it is safe to fork it, which spares each stage the imports.
    """
    began = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_stage, args=(run, context))
    process.start()
    process.join(1.5 * context.seconds + 10)
    if process.is_alive():
        process.kill()
        process.join()
        return f"failed: ended after {time.monotonic() - began:.0f} s, {context.seconds:.0f} were planned"
    took = f"{time.monotonic() - began:.0f} s"
    error = context.file.with_suffix(".error")
    if process.exitcode == 0:
        return took
    told = error.read_text().strip() if error.exists() else f"exit code {process.exitcode}"
    error.unlink(missing_ok=True)
    return f"failed after {took}: {told}"


def _stage(run: Any, context: Context) -> None:
    """Measure, in the stage's own process; keep the last line of an error, and show the rest."""
    try:
        run(context)
        context.write()
    except BaseException as error:
        traceback.print_exc()
        context.file.with_suffix(".error").write_text(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        context.write()  # last, as it fails too where the GPU is what failed: it asks for the card's name
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bebop.bench.gpu", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"of the whole run (default: {SECONDS})")
    names: Sequence[str] = [stage.name for stage in STAGES]
    parser.add_argument(
        "--stage", nargs="+", choices=names, help="only these (default: all but job, precision and headline)"
    )
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny shapes: a test of the run itself")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/gpu-<date and time>)")
    return parser


if __name__ == "__main__":
    run_main(main)

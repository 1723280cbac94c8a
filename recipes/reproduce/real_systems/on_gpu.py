"""The study in minutes on a GPU: ``python -m recipes.reproduce.real_systems.on_gpu --seconds 350 --out DIR``.

Each part is trained in its own process, which ends after one and a half times its seconds. Then the arms decode in
turns until the time is over. Every row is written at once, in ``<number>_<stage>.json``. The rules are those of the
study, on shorter trainings; ``findings.json`` has their verdicts. ``--dry-run`` does all of it on a CPU with tiny
sizes.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from bebop.bench import record
from bebop.bench.gpu.__main__ import LEAST, carried_out
from bebop.bench.gpu.stage import GPUS, Context, Stage
from bebop.command import Parser, check_writable, run_main, whole
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from recipes.reproduce.real.plan import require_shipped_head
from recipes.reproduce.real_systems.findings import RULES
from recipes.reproduce.real_systems.plan import CPU, SMOKE, Sizes
from recipes.reproduce.verdicts import judge

SECONDS = 350
# Fewer updates than on a processor: a GPU run is for the speed of the arms, beside accept lengths.
GPU = replace(
    CPU,
    device="cuda",
    dtype="bfloat16",
    slots=256,
    train={**CPU.train, "save_every": 0},  # a stopped run cannot go on there
    options={
        **CPU.options,
        "firp": {**CPU.options["firp"], "steps": 200},
        "pivot": {**CPU.options["pivot"], "rollouts": 8},
        "pipo_sft": {**CPU.options["pipo_sft"], "steps": 300},
        "pipo_opd": {**CPU.options["pipo_opd"], "steps": 60},
    },
    rounds=4,
    answers={"open": 2, "words": 8, "word": 16},
)
SHARES = {"firp": 60.0, "block": 60.0, "pivot": 60.0, "pipo_sft": 50.0, "pipo_opd": 40.0}  # seconds of 350


def train(place: Path, sizes: Sizes, name: str, context: Context) -> None:
    """Train a part, and write a row for each number of its own report."""
    from recipes.reproduce.real_systems.parts import train_parts, trained

    began = time.monotonic()
    train_parts(place, sizes, [name], lambda _: None)
    context.keep("seconds", time.monotonic() - began, part=name)
    for one in trained(place):
        if one.name == name:
            for what, interval in one.results.items():
                if isinstance(interval, dict) and "value" in interval:
                    context.keep(what, interval["value"], low=interval["low"], high=interval["high"], part=name)


def decode(place: Path, sizes: Sizes, context: Context) -> None:
    """Decode with all arms whose parts are trained, round by round, and judge the rules."""
    from recipes.reproduce.real_systems.analysis import of_rounds
    from recipes.reproduce.real_systems.rounds import measure

    found = measure(place, sizes, lambda: None, lambda: context.left < 0, keep_rows(context))
    numbers = of_rounds(found)
    for name, number in numbers.items():
        context.keep(name, number.value, low=number.low, high=number.high, rounds=number.seeds)
    findings = [asdict(finding) for finding in judge(RULES, numbers)]
    (context.file.parent / "findings.json").write_text(json.dumps(findings, indent=1) + "\n")


def keep_rows(context: Context) -> Callable[[str, int, str, dict[str, object]], None]:
    """Return a function that writes a row for an arm as soon as it has decoded."""

    def keep(setting: str, turn: int, arm: str, numbers: dict[str, object]) -> None:
        context.keep("decoded", None, setting=setting, turn=turn, arm=arm, **numbers)

    return keep


def stages(place: Path, sizes: Sizes) -> list[Stage]:
    """Return the stages in the order in which they run; the last one gets the remaining time."""
    parts = [
        Stage(name=name, seconds=seconds, run=partial(train, place, sizes, name), decides="whether drafts are accepted")
        for name, seconds in SHARES.items()
    ]
    rest = SECONDS - sum(SHARES.values())
    last = Stage(name="rounds", seconds=rest, run=partial(decode, place, sizes), decides="speed beside plain decoding")
    return [*parts, last]


def main(given: list[str]) -> int:
    """Run the stages; the exit code is 1 if one of them failed."""
    options = arguments(given)
    if not options.dry_run and not (GPUS.exists() or shutil.which("nvidia-smi")):
        raise UserError("there is no NVIDIA GPU here: --dry-run runs every stage on the CPU with tiny shapes")
    check_writable("--out", options.out)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = SMOKE if options.dry_run else replace(GPU, model=options.model)
    require_shipped_head(sizes.model)
    resolve(sizes.model)  # converts SmolLM2 before the clock of the first stage runs
    # Not below --out: a lent machine returns few files, and parts come with checkpoints and corpora.
    parts = Path(tempfile.mkdtemp(prefix="bebop-parts-"))
    origin, ends, failed = record.begin(), time.monotonic() + options.seconds, False
    for number, stage in enumerate(stages(parts, sizes)):
        seconds, left = stage.seconds * options.seconds / SECONDS, ends - time.monotonic()
        if left < LEAST * seconds:
            outcome = f"left out: {left:.0f} s were left, it needs {seconds:.0f}"
        else:
            seconds = left if stage.name == "rounds" else min(seconds, left)
            file = options.out / f"{number}_{stage.name}.json"
            context = Context(file=file, seconds=seconds, dry=options.dry_run, origin={**origin})
            outcome = carried_out(stage.run, context)
        failed |= outcome.startswith("failed")
        sys.stderr.write(f"{stage.name}: {outcome}\n")
    shutil.rmtree(parts)
    return int(failed)


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="python -m recipes.reproduce.real_systems.on_gpu", description=__doc__)
    parser.add_argument("--seconds", type=whole(1), default=SECONDS, help=f"of the whole run (default: {SECONDS})")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--model", default="smollm2", help="folder of SmolLM2 (default: the one in the cache)")
    parser.add_argument(
        "--dry-run", action="store_true", help="on the CPU, on next to nothing: a test of the run itself"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    run_main(main)

"""Pre-RL adaptation: ``python -m bebop.adapt model.path=DIR [overrides]`` trains the MTP head of a checkpoint, or with
``part=NAME`` another part that a decoding system needs."""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from bebop.command import check_writable, run_main, writing
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, as_yaml, resumed_overrides, write_down
from bebop.config.docs import about, asked, overview
from bebop.config.job import ObjectiveName
from bebop.errors import UserError
from bebop.run_dir.checkpoints import HEADS, Store
from bebop.run_dir.folder import RunFolder
from bebop.run_dir.resume_security import refuse_foreign
from bebop.systems import PARTS

if TYPE_CHECKING:
    from bebop.adaptation.ranks import Ranks  # imports torch

HELP = """usage: python -m bebop.adapt [--help [GROUP]] [--cfg] [override ...]

Trains the MTP head of a Hugging Face checkpoint on the acceptance of its own drafts, the backbone frozen, and writes
the checkpoint back in the layout it came in. Without arguments: the built-in model on its three tasks.

  --help        this text
  --help GROUP  the settings of a group: default, meaning, what is allowed (also docs/settings.md)
  --cfg         print the configuration and stop
  --trust       resume a run of somebody else although its settings name code or servers (docs/security.md)

Choose from a group with GROUP=CHOICE, set a value with GROUP.NAME=VALUE:
{groups}  dir, out, resume, seed: where to, and how to go on

Objectives: {objectives}.
Parts (part=NAME, head if not given):
{parts}
Examples:
  python -m bebop.adapt                                       the built-in model, some minutes on two cores
  python -m bebop.adapt model.path=DIR task=file task.path=questions.jsonl
  python -m bebop.adapt model.path=DIR head.lr=1e-3           a model without a head, which gets a fresh one
  python -m bebop.adapt model.path=DIR data.source=file data.path=text.jsonl
  python -m bebop.adapt dir=RUN resume=true                   go on from the last checkpoint of a run
  torchrun --nproc-per-node 8 -m bebop.adapt model.path=DIR   on eight GPUs

Output goes to dir (default runs/adapt-<date and time>): model/ is the adapted checkpoint, report.html shows before
and after.
"""


def main(arguments: list[str]) -> int:
    """Parse the arguments, adapt, print the result and return the exit code."""
    if (group := asked(arguments)) is not None:
        parts = "".join(f"  {name:13} {part.summary}\n" for name, part in PARTS.items())
        objectives = ", ".join(get_args(ObjectiveName))
        text = HELP.format(groups=overview(AdaptConfig), objectives=objectives, parts=parts)
        sys.stdout.write(about(AdaptConfig, group) if group else text)
        return 0
    given = ["trust=true" if a == "--trust" else a for a in arguments if a != "--cfg"]
    unknown = [a for a in given if a.startswith("--")]
    if unknown:
        raise UserError(
            f"{unknown[0]} is no option: there are --help, --cfg and --trust; settings are given as NAME=VALUE"
        )
    overrides = resumed_overrides(given, "adapt")
    config = adapt_config(overrides)
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config))
        return 0
    if config.resume:
        refuse_foreign(config.dir, config, given, "adapt")
    look_at_rows(config)
    from bebop.adaptation.ranks import joined  # torch and transformers take seconds; errors should not wait

    with joined(config.model.device) as ranks:
        from bebop.runtime.preflight import check_adaptation

        check_adaptation(config)
        with contextlib.closing(run_folder(config, ranks)) as folder:
            check_folder(folder, config, ranks)
            job = PARTS[config.part].job()(config, folder.path, ranks)
            job.prepare()
            begin(config, overrides, folder, ranks)
            results = job.run()
            if ranks.rank == 0:
                sys.stdout.write(f"{results}" + "".join(f"{line}\n" for line in job.ended(results)))
    return 0


def look_at_rows(config: AdaptConfig) -> None:
    """Raise ``UserError`` for any fault in the rows of a file.

    It runs before torch is imported, which takes seconds.
    """
    from bebop.tasks.files import check_row, read_rows
    from bebop.tasks.source import open_items

    data = config.data
    if data.source == "file":
        for where, row in read_rows(Path(str(data.path)), "data.path")[: data.sequences or None]:
            if not {"prompt_ids", "answer_ids"} <= row.keys():
                check_row(row, data.prompt_key, data.answer_key, "data", where)
    elif not config.task.turns:
        open_items(config.task)


def begin(config: AdaptConfig, overrides: Sequence[str], folder: RunFolder, ranks: "Ranks") -> None:
    """Create the run folder and print its path, once no rank has found a fault."""
    ranks.wait()
    if ranks.rank == 0:
        with writing(folder.path):
            folder.open()
            write_down(config, overrides, folder.path)
        from bebop.runtime.terminal import about_adaptation  # the model is loaded by now, and torch with it

        sys.stderr.write("".join(f"{line}\n" for line in (f"run folder: {folder.path}", *about_adaptation(config))))


def run_folder(config: AdaptConfig, ranks: "Ranks") -> RunFolder:
    """Return the run folder, not yet checked or created."""
    from bebop.adaptation.corpus import begun  # imports torch

    names = ranks.union({ranks.rank: f"runs/adapt-{time.strftime('%Y%m%d-%H%M%S')}"})  # clocks differ: rank 0 decides
    path = Path(config.dir or names[0]).resolve()
    return RunFolder(path, "dir", config.resume, Store(path, HEADS), "an adaptation", begun)


def check_folder(folder: RunFolder, config: AdaptConfig, ranks: "Ranks") -> None:
    """Raise ``UserError`` if the adaptation may not write there; only rank 0, which writes, checks."""
    if ranks.rank > 0:
        return
    from bebop.model.checkpoint import resolve
    from bebop.run_dir.identity import identity  # reads the model's folder, with torch and transformers

    check_writable("dir", folder.path)
    if config.out is not None:
        check_writable("out", Path(config.out).absolute())
        if Path(config.out).resolve() == resolve(config.model.path).resolve():
            raise UserError(f"out={config.out!r} is not possible: it is the model's own folder, which is kept")
    folder.check(config)
    folder.identify(identity(config.model, {"task.path": config.task.path, "data.path": config.data.path}))


if __name__ == "__main__":
    run_main(main)

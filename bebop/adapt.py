"""Pre-RL adaptation: ``python -m bebop.adapt model.path=DIR [overrides]`` trains the MTP head of a checkpoint."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bebop.adaptation.config import AdaptConfig
from bebop.adaptation.ranks import Ranks, joined
from bebop.command import check_writable, run_main, writing
from bebop.compose import adapt_config, as_yaml, saved_overrides, write_down
from bebop.errors import UserError

HELP = """usage: python -m bebop.adapt [--help] [--cfg] [override ...]

Trains the MTP head of a Hugging Face checkpoint on the acceptance of its own drafts, the backbone frozen, and writes
the checkpoint back in the layout it came in. Without arguments: the built-in model on its three tasks.

  --help    this text
  --cfg     print the configuration and stop

Set a value with GROUP.NAME=VALUE:
  model       path, dtype, device                                     which checkpoint
  task        task=NAME, or task=file task.path=FILE                  questions that the model is to answer
  data        source=sample|file, sequences, path, sampling...        text to train on
  head        objective, depth, lr, max_grad_norm, max_tokens, ...    what the head is trained on
  train       steps, rows_per_step, warm_steps, eval_every, ...       how long
  evaluation  prompts, draft_tokens                                   held-out prompts, before and after
  dir, out, resume, seed                                              where to, and how to go on

Objectives: {objectives}.

Examples:
  python -m bebop.adapt                                       the built-in model, some minutes on two cores
  python -m bebop.adapt model.path=DIR task=file task.path=questions.jsonl head.lr=3.5e-5
  python -m bebop.adapt model.path=DIR data.source=file data.path=text.jsonl
  python -m bebop.adapt dir=RUN resume=true                   go on from the last checkpoint of a run
  torchrun --nproc-per-node 8 -m bebop.adapt model.path=DIR   on eight GPUs

Every setting with its meaning: bebop/adaptation/config.py and HeadConfig in bebop/config.py. Output goes to dir
(default runs/adapt-<date and time>): model/ is the adapted checkpoint, report.html shows before and after.
"""


def main(arguments: list[str]) -> int:
    """Parse, adapt, say what changed; the exit code."""
    if "--help" in arguments or "-h" in arguments:
        from bebop.trainer.objectives import OBJECTIVES

        sys.stdout.write(HELP.format(objectives=", ".join(OBJECTIVES)))
        return 0
    overrides = [a for a in arguments if a != "--cfg"]
    unknown = [a for a in overrides if a.startswith("--")]
    if unknown:
        raise UserError(f"{unknown[0]} is no option: there are --help and --cfg; settings are given as NAME=VALUE")
    overrides = saved_overrides(overrides) + overrides
    config = adapt_config(overrides)
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config))
        return 0
    with joined(config.model.device) as ranks:
        from bebop.adaptation.job import Adaptation  # torch and transformers take seconds; errors should not wait
        from bebop.preflight import check_adaptation

        check_adaptation(config)
        folder = place(config, ranks)
        job = Adaptation(config, folder, ranks)
        job.prepare()
        begin(config, overrides, folder, ranks)
        results = job.run()
        if ranks.rank == 0:
            sys.stdout.write(f"{results}checkpoint: {config.out or folder / 'model'}\n")
            sys.stdout.write(f"report: {folder / 'report.html'}\n")
    return 0


def begin(config: AdaptConfig, overrides: Sequence[str], folder: Path, ranks: Ranks) -> None:
    """Make the run folder and say where it is, once nothing was found wrong on any rank."""
    ranks.wait()
    if ranks.rank == 0:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_down(config, overrides, folder)
        sys.stderr.write(f"run folder: {folder}\n")


def place(config: AdaptConfig, ranks: Ranks) -> Path:
    """Where the run folder will be made; one that holds an adaptation is only taken to go on with it."""
    from bebop.model.checkpoint import resolve

    names = ranks.union({ranks.rank: f"runs/adapt-{time.strftime('%Y%m%d-%H%M%S')}"})  # clocks differ: rank 0's counts
    folder = Path(config.dir or names[0]).resolve()
    check_writable("dir", folder)
    if ranks.rank == 0 and (folder / "metrics.jsonl").exists() and not config.resume:
        raise UserError(f"dir={str(folder)!r} holds an adaptation: set resume=true to go on with it, or choose another")
    if config.out is not None:
        check_writable("out", Path(config.out).absolute())
        if Path(config.out).resolve() == resolve(config.model.path).resolve():
            raise UserError(f"out={config.out!r} is not possible: it is the model's own folder, which is kept")
    return folder


if __name__ == "__main__":
    run_main(main)

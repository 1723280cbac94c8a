"""The main job: ``python -m bebop.run [overrides]``, asynchronous GRPO with speculative rollouts on Ray."""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bebop.command import check_writable, run_main, shown_command, writing
from bebop.config.compose import as_yaml, job_config, model_defaults, resumed_overrides, write_down
from bebop.config.docs import about, asked, overview
from bebop.config.job import JobConfig, TaskConfig
from bebop.errors import UserError
from bebop.run_dir.checkpoints import STEPS, Store
from bebop.run_dir.folder import RunFolder
from bebop.run_dir.resume_security import refuse_foreign

if TYPE_CHECKING:
    from bebop.runtime.session import Dashboard
    from bebop.tasks.source import Items

SECTION = "runtime."  # section of dir and resume
HELP = """usage: python -m bebop.run [--help [GROUP]] [--cfg] [override ...]

Runs GRPO with rollouts on speculative decoding, on Ray. Without arguments: the built-in model on chain_sum.

  --help        this text
  --help GROUP  the settings of a group: default, meaning, what is allowed (also docs/settings.md)
  --cfg         print the configuration and stop
  --trust       resume a run of somebody else although its settings name code or servers (docs/security.md)

Choose from a group with GROUP=CHOICE, set a value with GROUP.NAME=VALUE:
{groups}
Examples:
  python -m bebop.run                                     the built-in model, about eight minutes on two cores
  python -m bebop.run task=gcd decoding=target_only       another task, another decoding system
  python -m bebop.run rollout.staleness=0 trainer.steps=5 synchronous, five steps
  python -m bebop.run model.path=DIR model.init_mtp=true  a Hugging Face folder without MTP weights
  python -m bebop.run rollout=sglang model.path=DIR       SGLang as the engine
  python -m bebop.run runtime.dir=RUN runtime.resume=true go on from the last checkpoint of a run
  python -m bebop.run runtime=verl bebop=reasoning ...    a job of verl, with verl's overrides (recipes/verl/README.md)

Output goes to runtime.dir (default runs/<date and time>).
"""


def main(arguments: list[str]) -> int:
    """Parse the command, run the job and write the report; return the exit code."""
    if (group := asked(arguments)) is not None:
        sys.stdout.write(about(JobConfig, group) if group else HELP.format(groups=overview(JobConfig)))
        return 0
    if "runtime=verl" in arguments:
        from bebop.verl_job.run import run  # verl has a configuration of its own: nothing of ours is composed

        return run([a for a in arguments if a != "runtime=verl"])
    given = [f"{SECTION}trust=true" if a == "--trust" else a for a in arguments if a != "--cfg"]
    unknown = [a for a in given if a.startswith("--")]
    if unknown:
        raise UserError(
            f"{unknown[0]} is no option: there are --help, --cfg and --trust; settings are given as NAME=VALUE"
        )
    overrides = resumed_overrides(given, "config", SECTION)
    config = job_config(overrides)
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config))
        return 0
    if config.runtime.resume:
        refuse_foreign(config.runtime.dir, config, given, "config", SECTION)
    folder, config = choose_folder(config)
    with contextlib.closing(folder):
        check_writable("runtime.dir", folder.path)
        folder.check(config)

        items = questions(config.task)
        # Torch and Ray take seconds to import, and --help and errors should not wait for them.
        from bebop.run_dir.identity import job_identity
        from bebop.runtime.job import run_job
        from bebop.runtime.preflight import check_evaluation, check_job
        from bebop.runtime.terminal import about_run

        source = check_job(config, items)
        held_out = check_evaluation(config)
        folder.identify(job_identity(config))

        def begin(dashboard: "Dashboard | None") -> None:
            with writing(folder.path):
                folder.open()
                write_down(config, overrides, folder.path, SECTION)
            say([f"run folder: {folder.path}", *about_run(config, model_defaults(config), dashboard)])

        finished = run_job(config, folder.path, source.prompt, begin, held_out)
        end(config, folder.path, finished)
    return 0 if finished else 130


def say(lines: Sequence[str]) -> None:
    """Write lines to stderr: stdout is reserved for a command's results."""
    sys.stderr.write("".join(f"{line}\n" for line in lines))


def questions(config: TaskConfig) -> "Items | None":
    """Return the questions of a task, checked against its reward; None for an environment."""
    from bebop.tasks.rewards import check_reward
    from bebop.tasks.source import open_items

    if config.turns:
        return None
    items = open_items(config)
    check_reward(config, items)
    return items


def choose_folder(config: JobConfig) -> tuple[RunFolder, JobConfig]:
    """Return the run folder, not created yet, and the configuration with its path."""
    runtime = config.runtime
    path = Path(runtime.dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    folder = RunFolder(path, "runtime.dir", runtime.resume, Store(path, STEPS))
    return folder, dataclasses.replace(config, runtime=dataclasses.replace(runtime, dir=str(path)))


def end(config: JobConfig, run_dir: Path, finished: bool) -> None:
    """Write report.html, unless it is disabled or no step was finished, and print the result of the run."""
    from bebop.driver.evaluation import best_line
    from bebop.metrics.sinks import read_jsonl
    from bebop.report.page import conclude
    from bebop.runtime.terminal import ended_run

    page = run_dir / "report.html" if config.monitor.plots else None
    stepped = any(row["step"] for row in read_jsonl(run_dir / "metrics.jsonl"))  # step 0 is an evaluation alone
    said = conclude(run_dir, page) if stepped else None
    again = "" if finished else shown_command("run", f"runtime.dir={run_dir}", "runtime.resume=true")
    best = best_line(run_dir) if config.evaluation.every else None
    say([*ended_run(run_dir, said, page if stepped else None, again), *([best] if best else [])])


if __name__ == "__main__":
    run_main(main)

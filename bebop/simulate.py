"""``python -m bebop.simulate``: predicts a job on GPUs that one does not have.

With ``--gpu NAME`` it answers by arithmetic whether speculative decoding pays (``bebop/simulation/pays.py``), with
``memory`` whether an update fits some GPUs (``bebop/simulation/memory.py``). Without either, it simulates a whole job
in virtual time.
"""

import argparse
import dataclasses
import json
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from bebop.command import Parser, check_writable, run_main, writing
from bebop.config.compose import as_yaml, simulate_config
from bebop.config.docs import about, asked, overview
from bebop.config.fields import Setting, from_dict, settings
from bebop.config.simulate import MemoryConfig, PaysConfig, SimulateConfig
from bebop.errors import UserError
from bebop.run_dir.checkpoints import write_text

HELP = """usage: python -m bebop.simulate --gpu NAME [--params SIZE] [--accept CHANCE] [--draft-tokens K] ...
       python -m bebop.simulate memory [model=NAME] [gpus=N] [gpu=NAME] ... [--json]
       python -m bebop.simulate [--help [GROUP]] [--cfg] [override ...]

With --gpu: whether speculative decoding pays on that card, by arithmetic; --gpu h100 --help lists the options.

With memory: whether an update of a dense model fits, and what to change if not; memory --help lists its settings.

Without: runs the job's own loop, worker pool, buffer and monitor in virtual time over engines and a trainer that do
nothing but take their time, and says how many trajectories a second come of it, who waits, how stale tokens are, how
the GPUs are best shared, and at which draft length and batch speculation pays. All of it is prediction: as good as the
costs.

  --help        this text
  --help GROUP  the settings of a group: default, meaning, what is allowed (also docs/settings.md)
  --cfg         print the configuration and stop

Set a value with GROUP.NAME=VALUE:
{groups}  grain, split, sweep, seed, dir: --help NAME

Examples:
  python -m bebop.simulate --gpu h100 --gpus 8 --params 7b --accept 0.7 --draft-tokens 3
  python -m bebop.simulate memory model=qwen3-8b gpus=8 gpu=h100
  python -m bebop.simulate
  python -m bebop.simulate fleet.workers=64 fleet.groups_per_step=256 fleet.staleness=2 dir=runs/fleet
  python -m bebop.simulate completions.median=4000 completions.sigma=1 completions.longest=65536 grain=64

With dir: simulation.json and simulation.html there. Costs, and how good predictions are: docs/simulation.md.
"""


def main(arguments: list[str]) -> int:
    """Parse the arguments, simulate, print the result and return the exit code."""
    if any(word == "--gpu" or word.startswith("--gpu=") for word in arguments):
        return _pays(arguments)
    if arguments[:1] == ["memory"]:
        return _memory(arguments[1:])
    if (group := asked(arguments)) is not None:
        text = HELP.format(groups=overview(SimulateConfig))
        sys.stdout.write(about(SimulateConfig, group) if group else text)
        return 0
    overrides = [a for a in arguments if a != "--cfg"]
    if unknown := [a for a in overrides if a.startswith("--")]:
        raise UserError(
            f"{unknown[0]} is no option: there are --help and --cfg, more with --gpu NAME; settings are NAME=VALUE"
        )
    config = simulate_config(overrides)
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config))
        return 0
    if config.dir is not None:
        check_writable("dir", Path(config.dir))
    return _simulated(config)


# ---- will it pay?

EPILOG = """Example: --gpu h100 --gpus 8 --params 7b --accept 0.7 --draft-tokens 3. The model, its constants and how far
it was off on published speed-ups: docs/will_it_pay.md."""


def _pays(arguments: list[str]) -> int:
    """Print whether drafts pay and return the exit code."""
    config, as_json = _pays_config(arguments)
    from bebop.simulation.pays import Fleet, answer, page

    found = answer(Fleet.of(config))
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if as_json else page(found, config))
    return 0


def _pays_config(arguments: list[str]) -> tuple[PaysConfig, bool]:
    """Return the question, and whether to answer in JSON; every setting of ``PaysConfig`` is an option."""
    parser = Parser(
        prog="python -m bebop.simulate", description="Will speculative decoding pay?", epilog=EPILOG, allow_abbrev=False
    )
    for one in settings(PaysConfig):
        limit = f"; {one.limit.words}" if one.limit else ""
        default = "" if one.default is None else f" (default {_written(one.default)})"
        words = f"{one.meaning}{limit}{default}".replace("%", "%%")
        parser.add_argument(_option(one.name), metavar="VALUE", default=argparse.SUPPRESS, help=words)
    parser.add_argument("--json", action="store_true", help="the answer for programs")
    given = vars(parser.parse_args(arguments))
    as_json = given.pop("json")
    hints = get_type_hints(PaysConfig)
    try:
        return PaysConfig(**{name: _read(name, hints[name], text) for name, text in given.items()}), as_json
    except UserError as error:
        raise UserError(re.sub(r"^--[a-z_]+", lambda found: found[0].replace("_", "-"), str(error))) from None


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _written(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _read(name: str, hint: Any, text: str) -> Any:
    """Return an option's text as its setting's type."""
    kind = next((k for k in get_args(hint) if k is not type(None) and isinstance(k, type)), hint)
    if hint == tuple[float, ...]:
        return tuple(_number(name, float, word) for word in text.split(","))
    return _number(name, kind, text) if kind in (int, float) else text


def _number(name: str, kind: type, text: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value != value:  # nan passes no comparison
        word = "a whole number" if kind is int else "a number"
        raise UserError(f"{_option(name)}={text!r} is not possible: {word} is wanted here")
    return value


# ---- does it fit?

MEMORY_HELP = """usage: python -m bebop.simulate memory [NAME=VALUE ...] [--json]

Says by arithmetic whether an update of a dense model fits the memory of some GPUs, and what to change where it does
not. --json: the answer for programs. Settings:
{settings}
Example: python -m bebop.simulate memory model=qwen3-8b gpus=8 gpu=h100 checkpointing=true
"""


def _memory(arguments: list[str]) -> int:
    """Print whether an update fits and return the exit code, 0 either way."""
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(MEMORY_HELP.format(settings="".join(map(_described, settings(MemoryConfig)))))
        return 0
    given = {}
    for word in arguments:
        name, separator, text = word.partition("=")
        if word == "--json":
            continue
        if not separator or word.startswith("-"):
            raise UserError(f"{word!r} is not possible: give NAME=VALUE, --json or --help")
        given[name] = _value(word, text)
    config = from_dict(MemoryConfig, given)
    from bebop.simulation.memory import Question, answer, page

    found = answer(Question.of(config))
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if "--json" in arguments else page(found))
    return 0


def _value(word: str, text: str) -> Any:
    """Return ``text`` parsed as YAML."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise UserError(f"{word!r} cannot be read: give NAME=VALUE") from None


def _described(one: Setting) -> str:
    default = "null" if one.default is None else str(one.default).lower() if one.kind is bool else one.default
    limit = f"; {one.limit.words}" if one.limit else ""
    return f"  {f'{one.name}={default}':24} {one.meaning}{limit}\n"


# ---- a whole job


def _simulated(config: SimulateConfig) -> int:
    from bebop.simulation.page import MARK, summary, write  # numpy and plotly take a moment; errors should not wait
    from bebop.simulation.run import simulate
    from bebop.simulation.search import best_splits, speculation

    result = simulate(config)
    shared = best_splits(config) if config.split else []
    gains = speculation(config) if config.sweep else []
    lines = [MARK, *(f"  {name:26} {value}" for name, value in summary(result))]
    if shared:
        best = max(shared, key=lambda split: split.result.trajectories_per_second)
        lines.append(
            f"  best split                 {best.trainer_gpus} GPUs for the trainer, {best.workers} workers: "
            f"{best.result.trajectories_per_second:.3g} trajectories/s"
        )
    if gains:
        for batch in (min(one.batch for one in gains), config.fleet.slots):
            most = max((one for one in gains if one.batch == batch), key=lambda one: one.gain)
            lines.append(f"  best K at batch {batch:<10} {most.draft_tokens}: {most.gain:.3g} times plain decoding")
    if config.dir is not None:
        folder = Path(config.dir)
        content = {
            "predicted": True,
            "config": dataclasses.asdict(config),
            "result": dataclasses.asdict(result),
            "splits": [dataclasses.asdict(one) | {"result": _without_rows(one.result)} for one in shared],
            "speculation": [dataclasses.asdict(one) for one in gains],
        }
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / "simulation.json", json.dumps(content, indent=1) + "\n")
            write_text(folder / "simulation.html", write(config, result, shared, gains))
        lines += [str(folder / name) for name in ("simulation.json", "simulation.html")]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _without_rows(result: object) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(result).items() if name != "rows"}  # type: ignore[call-overload]


if __name__ == "__main__":
    run_main(main)

"""``python -m bebop.certify [overrides]``: does a live engine sample from the distribution that it claims?"""

import contextlib
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bebop.command import check_writable, run_main, writing
from bebop.config.certify import CertifyConfig
from bebop.config.compose import as_yaml, certify_config, write_down
from bebop.config.docs import about, asked, overview
from bebop.errors import UserError

HELP = """usage: python -m bebop.certify [--help [GROUP]] [--cfg] [--quick] [override ...]

Says whether the tokens of a running engine, speculation on, are drawn from exactly the distribution that it claims.
Without arguments: the embedded engine with the built-in model, some minutes on two cores; a minute with --quick.

  --help        this text
  --help GROUP  the settings of a group: default, meaning, what is allowed (also docs/settings.md)
  --cfg         print the configuration and stop
  --museum      certify planted public faults of engines instead, from a checkout: --museum --help
  --quick       quick=true: 5,000 tokens in all, and what so many can see

Choose from a group with GROUP=CHOICE, set a value with GROUP.NAME=VALUE:
{groups}  quick, reference, logprobs, tokens, stress, limit_tv, alpha, dir, seed, ...: --help NAME

Examples:
  python -m bebop.certify decoding=bebop_tree tokens=50000
  python -m bebop.certify engine.name=sglang engine.url=http://127.0.0.1:30000 model.path=DIR
  python -m bebop.certify engine.name=openai engine.url=http://127.0.0.1:8000 model.path=DIR sampling.temperature=0.7
  python -m bebop.certify engine.name=function engine.function=my.module:sample model.path=DIR

Writes certificate.json and report.html to dir. Exit code: 0 pass, 1 fail, 3 inconclusive, 2 a mistake.
"""


def main(arguments: list[str]) -> int:
    """Make a certificate from command-line arguments and return the exit code."""
    if "--museum" in arguments:
        return _museum([a for a in arguments if a != "--museum"])
    if (group := asked(arguments)) is not None:
        text = HELP.format(groups=overview(CertifyConfig))
        sys.stdout.write(about(CertifyConfig, group) if group else text)
        return 0
    overrides = ["quick=true" if a == "--quick" else a for a in arguments if a != "--cfg"]
    unknown = [a for a in overrides if a.startswith("--")]
    if unknown:
        raise UserError(
            f"{unknown[0]} is no option: there are --help, --cfg and --quick; settings are given as NAME=VALUE"
        )
    config = certify_config(overrides)
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config))
        return 0
    return _certified(config, overrides)


def _museum(arguments: list[str]) -> int:
    try:
        museum = import_module("recipes.certify.museum.__main__")
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("recipes"):
            raise
        raise UserError("--museum needs a checkout of the repository: its faults are no part of the package") from None
    return int(museum.main(arguments))


def _certified(config: CertifyConfig, overrides: Sequence[str]) -> int:
    from bebop.certify.report import write_page
    from bebop.certify.run import make_run  # torch and transformers take seconds; errors should not wait

    folder = Path(config.dir or f"runs/certify-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    check_writable("dir", folder)
    with contextlib.ExitStack() as stack:
        run = make_run(config, stack)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            write_down(config, overrides, folder)
        certificate = run.run()
    paths = certificate.write(folder), write_page(folder, certificate)
    seen = [f"what it can see, {line}" for line in certificate.scope]
    lines = [certificate.sentence, certificate.advice, *seen, *(f"warning: {line}" for line in certificate.warnings)]
    sys.stdout.write("\n".join([*lines, *map(str, paths)]) + "\n")
    return certificate.exit_code


if __name__ == "__main__":
    run_main(main)

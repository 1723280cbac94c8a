"""Pre-RL adaptation on megatron-core: ``torchrun --nproc-per-node N -m bebop.megatron_job.adapt model.path=DIR ...``"""

import contextlib
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import yaml

from bebop.adapt import begin, check_folder, run_folder
from bebop.command import run_main
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, as_yaml, resumed_overrides
from bebop.config.docs import about, asked
from bebop.config.fields import from_dict
from bebop.errors import UserError
from bebop.run_dir.resume_security import refuse_foreign

HELP = """usage: torchrun --nproc-per-node N -m bebop.megatron_job.adapt [--help] [--cfg] [override ...]

Trains the MTP head of a Hugging Face checkpoint on megatron-core, the backbone frozen, and writes the checkpoint back
in the layout it came in. As python -m bebop.adapt, whose settings it takes, with the model split over processes:

  parallel.tensor=T     tensor parallel ranks (1); heads, vocabulary and feed-forward width must divide by T
  parallel.pipeline=P   pipeline stages (1); layers must divide by P
  parallel.context=C    parts of each row of text (1): long rows take less memory
  parallel.expert=E     ranks that share the experts of a layer (1); their number must divide by E. Tensor, context and
                        data parallel ranks hold different experts; no expert is split
  parallel.evaluate=B   decode held-out prompts before and after (true). Every process then holds the whole model too;
                        false: train on a file of text, and measure acceptance on its last rows

N must be a multiple of T times C times P, and of E times P; what is left is data parallel.

  --help    this text; --help GROUP: the settings of model, task, data, head, train or evaluation
  --cfg     print the configuration and stop
  --trust   resume a run of somebody else although its settings name code (docs/security.md)

Examples:
  python -m bebop.megatron_job.adapt                           the built-in model, one process
  torchrun --nproc-per-node 2 -m bebop.megatron_job.adapt parallel.tensor=2
  torchrun --nproc-per-node 8 -m bebop.megatron_job.adapt parallel.tensor=4 parallel.evaluate=false \\
      model.path=DIR model.dtype=bfloat16 data.source=file data.path=text.jsonl head.lr=3.5e-5
  torchrun --nproc-per-node 8 -m bebop.megatron_job.adapt parallel.expert=8 model.path=DIR       a mixture of experts
  torchrun --nproc-per-node 2 -m bebop.megatron_job.adapt dir=RUN resume=true       from the last checkpoint
"""
OWN = "parallel."


def main(arguments: list[str]) -> int:
    """Parse, adapt, print what changed and return the exit code."""
    if (group := asked(arguments)) is not None:
        sys.stdout.write(HELP if group in ("", "parallel") else about(AdaptConfig, group))
        return 0
    given = ["trust=true" if a == "--trust" else a for a in arguments if a != "--cfg"]
    if unknown := [a for a in given if a.startswith("--")]:
        raise UserError(
            f"{unknown[0]} is no option: there are --help, --cfg and --trust; settings are given as NAME=VALUE"
        )
    overrides = resumed_overrides(given, "adapt", apart=OWN)
    config = adapt_config([o for o in overrides if not o.startswith(OWN)])
    if config.part != "head":
        raise UserError(
            f"part={config.part} is not possible on megatron-core, which trains the MTP head alone: use python -m "
            "bebop.adapt"
        )
    split = settings([o for o in overrides if o.startswith(OWN)])
    require_megatron()
    # megatron-core takes seconds to import; mistakes in settings show before.
    from bebop.megatron_job.parallel import ParallelConfig, joined

    parallel = from_dict(ParallelConfig, split, OWN)
    if not parallel.evaluate and config.data.source != "file":
        raise UserError("parallel.evaluate=false has no model to sample text with: set data.source=file, data.path=...")
    if "--cfg" in arguments:
        sys.stdout.write(as_yaml(config) + yaml.safe_dump({"parallel": split or "defaults"}))
        return 0
    if config.resume:
        refuse_foreign(config.dir, config, given, "adapt", apart=OWN)
    with joined(parallel, config.model.device) as place:
        import torch.distributed as dist

        from bebop.adaptation.ranks import Ranks
        from bebop.megatron_job.job import MegatronAdaptation
        from bebop.runtime.preflight import check_adaptation

        ranks = Ranks(dist.get_rank(), dist.get_world_size())
        check_adaptation(config)
        with contextlib.closing(run_folder(config, ranks)) as folder:
            check_folder(folder, config, ranks)
            job = MegatronAdaptation(config, parallel, folder.path, place)
            job.prepare()
            begin(config, overrides, folder, ranks)
            results: Any = job.run() if parallel.evaluate else job.train_alone()
            if ranks.rank == 0:
                text = results if parallel.evaluate else "".join(f"{name} {x:.4f}\n" for name, x in results.items())
                sys.stdout.write(f"{text}checkpoint: {config.out or folder.path / 'model'}\n")
    return 0


def require_megatron() -> None:
    """Raise ``UserError`` if megatron-core is not installed."""
    if find_spec("megatron") is None:
        raise UserError("megatron-core is not installed here: recipes/megatron/README.md has an environment with it")


def settings(overrides: Sequence[str]) -> dict[str, Any]:
    """Parse overrides parallel.NAME=VALUE into a mapping."""
    found = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals:
            raise UserError(f"{override!r} cannot be read: give parallel.NAME=VALUE")
        found[name.removeprefix(OWN)] = yaml.safe_load(value)
    return found


if __name__ == "__main__":
    run_main(main)

"""``python -m bebop.bench.gpu.vllm_run``: vLLM on one GPU, in the shapes and batches of the engine stage beside it.

An arm is one engine: a model with random weights, one of vLLM's two model runners, plain decoding or drafts of an MTP
layer, batches of 1, 32 and 256. The most informative arms come first; arms that would be late are left out. Each is
forked after all imports, before CUDA is touched: one that fails or hangs costs only its own time.

``vllm.json`` gets the rows as they are measured, with the names of the engine stage: ``cycle`` is a step in which all
rows decode, at the same lengths. ``vllm.log`` has vLLM's output. Facts to read with the numbers:

- the model is in MiMo's layout (``policy_of``), since vLLM has no MTP layer for Llama or Qwen3;
- random drafts are accepted by chance: sampled ones about half of the time, greedy ones (vLLM's default) hardly ever;
- runner v2 is vLLM's default on a GPU, with asynchronous scheduling. The plugin of ``rollout=vllm`` asks for v1 without
  it. Its MTP layer runs without a CUDA graph here; the target, and all of v2, replay graphs;
- nothing goes through Inductor, which would take minutes.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bebop.command import Parser, check_writable, run_main, whole
from bebop.errors import UserError

SECONDS, ARM_SECONDS = 240, 50
GRACE = 10  # seconds that ``carried_out`` gives an arm beside half as much again
LEAST = 25  # seconds that an arm needs to start and to measure a batch
ENVIRONMENT = {  # torch, transformers and vLLM read it at their import
    "HF_HUB_OFFLINE": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is asked without touching CUDA
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",  # small decorated functions of vLLM would go through Inductor
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the arm's own process
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The CPU build verifies sampled drafts wrongly without the plugin's fixes; on CUDA vLLM is unchanged.
PLUGIN = {
    "cuda": {"VLLM_PLUGINS": ""},
    "cpu": {"VLLM_PLUGINS": "bebop", "BEBOP_VLLM_CPU": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
}


def main(arguments: list[str]) -> int:
    """Run the arms in their own processes, as this one must not touch CUDA; return 1 if one of them failed."""
    options = _parser().parse_args(arguments)
    device, out = options.device, options.out or Path("runs") / f"vllm-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    ends = time.monotonic() + options.seconds
    os.environ |= ENVIRONMENT | PLUGIN[device]

    from bebop.bench import record
    from bebop.bench.gpu.__main__ import carried_out
    from bebop.bench.gpu.stage import Context
    from bebop.bench.gpu.vllm_arm import SHAPES, Arm, logged, make_model, plan, run

    known = {arm.name: arm for arm in plan(device)}
    if strange := [name for name in options.arms or () if name not in known]:
        raise UserError(f"--arms {strange[0]} is not possible on {device}: choose from {', '.join(known)}")
    # On a CPU the second runner's kernels are interpreted, so that its arms run only where they are named.
    chosen = options.arms or [name for name, arm in known.items() if device == "cuda" or arm.runner == "v1"]
    if device == "cpu" and any(known[name].runner == "v2" for name in chosen):
        from bebop.rollout.vllm.cpu import interpret

        interpret()
    version = import_all(device)
    out.mkdir(parents=True, exist_ok=True)
    context = Context(
        file=out / "vllm.json", seconds=options.seconds, dry=device == "cpu", origin={**record.begin(), "vllm": version}
    )
    for old in ("vllm.json", "vllm.log"):
        (out / old).unlink(missing_ok=True)

    def limited(call: Callable[[Context], None]) -> str:
        """Run ``call`` in its own process, which ends with this run at the latest."""
        context.seconds = min(ARM_SECONDS, (ends - time.monotonic() - GRACE) / 1.5)
        context.began = time.monotonic()
        outcome = carried_out(partial(logged, call), context)
        context.rows = content_of(context.file).get("rows", context.rows)
        return outcome

    outcomes: dict[Arm, str] = {}
    wrong = False
    with tempfile.TemporaryDirectory(dir=room()) as models:
        for arm in [known[name] for name in chosen]:
            if wrong and arm.attention == "FLASH_ATTN":
                arm = replace(arm, attention="TRITON_ATTN")
            if arm in outcomes:
                continue
            model, left = Path(models, arm.model), ends - time.monotonic()
            if left < LEAST:
                outcomes[arm] = f"left out: {left:.0f} s were left, it needs {LEAST}"
            else:
                made = "" if model.exists() else limited(partial(make_model, SHAPES[arm.model], model))
                outcomes[arm] = made if made.startswith("failed") else limited(partial(run, arm, model))
            context.rows.append({"what": "arm", "value": None, "arm": arm.name, "outcome": outcomes[arm]})
            wrong |= arm.check and outcomes[arm].startswith("failed")  # then FlashAttention is the likeliest cause
            sys.stderr.write(f"{arm.name}: {outcomes[arm]}\n")
    # Not by Context.write, which asks CUDA for the card's name.
    content = {"place": dict(context.origin), **content_of(context.file)}
    content |= {"seconds": options.seconds, "rows": context.rows}
    context.file.write_text(json.dumps(content, indent=1) + "\n")
    columns = ("model", "batch", "runner", "attention", "system", "K", "value", "of_plain", "tokens a row", "tokens/s",
               "of_no_stats", "first accepted", "first overlap")  # fmt: skip
    timed = [row for row in context.rows if row["what"] == "cycle"]
    sys.stdout.write(record.table([{name: row.get(name) for name in columns} for row in timed]))
    return int(any(outcome.startswith("failed") for outcome in outcomes.values()))


def import_all(device: str) -> str:
    """Import the modules that every arm needs, and return vLLM's version.

    Raises ``UserError`` if vLLM is missing or another build.
    """
    try:
        import vllm
    except ModuleNotFoundError as error:
        raise UserError(f"vLLM cannot be imported ({error}): see benchmarks/gpu/NEXT.md") from error
    import vllm.model_executor.models.mimo
    import vllm.model_executor.models.mimo_mtp
    import vllm.v1.engine.llm_engine
    import vllm.v1.executor.uniproc_executor
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.device_type != device:
        seen = current_platform.device_type or "no device"
        raise UserError(f"--device {device} is not possible: vLLM sees {seen} here; --device cpu needs its CPU build")
    if device == "cuda":
        import torch
        import vllm.v1.worker.gpu_worker

        assert not torch.cuda.is_initialized(), "an import touched CUDA: no arm can be forked"
    # It inspects model classes in a separate process, which would import everything again.
    registry._run_in_subprocess = lambda call: call()
    return str(vllm.__version__)


def room() -> Path | None:
    """Return the folder for models: in memory if it has room for both (5 GB), else None for the temporary folder."""
    memory = Path("/dev/shm")
    space = os.statvfs(memory) if memory.is_dir() else None
    return memory if space is not None and space.f_bavail * space.f_frsize > 8 << 30 else None


def content_of(file: Path) -> dict[str, Any]:
    """Return the content that the arms have written; nothing if the file is missing or was cut off with its arm."""
    try:
        content: dict[str, Any] = json.loads(file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return content


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m bebop.bench.gpu.vllm_run", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=whole(1), default=SECONDS, help=f"of the whole run (default: {SECONDS})")
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="only these, Qwen3-1.7B-v2-bebop3 say (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a tiny model, to try it")
    parser.add_argument("--out", type=Path, help="folder of the results (default: runs/vllm-<date and time>)")
    return parser


if __name__ == "__main__":
    run_main(main)

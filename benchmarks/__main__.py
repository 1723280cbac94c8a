"""Benchmarks: ``python -m bebop.bench rollout``, ``sglang``, ``loop``, ``kernels`` and ``monitor``."""

import argparse
import time
from pathlib import Path

import torch

from bebop.bench import kernels, loop, monitor, record, rollout, served
from bebop.command import Parser, check_writable, run_main, whole
from bebop.compose import job_config
from bebop.config import LARGEST, MOST, ModelConfig, TaskConfig
from bebop.config_sglang import SglangConfig
from bebop.decoding import SYSTEMS
from bebop.preflight import check_model, checked
from bebop.rollout.sglang_arguments import HOSTED

CHAIN_SUM = {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="python -m bebop.bench", description=__doc__)
    top.add_argument("--out", type=Path, help="folder for JSON, table and chart (default: runs/bench-<date and time>)")
    kinds = top.add_subparsers(dest="kind", required=True)
    one = kinds.add_parser("rollout", help="tokens/s of the decoding systems and of Hugging Face generate")
    one.add_argument("--model", default="tiny", help="tiny, smollm2 or a Hugging Face folder (default: tiny)")
    one.add_argument("--device", default="auto")
    one.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    one.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32])
    one.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    one.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    one.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")
    one.add_argument("--waves", type=whole(1), default=3, help="requests per slot (default: 3)")
    one.add_argument("--threads", type=whole(1, MOST), default=1, help="CPU threads (default: 1, as a worker has)")
    two = kinds.add_parser("loop", help="asynchronous against synchronous jobs")
    two.add_argument("--steps", type=whole(loop.WARM_UP + 2), default=15, help="steps of each job (default: 15)")
    two.add_argument("--rounds", type=whole(1), default=1, help="turns of each arm; the best counts (default: 1)")
    two.add_argument("overrides", nargs="*", help="settings for every job, as for python -m bebop.run")
    three = kinds.add_parser("kernels", help="draft losses and verification against what others offer")
    three.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    three.add_argument("--threads", type=whole(1, MOST), default=1, help="CPU threads (default: 1)")
    four = kinds.add_parser("monitor", help="what watching acceptance costs")
    four.add_argument("--rounds", type=whole(2), default=8, help="turns with and without statistics (default: 8)")
    four.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")
    five = kinds.add_parser("sglang", help="tokens/s of SGLang, with and without the plugin that measures drafts")
    five.add_argument("--model", default="tiny", help="tiny or a Hugging Face folder with MTP weights (default: tiny)")
    five.add_argument("--device", default="auto")
    five.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    five.add_argument("--batches", type=whole(1), nargs="+", default=[1, 4, 16, 64])
    fixed = [name for name in HOSTED if SYSTEMS[name].length == "fixed"]
    five.add_argument("--systems", nargs="+", default=fixed, choices=HOSTED)
    five.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    five.add_argument("--rounds", type=whole(1), default=3, help="turns at each size; the best counts (default: 3)")
    five.add_argument("--waves", type=whole(1), default=4, help="requests per place (default: 4)")
    five.add_argument("--max-new-tokens", type=whole(1), default=256)
    five.add_argument("--every", type=whole(0), default=4, help="the plugin measures one step in so many (default: 4)")
    five.add_argument("--memory-fraction", type=float, help="of the GPU (default: SGLang decides)")
    five.add_argument("--cache-tokens", type=whole(1, LARGEST), help="room for keys and values (default: what fits)")
    return top


def _model(options: argparse.Namespace) -> ModelConfig:
    return ModelConfig(path=options.model, device=options.device, dtype=options.dtype)


def _served(options: argparse.Namespace) -> served.ServedBench:
    return served.ServedBench(
        model=_model(options),
        task=TaskConfig(name="chain_sum", args=CHAIN_SUM),
        systems=tuple(options.systems),
        batches=tuple(options.batches),
        draft_tokens=options.draft_tokens,
        rounds=options.rounds,
        waves=options.waves,
        max_new_tokens=options.max_new_tokens,
        every=options.every,
        sglang=SglangConfig(memory_fraction=options.memory_fraction, cache_tokens=options.cache_tokens),
    )


def main(arguments: list[str]) -> int:
    """Measure, print a table, keep the numbers."""
    options = parser().parse_args(arguments)
    origin = record.begin()
    out = options.out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    if "model" in options:
        check_model(_model(options))
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    if options.kind == "loop":
        for arm in loop.ARMS.values():
            checked(job_config([*arm, *options.overrides]))
        rows = loop.run(options.steps, options.rounds, options.overrides)
        record.keep(out, "loop", rows, settings, origin)
        record.bars(out, "loop", [{**r, "job": ""} for r in rows], group="job", bar="arm", height="samples/s")
    elif options.kind == "sglang":
        rows = served.run(_served(options))
        record.keep(out, "sglang", rows, settings, origin)
        charted = [{**row, "arm": f"{row['arm']}, plugin {row['plugin']}"} for row in rows]
        record.bars(out, "sglang", charted, group="batch", bar="arm", height="tokens/s")
    elif options.kind == "monitor":
        config = job_config(options.overrides)
        checked(config)
        torch.set_num_threads(config.rollout.threads)
        rows = monitor.run(config, options.rounds)
        record.keep(out, "monitor", rows, settings, origin)
        record.bars(out, "monitor", [{**r, "job": ""} for r in rows], group="job", bar="part", height="added %")
    elif options.kind == "kernels":
        torch.set_num_threads(options.threads)
        choice = {"auto": kernels.default, "cpu": kernels.on_cpu, "cuda": kernels.on_gpu}[options.device]
        rows = kernels.run(choice())
        record.keep(out, "kernels", rows, settings, origin)
        for what, chosen in kernels.charts(rows).items():
            record.bars(out, what, chosen, group="shape", bar="arm", height="ms")
    else:
        torch.set_num_threads(options.threads)
        bench = rollout.RolloutBench(
            model=_model(options),
            task=TaskConfig(name="chain_sum", args=CHAIN_SUM),
            systems=tuple(options.systems),
            batches=tuple(options.batches),
            draft_tokens=options.draft_tokens,
            rounds=options.rounds,
            waves=options.waves,
        )
        rows = rollout.run(bench)
        record.keep(out, "rollout", rows, settings, origin)
        record.bars(out, "rollout", rows, group="batch", bar="arm", height="tokens/s")
    (out / f"{options.kind}.md").write_text(record.table(rows))
    record.show(record.table(rows) + f"\nkept in {out}\n")
    return 0


if __name__ == "__main__":
    run_main(main)

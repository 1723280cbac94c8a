"""Benchmarks: ``python -m bebop.bench rollout``, ``first_token``, ``sglang``, ``engines``, ``loop``, ``kernels``,
``monitor``, ``trace``, ``history``, ``certify``, ``draft_temperature``, ``agents``, ``balance``, ``simulate`` and
``simulate_cost``."""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from bebop.bench import (
    agents,
    balance,
    certify,
    draft_temperature,
    engines,
    first_token,
    history,
    kernel_threads,
    kernels,
    loop,
    monitor,
    record,
    rollout,
    served,
    simulation,
    tracing,
)
from bebop.command import Parser, check_writable, run_main, whole
from bebop.compose import job_config
from bebop.config import ModelConfig, TaskConfig
from bebop.config_engines import SglangConfig
from bebop.decoding import SYSTEMS
from bebop.errors import UserError
from bebop.model.parts import has_part
from bebop.parsing import LARGEST, MOST
from bebop.preflight import check_model, checked
from bebop.rollout.sglang.hosting import HOSTED

Rows = list[dict[str, Any]]
Chart = tuple[str, Rows, str, str, str]  # name, rows, and their columns: groups, bars, heights
CHAIN_SUM = {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}


def parser() -> Parser:
    """The command line."""
    top = Parser(prog="python -m bebop.bench", description=__doc__)
    top.add_argument("--out", type=Path, help="folder for JSON, table and chart (default: runs/bench-<date and time>)")
    kinds = top.add_subparsers(dest="kind", required=True)
    decoding = kinds.add_parser("rollout", help="tokens/s of the decoding systems and of Hugging Face generate")
    reading = kinds.add_parser("first_token", help="time to the first token, by length of the prompt")
    several = kinds.add_parser("engines", help="tokens/s of the embedded engine, vLLM and Hugging Face generate")
    looking = kinds.add_parser("trace", help="what keeping how each token came about costs the embedded engine")
    repeating = kinds.add_parser(
        "history", help="drafts from past answers: lookups, and decoding beside plain and bebop"
    )
    for embedded in (decoding, reading, looking, several, repeating):
        embedded.add_argument("--model", default="tiny", help="tiny, smollm2 or a Hugging Face folder (default: tiny)")
        embedded.add_argument("--device", default="auto")
        embedded.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
        embedded.add_argument("--threads", type=whole(1, MOST), default=1, help="CPU threads (default: 1, as a worker)")
    for embedded in (decoding, reading):
        chosen = "default: all whose trained parts are there"
        embedded.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help=chosen)
        embedded.add_argument("--parts", type=_part, nargs="+", default=[], metavar="NAME=PATH", help="trained parts")
    several.add_argument("--systems", nargs="+", choices=engines.CHOICE, default=engines.CHOICE, help="default: both")
    several.add_argument("--max-new-tokens", type=whole(1), default=160, help="of an answer (default: 160)")
    _add_tracing(looking)
    reading.add_argument("--lengths", type=whole(1), nargs="+", default=[64, 256, 1024], help="tokens of a prompt")
    reading.add_argument("--rounds", type=whole(2), default=20, help="turns of each arm (default: 20)")
    _add_history(repeating)
    for timed, batches, waves in ((decoding, [1, 8, 32], 3), (several, [1, 8, 32, 64], 6)):
        timed.add_argument("--batches", type=whole(1), nargs="+", default=batches)
        kind, words = (_drafts, ", or auto beside 1 to 5") if timed is decoding else (whole(1, 16), "")
        timed.add_argument("--draft-tokens", type=kind, default=3, help=f"K{words} (default: 3)")
        timed.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")
        timed.add_argument("--waves", type=whole(1), default=waves, help=f"requests per slot (default: {waves})")
    jobs = kinds.add_parser("loop", help="asynchronous against synchronous jobs")
    jobs.add_argument("--steps", type=whole(loop.WARM_UP + 2), default=15, help="steps of each job (default: 15)")
    jobs.add_argument("--rounds", type=whole(1), default=1, help="turns of each arm; the best counts (default: 1)")
    jobs.add_argument("overrides", nargs="*", help="settings for every job, as for python -m bebop.run")
    _add_kernels(kinds.add_parser("kernels", help="draft losses and verification against what others offer"))
    _add_watching(kinds)
    _add_simulations(kinds)
    _add_serving(kinds)
    return top


def _add_history(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8])
    kind.add_argument("--prompts", type=whole(1), default=32, help="each is asked once (default: 32)")
    kind.add_argument("--answers", type=whole(1), default=8, help="past ones of each prompt (default: 8)")
    kind.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")


def _add_serving(kinds: "argparse._SubParsersAction[Parser]") -> None:
    serving = kinds.add_parser("sglang", help="tokens/s of SGLang, with and without the plugin that measures drafts")
    serving.add_argument(
        "--model", default="tiny", help="tiny or a Hugging Face folder with MTP weights (default: tiny)"
    )
    serving.add_argument("--device", default="auto")
    serving.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    serving.add_argument("--batches", type=whole(1), nargs="+", default=[1, 4, 16, 64])
    whole_checkpoint = [name for name in HOSTED if not SYSTEMS[name].needs]
    fixed = [name for name in whole_checkpoint if SYSTEMS[name].length == "fixed"]
    serving.add_argument("--systems", nargs="+", default=fixed, choices=whole_checkpoint)
    serving.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    serving.add_argument("--rounds", type=whole(1), default=3, help="turns at each size; the best counts (default: 3)")
    serving.add_argument("--waves", type=whole(1), default=4, help="requests per place (default: 4)")
    serving.add_argument("--max-new-tokens", type=whole(1), default=256)
    serving.add_argument(
        "--every", type=whole(0), default=4, help="the plugin measures one step in so many (default: 4)"
    )
    serving.add_argument("--memory-fraction", type=float, help="of the GPU (default: SGLang decides)")
    serving.add_argument("--cache-tokens", type=whole(1, LARGEST), help="room for keys and values (default: what fits)")


def _add_watching(kinds: "argparse._SubParsersAction[Parser]") -> None:
    watching = kinds.add_parser("monitor", help="what watching acceptance costs")
    watching.add_argument("--rounds", type=whole(2), default=8, help="turns with and without statistics (default: 8)")
    watching.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")
    holding = kinds.add_parser("certify", help="what holding a job's answers against the trainer's distributions costs")
    holding.add_argument("--rounds", type=whole(2), default=20, help="turns with and without readings (default: 20)")
    holding.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")


def _add_simulations(kinds: "argparse._SubParsersAction[Parser]") -> None:
    playing = kinds.add_parser("agents", help="trajectories of several turns: parked caches, slow environments")
    playing.add_argument("--rounds", type=whole(2), default=agents.ROUNDS, help="of each arm (default: 5)")
    tempering = kinds.add_parser("draft_temperature", help="draft temperatures that are chosen against fixed ones")
    tempering.add_argument("--heads", nargs="+", default=[], help="of recipes.reproduce.objectives (default: all)")
    tempering.add_argument("--seeds", type=whole(0), nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    kinds.add_parser("simulate", help="predictions of bebop.simulate against six real jobs")
    kinds.add_parser("balance", help="prompts to who has room against a fixed order, in virtual time")
    own = kinds.add_parser("simulate_cost", help="what the loop itself costs, by workers and trajectories")
    most = "the most trajectories of a job (default: 1000000)"
    own.add_argument("--most", type=whole(10_000, LARGEST), default=1_000_000, help=most)


def _add_kernels(kernel: argparse.ArgumentParser) -> None:
    kernel.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    counts = "CPU threads (default: 1); several: the CPU kernels of every kind on each of these"
    kernel.add_argument("--threads", type=whole(1, MOST), nargs="+", default=[1], help=counts)
    beside = "the CPU kernels once more beside so many processes that keep a core busy (default: 0)"
    kernel.add_argument("--busy", type=whole(0, MOST), default=0, help=beside)


def _add_tracing(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[8, 32])
    kind.add_argument("--rounds", type=whole(2), default=8, help="turns of each arm (default: 8)")
    kind.add_argument("--vocabulary", type=whole(0), default=151_936, help="of a random model; 0: none")


def _model(options: argparse.Namespace) -> ModelConfig:
    parts = dict(getattr(options, "parts", []))
    return ModelConfig(path=options.model, device=options.device, dtype=options.dtype, parts=parts)


def _drafts(text: str) -> int | str:
    """A type for ``add_argument``: auto, or a number of drafts."""
    return text if text == "auto" else whole(1, 16)(text)


def _part(text: str) -> tuple[str, str]:
    """A type for ``add_argument``: the name and the file of a trained part."""
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give NAME=PATH")
    return name, path


def _systems(options: argparse.Namespace) -> tuple[str, ...]:
    """Those that were chosen, or all whose trained parts are there."""
    model = _model(options)
    return tuple(options.systems or [n for n, s in SYSTEMS.items() if all(has_part(model, part) for part in s.needs)])


def _rollout(options: argparse.Namespace) -> rollout.RolloutBench:
    """What ``rollout`` measures, and ``sglang`` with more."""
    model = _model(options)
    common: dict[str, Any] = {"systems": _systems(options), "batches": tuple(options.batches)}
    common |= {name: getattr(options, name) for name in ("draft_tokens", "rounds", "waves")}
    common |= {"model": model, "task": TaskConfig(name="chain_sum", args=CHAIN_SUM)}
    if options.kind == "rollout":
        return rollout.RolloutBench(**common)
    if options.kind == "engines":
        return rollout.RolloutBench(**common, max_new_tokens=options.max_new_tokens)
    engine = SglangConfig(memory_fraction=options.memory_fraction, cache_tokens=options.cache_tokens)
    return served.ServedBench(**common, max_new_tokens=options.max_new_tokens, every=options.every, sglang=engine)


def _measure(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    """The numbers, and the charts that show them."""
    kind = options.kind
    if kind == "loop":
        for arm in loop.ARMS.values():
            checked(job_config([*arm, *options.overrides]))
        rows = loop.run(options.steps, options.rounds, options.overrides)
        return rows, [(kind, [{**r, "job": ""} for r in rows], "job", "arm", "samples/s")]
    if kind == "simulate":
        return simulation.run(options.out)[0], []
    if kind == "draft_temperature":
        return draft_temperature.run(options.heads, options.seeds), []
    if kind == "agents":
        torch.set_num_threads(1)
        return agents.run(options.rounds), []
    if kind == "balance":
        rows = balance.run()
        charted = [{**row, "fleet": f"{row['workers']}, slow: {row['slow']}"} for row in rows if row["staleness"] == 2]
        return rows, [(kind, [row for row in charted if row["sigma"] == 1.0], "fleet", "sigma", "pull / static")]
    if kind == "simulate_cost":
        rows = simulation.own_cost(options.most)
        return rows, [(kind, rows, "workers", "what", "us a trajectory")]
    if kind == "sglang":
        bench = _rollout(options)
        assert isinstance(bench, served.ServedBench)
        rows = served.run(bench)
        charted = [{**row, "arm": f"{row['arm']}, plugin {row['plugin']}"} for row in rows]
        return rows, [(kind, charted, "batch", "arm", "tokens/s")]
    if kind == "monitor":
        config = job_config(options.overrides)
        checked(config)
        torch.set_num_threads(config.rollout.threads)
        rows = monitor.run(config, options.rounds)
        return rows, [(kind, [{**r, "job": ""} for r in rows], "job", "part", "added %")]
    if kind == "certify":
        config = job_config(options.overrides)
        checked(config)
        torch.set_num_threads(config.trainer.threads)
        rows = certify.run(config, options.rounds)
        return rows, [(kind, [{**r, "job": ""} for r in rows], "job", "part", "added %")]
    if kind == "kernels":
        return _kernels(options)
    torch.set_num_threads(options.threads)
    if kind == "first_token":
        asked = first_token.FirstTokenBench(
            model=_model(options),
            systems=_systems(options),
            lengths=tuple(options.lengths),
            rounds=options.rounds,
        )
        rows = first_token.run(asked)
        return rows, [(kind, rows, "prompt tokens", "arm", "ms")]
    if kind in SPLIT:
        return SPLIT[kind](options)
    rows = (engines if kind == "engines" else rollout).run(_rollout(options))
    return rows, [(kind, rows, "batch", "arm", "tokens/s")]


def _history(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    asked = {name: getattr(options, name) for name in ("prompts", "answers", "rounds")}
    task = TaskConfig(name="chain_sum", args=CHAIN_SUM)
    rows = history.run(history.HistoryBench(model=_model(options), task=task, batches=tuple(options.batches), **asked))
    return rows, [(options.kind, rows[1:], "batch", "arm", "tokens/s")]


def _kernels(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    if len(options.threads) > 1 or options.busy:
        if options.device == "cuda":
            raise UserError("--busy, and several --threads, are for the kernels of a CPU, not for --device cuda")
        rows = kernel_threads.run(kernel_threads.default(options.threads, options.busy))
        charted = [{**row, "arm": f"{row['arm']}, {row.get('threads')} threads"} for row in rows]
        return rows, [(what, chosen, "shape", "arm", "ms") for what, chosen in kernels.charts(charted).items()]
    torch.set_num_threads(*options.threads)
    choice = {"auto": kernels.default, "cpu": kernels.on_cpu, "cuda": kernels.on_gpu}[options.device]
    rows = kernels.run(choice())
    return rows, [(what, chosen, "shape", "arm", "ms") for what, chosen in kernels.charts(rows).items()]


def _trace(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    bench = tracing.TraceBench(
        model=_model(options),
        task=TaskConfig(name="chain_sum", args=CHAIN_SUM),
        batches=tuple(options.batches),
        rounds=options.rounds,
        vocabulary=options.vocabulary,
    )
    rows = tracing.run(bench)
    charted = [{**row, "case": f"{row['model']}, batch {row['batch']}"} for row in rows]
    return rows, [(options.kind, charted, "case", "trace", "added %")]


SPLIT = {"trace": _trace, "history": _history}  # those with rows that a chart shows otherwise, or leaves out


def main(arguments: list[str]) -> int:
    """Measure, print a table, keep the numbers."""
    options = parser().parse_args(arguments)
    origin = record.begin()
    out = options.out = options.out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    if "model" in options:
        check_model(_model(options))
    rows, charts = _measure(options)
    record.keep(out, options.kind, rows, {k: v for k, v in vars(options).items() if k != "out"}, origin)
    for name, chosen, group, bar, height in charts:
        record.bars(out, name, chosen, group=group, bar=bar, height=height)
    (out / f"{options.kind}.md").write_text(record.table(rows))
    record.show(record.table(rows) + f"\nkept in {out}\n")
    return 0


if __name__ == "__main__":
    run_main(main)

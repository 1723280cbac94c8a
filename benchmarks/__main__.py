"""Benchmarks: ``python -m bebop.bench rollout``, ``first_token``, ``sglang``, ``engines``, ``loop``, ``kernels``,
``bound``, ``monitor``, ``trace``, ``history``, ``told``, ``certify``, ``draft_temperature``,
``draft_temperature_cost``, ``agents``, ``balance``, ``simulate`` and ``simulate_cost``."""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bebop.bench import (
    agents,
    balance,
    bound,
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
    temperature_cost,
    told,
    tracing,
)
from bebop.bench.command_line import parser
from bebop.command import check_writable, run_main
from bebop.compose import job_config
from bebop.config import ModelConfig, TaskConfig
from bebop.config_engines import SglangConfig
from bebop.decoding import SYSTEMS
from bebop.errors import UserError
from bebop.model.parts import has_part
from bebop.preflight import check_job, check_model

Rows = list[dict[str, Any]]
Chart = tuple[str, Rows, str, str, str]  # name, rows, and their columns: groups, bars, heights
CHAIN_SUM = {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}


def _model(options: argparse.Namespace) -> ModelConfig:
    parts = dict(getattr(options, "parts", []))
    return ModelConfig(path=options.model, device=options.device, dtype=options.dtype, parts=parts)


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
            check_job(job_config([*arm, *options.overrides]))
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
        check_job(config)
        torch.set_num_threads(config.rollout.threads)
        rows = monitor.run(config, options.rounds)
        return rows, [(kind, [{**r, "job": ""} for r in rows], "job", "part", "added %")]
    if kind == "certify":
        config = job_config(options.overrides)
        check_job(config)
        torch.set_num_threads(config.trainer.threads)
        rows = certify.run(config, options.rounds)
        return rows, [(kind, [{**r, "job": ""} for r in rows], "job", "part", "added %")]
    if kind in ON_THEIR_THREADS:
        return ON_THEIR_THREADS[kind](options)
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


def _told(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    task = TaskConfig(name="chain_sum", args=CHAIN_SUM)
    sizes = {name: getattr(options, name) for name in ("prompts", "answers")}
    rows = told.run(told.ToldBench(model=_model(options), task=task, **sizes))
    charted = [{**row, "accept length": row["accept length"]["value"]} for row in rows]
    return rows, [(options.kind, charted, "known", "arm", "accept length")]


def _kernels(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    if len(options.threads) > 1 or options.busy:
        if options.device == "cuda":
            raise UserError("--busy, and several --threads, are for the kernels of a CPU, not for --device cuda")
        several = kernel_threads.default(options.threads, options.busy)
        rows = kernel_threads.run(replace(several, seconds=options.seconds or several.seconds))
        charted = [{**row, "arm": f"{row['arm']}, {row.get('threads')} threads"} for row in rows]
        return rows, [(what, chosen, "shape", "arm", "ms") for what, chosen in kernels.charts(charted).items()]
    torch.set_num_threads(*options.threads)
    bench = {"auto": kernels.default, "cpu": kernels.on_cpu, "cuda": kernels.on_gpu}[options.device]()
    rows = kernels.run(replace(bench, seconds=options.seconds or bench.seconds))
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


def _on_a_thread(options: argparse.Namespace) -> tuple[dict[str, Any], tuple[ModelConfig, ...]]:
    """What benchmarks of several models on one thread have in common, and the models."""
    torch.set_num_threads(1)
    models = tuple(ModelConfig(path=path, device="cpu", dtype="float32") for path in options.models)
    for model in models:
        check_model(model)
    common = {name: getattr(options, name) for name in ("rounds", "cycles")}
    return common | {"task": TaskConfig(name="chain_sum", args=CHAIN_SUM), "batches": tuple(options.batches)}, models


def _bound(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    common, models = _on_a_thread(options)
    rows = bound.run(bound.BoundBench(models=models, **common))
    return rows, [(options.kind, bound.charted(rows), "case", "what", "tokens/s")]


def _temperature_cost(options: argparse.Namespace) -> tuple[Rows, list[Chart]]:
    common, models = _on_a_thread(options)
    bench = temperature_cost.CostBench(models=models, draft_tokens=options.draft_tokens, **common)
    rows = temperature_cost.run(bench)
    return rows, [(options.kind, rows, "batch", "model", "share %")]


ON_THEIR_THREADS = {"kernels": _kernels, "bound": _bound, "draft_temperature_cost": _temperature_cost}
SPLIT = {
    "trace": _trace,
    "history": _history,
    "told": _told,
}  # those with rows that a chart shows otherwise, or leaves out


def main(arguments: list[str]) -> int:
    """Measure, print a table, keep the numbers."""
    options = parser(__doc__).parse_args(arguments)
    origin = record.begin()
    out = options.out = options.out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    if "model" in options:
        check_model(_model(options))
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    with record.kept_if_ended(out, options.kind, settings, origin):
        rows, charts = _measure(options)
    record.keep(out, options.kind, rows, settings, origin)
    for name, chosen, group, bar, height in charts:
        record.bars(out, name, chosen, group=group, bar=bar, height=height)
    (out / f"{options.kind}.md").write_text(record.table(rows))
    record.show(record.table(rows) + f"\nkept in {out}\n")
    return 0


if __name__ == "__main__":
    run_main(main)

"""Benchmarks: ``python -m bebop.bench rollout``, ``first_token``, ``sglang``, ``engines``, ``loop``, ``kernels``,
``bound``, ``monitor``, ``trace``, ``history``, ``told``, ``certify``, ``certify_speed``, ``certify_difr``,
``draft_temperature``, ``draft_temperature_cost``, ``agents``, ``balance``, ``pages``, ``admission``, ``precision``,
``simulate``, ``simulate_cost``, ``update_memory`` and ``publish``."""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bebop.bench import (
    agents,
    certify,
    certify_arms,
    dispatch,
    draft_temperature,
    engines,
    first_token,
    history,
    history_priming,
    kernel_threads,
    kernels,
    loop,
    monitor,
    pages,
    precision,
    publish,
    record,
    rollout,
    roofline,
    served,
    simulation,
    temperature_cost,
    tracing,
    update_memory,
)
from bebop.command import Parser, check_writable, run_main, whole
from bebop.config.compose import job_config
from bebop.config.engines import SglangConfig
from bebop.config.fields import MAX_INT, MAX_PROCESSES
from bebop.config.job import JobConfig, ModelConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy, resolve, trained_head
from bebop.model.parts import has_part
from bebop.rollout.sglang.arguments import HOSTED
from bebop.runtime.preflight import check_job, check_model
from bebop.systems import SYSTEMS

Rows = list[dict[str, Any]]
Chart = tuple[str, Rows, str, str, str]  # name, rows, and their columns: groups, bars, heights
Measured = tuple[Rows, list[Chart]]
TASK = TaskConfig(name="chain_sum", args={"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1})

# ---- what is measured, kind by kind


def _model(options: argparse.Namespace) -> ModelConfig:
    parts = dict(getattr(options, "parts", []))
    draft = getattr(options, "draft", None)
    brought = trained_head(resolve(options.model)) is not None  # Bebop's head for a model that has none
    return ModelConfig(
        path=options.model, device=options.device, dtype=options.dtype, parts=parts, draft=draft, init_mtp=brought
    )


def _systems(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the chosen systems, or all whose trained parts and draft model are available."""
    model = _model(options)
    there = {name: all(has_part(model, part) for part in system.needs) for name, system in SYSTEMS.items()}
    return tuple(options.systems or [n for n, s in SYSTEMS.items() if there[n] and (model.draft or not s.separate)])


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings shared by ``rollout``, ``engines`` and ``sglang``."""
    names = ("draft_tokens", "rounds", "waves", *(["max_new_tokens"] if "max_new_tokens" in options else []))
    given = {name: getattr(options, name) for name in names}
    return given | {
        "systems": _systems(options),
        "batches": tuple(options.batches),
        "model": _model(options),
        "task": TASK,
    }


def _speeds(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    rows = (engines if options.kind == "engines" else rollout).run(rollout.RolloutBench(**_common(options)))
    return rows, [(options.kind, rows, "batch", "arm", "tokens/s")]


def _sglang(options: argparse.Namespace) -> Measured:
    engine = SglangConfig(memory_fraction=options.memory_fraction, cache_tokens=options.cache_tokens)
    rows = served.run(served.ServedBench(**_common(options), every=options.every, sglang=engine))
    charted = [{**row, "arm": f"{row['arm']}, plugin {row['plugin']}"} for row in rows]
    return rows, [(options.kind, charted, "batch", "arm", "tokens/s")]


def _first_token(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    asked = first_token.FirstTokenBench(
        model=_model(options), systems=_systems(options), lengths=tuple(options.lengths), rounds=options.rounds
    )
    rows = first_token.run(asked)
    return rows, [(options.kind, rows, "prompt tokens", "arm", "ms")]


def _admission(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    given = {name: getattr(options, name) for name in ("prompts", "longest", "rounds")}
    bench = first_token.AdmissionBench(model=_model(options), budgets=tuple(options.budgets), **given)
    rows = first_token.admit(load_policy(bench.model), bench)
    return rows, [(options.kind, [{**row, "prompts": options.prompts} for row in rows], "prompts", "arm", "ms")]


def _history(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    asked = {name: getattr(options, name) for name in ("prompts", "answers", "rounds")}
    rows = history.run(history.HistoryBench(model=_model(options), task=TASK, batches=tuple(options.batches), **asked))
    return rows, [(options.kind, rows[1:], "batch", "arm", "tokens/s")]


def _told(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    sizes = {name: getattr(options, name) for name in ("prompts", "answers")}
    rows = history_priming.run(history_priming.PrimingBench(model=_model(options), task=TASK, **sizes))
    charted = [{**row, "accept length": row["accept length"]["value"]} for row in rows]
    return rows, [(options.kind, charted, "known", "arm", "accept length")]


def _trace(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    sizes = {name: getattr(options, name) for name in ("rounds", "vocabulary")}
    rows = tracing.run(tracing.TraceBench(model=_model(options), task=TASK, batches=tuple(options.batches), **sizes))
    charted = [{**row, "case": f"{row['model']}, batch {row['batch']}"} for row in rows]
    return rows, [(options.kind, charted, "case", "trace", "added %")]


def _loop(options: argparse.Namespace) -> Measured:
    for arm in loop.ARMS.values():
        check_job(job_config([*arm, *options.overrides]))
    rows = loop.run(options.steps, options.rounds, options.overrides)
    return rows, [(options.kind, [{**r, "job": ""} for r in rows], "job", "arm", "samples/s")]


def _watched(run: Callable[[JobConfig, int], Rows], part: str) -> Callable[[argparse.Namespace], Measured]:
    """Return the function that measures a benchmark of one ``part`` of a job ("rollout", "trainer") on its threads."""

    def measure(options: argparse.Namespace) -> Measured:
        config = job_config(options.overrides)
        check_job(config)
        torch.set_num_threads(getattr(config, part).threads)
        rows = run(config, options.rounds)
        return rows, [(options.kind, [{**r, "job": ""} for r in rows], "job", "part", "added %")]

    return measure


def _agents(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    return agents.run(options.rounds), []


def _pages(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(options.threads)
    sizes = {"batches": tuple(options.batches), "rounds": options.rounds}
    rows = pages.run(pages.PagesBench(model=_model(options), **sizes))
    charted = [{**row, "case": f"{row['system']}, batch {row['batch']}"} for row in rows if "batch" in row]
    return rows, [(options.kind, charted, "case", "arm", "tokens/s")]


def _balance(options: argparse.Namespace) -> Measured:
    rows = dispatch.run()
    charted = [{**row, "fleet": f"{row['workers']}, slow: {row['slow']}"} for row in rows if row["staleness"] == 2]
    return rows, [(options.kind, [row for row in charted if row["sigma"] == 1.0], "fleet", "sigma", "pull / static")]


def _precision(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    for path in options.models:
        check_model(ModelConfig(path=path, device="cpu", dtype="bfloat16"))
    given = {name: getattr(options, name) for name in ("completions", "tokens", "seeds")}
    rows = precision.run(precision.PrecisionBench(models=tuple(options.models), **given))
    return rows, [(options.kind, rows, "model", "dtype", "mean")]


def _certify_speed(options: argparse.Namespace) -> Measured:
    given = {name: getattr(options, name) for name in ("vocabulary", "tokens", "against")}
    return certify_arms.run_speed(certify_arms.SpeedBench(**given)), []


def _certify_difr(options: argparse.Namespace) -> Measured:
    torch.set_num_threads(1)
    return certify_arms.run_difr(certify_arms.DifrBench(tokens=options.tokens, runs=options.runs)), []


def _simulate_cost(options: argparse.Namespace) -> Measured:
    rows = simulation.own_cost(options.most)
    return rows, [(options.kind, rows, "workers", "what", "us a trajectory")]


def _kernels(options: argparse.Namespace) -> Measured:
    if len(options.threads) > 1 or options.busy:
        if options.device == "cuda":
            raise UserError("--busy, and several --threads, are for the kernels of a CPU, not for --device cuda")
        several = kernel_threads.default(options.threads, options.busy)
        rows = kernel_threads.run(replace(several, seconds=options.seconds or several.seconds))
        charted = [{**row, "arm": f"{row['arm']}, {row.get('threads')} threads"} for row in rows]
    else:
        torch.set_num_threads(*options.threads)
        bench = {"auto": kernels.default, "cpu": kernels.on_cpu, "cuda": kernels.on_gpu}[options.device]()
        rows = charted = kernels.run(replace(bench, seconds=options.seconds or bench.seconds))
    return rows, [(what, chosen, "shape", "arm", "ms") for what, chosen in kernels.charts(charted).items()]


def _on_one_thread(options: argparse.Namespace) -> dict[str, Any]:
    """Return the shared settings of benchmarks of several models on one thread."""
    torch.set_num_threads(1)
    models = tuple(ModelConfig(path=path, device="cpu", dtype="float32") for path in options.models)
    for model in models:
        check_model(model)
    given = {name: getattr(options, name) for name in ("rounds", "cycles")}
    return given | {"models": models, "task": TASK, "batches": tuple(options.batches)}


def _bound(options: argparse.Namespace) -> Measured:
    rows = roofline.run(roofline.RooflineBench(**_on_one_thread(options)))
    return rows, [(options.kind, roofline.charted(rows), "case", "what", "tokens/s")]


def _temperature_cost(options: argparse.Namespace) -> Measured:
    bench = temperature_cost.CostBench(draft_tokens=options.draft_tokens, **_on_one_thread(options))
    rows = temperature_cost.run(bench)
    return rows, [(options.kind, rows, "batch", "model", "share %")]


KINDS: dict[str, Callable[[argparse.Namespace], Measured]] = {
    "rollout": _speeds,
    "first_token": _first_token,
    "admission": _admission,
    "precision": _precision,
    "engines": _speeds,
    "trace": _trace,
    "history": _history,
    "told": _told,
    "loop": _loop,
    "kernels": _kernels,
    "bound": _bound,
    "monitor": _watched(monitor.run, "rollout"),
    "certify": _watched(certify.run, "trainer"),
    "certify_speed": _certify_speed,
    "certify_difr": _certify_difr,
    "agents": _agents,
    "pages": _pages,
    "draft_temperature": lambda options: (draft_temperature.run(options.heads, options.seeds), []),
    "draft_temperature_cost": _temperature_cost,
    "simulate": lambda options: (simulation.run(options.out)[0], []),
    "balance": _balance,
    "simulate_cost": _simulate_cost,
    "sglang": _sglang,
    "update_memory": lambda options: (update_memory.run(options.tokens), []),
    "publish": lambda options: (publish.run(options.rounds), []),
}


def main(arguments: list[str]) -> int:
    """Run one benchmark, print its table, and keep its numbers."""
    options = parser(__doc__).parse_args(arguments)
    origin = record.begin()
    out = options.out = options.out or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable("--out", out)
    if "model" in options:
        check_model(_model(options))
    settings = {k: v for k, v in vars(options).items() if k != "out"}
    with record.kept_if_ended(out, options.kind, settings, origin):
        rows, charts = KINDS[options.kind](options)
    record.keep(out, options.kind, rows, settings, origin)
    for name, chosen, group, bar, height in charts:
        record.bars(out, name, chosen, group=group, bar=bar, height=height)
    (out / f"{options.kind}.md").write_text(record.table(rows))
    record.show(record.table(rows) + f"\nkept in {out}\n")
    return 0


# ---- the command line


def parser(about: str) -> Parser:
    """Return the parser of all benchmarks; ``about`` is its description."""
    top = Parser(prog="python -m bebop.bench", description=about)
    ended = "of one that is ended before it is done, what was measured is kept as KIND-unfinished"
    top.add_argument(
        "--out", type=Path, help=f"folder for JSON, table and chart (default: runs/bench-<date and time>); {ended}"
    )
    kinds = top.add_subparsers(dest="kind", required=True)
    decoding = kinds.add_parser("rollout", help="tokens/s of the decoding systems and of Hugging Face generate")
    reading = kinds.add_parser("first_token", help="time to the first token, by length of the prompt")
    entering = kinds.add_parser("admission", help="reading many prompts at once, by the budget of a pass")
    several = kinds.add_parser("engines", help="tokens/s of the embedded engine, vLLM and Hugging Face generate")
    looking = kinds.add_parser("trace", help="what keeping how each token came about costs the embedded engine")
    repeating = kinds.add_parser(
        "history", help="drafts from past answers: lookups, and decoding beside plain and bebop"
    )
    telling = kinds.add_parser("told", help="acceptance of drafts from past answers, in vLLM and the embedded engine")
    telling.add_argument("--prompts", type=whole(2), default=96, help="each is asked once (default: 96)")
    telling.add_argument("--answers", type=whole(1), default=8, help="past ones of each prompt (default: 8)")
    paging = kinds.add_parser("pages", help="keys and values in pages against slots: speed, and requests in flight")
    paging.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32])
    paging.add_argument("--rounds", type=whole(1), default=8, help="turns of each arm (default: 8)")
    for embedded in (decoding, reading, entering, looking, several, repeating, telling, paging):
        embedded.add_argument("--model", default="tiny", help="tiny, smollm2 or a Hugging Face folder (default: tiny)")
        embedded.add_argument("--device", default="auto")
        embedded.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
        embedded.add_argument(
            "--threads", type=whole(1, MAX_PROCESSES), default=1, help="CPU threads (default: 1, as a worker)"
        )
    for embedded in (decoding, reading):
        chosen = "default: all whose trained parts are there"
        embedded.add_argument("--systems", nargs="+", choices=list(SYSTEMS), help=chosen)
        embedded.add_argument("--parts", type=_part, nargs="+", default=[], metavar="NAME=PATH", help="trained parts")
        embedded.add_argument("--draft", help="the draft model of draft_model: tiny, smollm2 or a Hugging Face folder")
    several.add_argument("--systems", nargs="+", choices=engines.CHOICE, default=engines.CHOICE, help="default: both")
    several.add_argument("--max-new-tokens", type=whole(1), default=160, help="of an answer (default: 160)")
    _add_tracing(looking)
    reading.add_argument("--lengths", type=whole(1), nargs="+", default=[64, 256, 1024], help="tokens of a prompt")
    reading.add_argument("--rounds", type=whole(2), default=20, help="turns of each arm (default: 20)")
    entering.add_argument("--prompts", type=whole(2), default=32, help="that come at once (default: 32)")
    entering.add_argument("--longest", type=whole(1), default=2000, help="tokens of a prompt at most (default: 2000)")
    entering.add_argument("--budgets", type=whole(16), nargs="+", default=[2048, 8192], help="tokens of a pass")
    entering.add_argument("--rounds", type=whole(1), default=5, help="turns of each arm (default: 5)")
    _add_history(repeating)
    for timed, batches, waves in ((decoding, [1, 8, 32], 3), (several, [1, 8, 32, 64], 6)):
        timed.add_argument("--batches", type=whole(1), nargs="+", default=batches)
        kind, words = (_drafts, ", or auto beside 1 to 5") if timed is decoding else (whole(1, 16), "")
        timed.add_argument("--draft-tokens", type=kind, default=3, help=f"K{words} (default: 3)")
        timed.add_argument("--rounds", type=whole(1), default=3, help="turns of each arm; the best counts (default: 3)")
        timed.add_argument("--waves", type=whole(1), default=waves, help=f"requests per slot (default: {waves})")
    coarse = kinds.add_parser("precision", help="log-probs in bf16 and fp16 against fp32, beside their bounds")
    coarse.add_argument("--models", nargs="*", default=["tiny"], help="beside random ones (default: tiny)")
    coarse.add_argument("--completions", type=whole(1), default=32, help="of each model (default: 32)")
    coarse.add_argument("--tokens", type=whole(1), default=60, help="of a completion (default: 60)")
    coarse.add_argument("--seeds", type=whole(1), default=3, help="of random weights (default: 3)")
    jobs = kinds.add_parser("loop", help="asynchronous against synchronous jobs")
    jobs.add_argument("--steps", type=whole(loop.WARM_UP + 2), default=15, help="steps of each job (default: 15)")
    jobs.add_argument("--rounds", type=whole(1), default=1, help="turns of each arm; the best counts (default: 1)")
    jobs.add_argument("overrides", nargs="*", help="settings for every job, as for python -m bebop.run")
    _add_kernels(kinds.add_parser("kernels", help="draft losses and verification against what others offer"))
    _add_bound(kinds.add_parser("bound", help="plain decoding beside what memory and arithmetic of this machine allow"))
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
    whole_checkpoint = [name for name in HOSTED if not (SYSTEMS[name].needs or SYSTEMS[name].separate)]
    fixed = [name for name in whole_checkpoint if SYSTEMS[name].fixed_length]
    serving.add_argument("--systems", nargs="+", default=fixed, choices=whole_checkpoint)
    serving.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    serving.add_argument("--rounds", type=whole(1), default=3, help="turns at each size; the best counts (default: 3)")
    serving.add_argument("--waves", type=whole(1), default=4, help="requests per place (default: 4)")
    serving.add_argument("--max-new-tokens", type=whole(1), default=256)
    serving.add_argument(
        "--every", type=whole(0), default=4, help="the plugin measures one step in so many (default: 4)"
    )
    serving.add_argument("--memory-fraction", type=float, help="of the GPU (default: SGLang decides)")
    serving.add_argument("--cache-tokens", type=whole(1, MAX_INT), help="room for keys and values (default: what fits)")


def _add_watching(kinds: "argparse._SubParsersAction[Parser]") -> None:
    watching = kinds.add_parser("monitor", help="what watching acceptance costs")
    watching.add_argument("--rounds", type=whole(2), default=8, help="turns with and without statistics (default: 8)")
    watching.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")
    holding = kinds.add_parser("certify", help="what holding a job's answers against the trainer's distributions costs")
    holding.add_argument("--rounds", type=whole(2), default=20, help="turns with and without readings (default: 20)")
    holding.add_argument("overrides", nargs="*", help="settings of the job, as for python -m bebop.run")
    boxes = kinds.add_parser("certify_speed", help="what the statistics of a certificate cost at a large vocabulary")
    boxes.add_argument("--vocabulary", type=whole(64, MAX_INT), default=152_000, help="V (default: 152000)")
    boxes.add_argument("--tokens", type=whole(16), default=48, help="for each box (default: 48)")
    boxes.add_argument("--against", help="root of a checkout of an earlier commit, timed on the same rows")
    judging = kinds.add_parser("certify_difr", help="what a certificate sees beside Token-DiFR, which needs seeds")
    judging.add_argument("--tokens", type=whole(800), default=8000, help="of a run at most (default: 8000)")
    judging.add_argument("--runs", type=whole(1), default=3, help="of each fault (default: 3)")


def _add_simulations(kinds: "argparse._SubParsersAction[Parser]") -> None:
    playing = kinds.add_parser("agents", help="trajectories of several turns: parked caches, slow environments")
    playing.add_argument("--rounds", type=whole(2), default=agents.ROUNDS, help="of each arm (default: 5)")
    tempering = kinds.add_parser("draft_temperature", help="draft temperatures that are chosen against fixed ones")
    tempering.add_argument("--heads", nargs="+", default=[], help="of recipes.reproduce.objectives (default: all)")
    tempering.add_argument("--seeds", type=whole(0), nargs="+", default=[0, 1, 2], help="default: 0 1 2")
    costing = kinds.add_parser("draft_temperature_cost", help="what choosing draft temperatures takes of a cycle")
    costing.add_argument("--models", nargs="+", default=["tiny"], help="tiny, smollm2, or folders (default: tiny)")
    costing.add_argument("--batches", type=whole(1), nargs="+", default=[1, 8, 32])
    costing.add_argument("--rounds", type=whole(1), default=3, help="turns; the fastest counts (default: 3)")
    costing.add_argument(
        "--cycles", type=whole(1), default=28, help="of a request, as the built-in model's (default: 28)"
    )
    costing.add_argument("--draft-tokens", type=whole(1, 16), default=3, help="K (default: 3)")
    kinds.add_parser("simulate", help="predictions of bebop.simulate against six real jobs")
    kinds.add_parser("balance", help="prompts to who has room against a fixed order, in virtual time")
    training = kinds.add_parser("update_memory", help="what an update keeps for its backward pass, and peaks of 0.1 B")
    training.add_argument("--tokens", type=whole(64, 1 << 16), default=1024, help="of a micro-batch (default: 1024)")
    publishing = kinds.add_parser("publish", help="weights from trainer to engine: copies, seconds, pauses (135 M)")
    publishing.add_argument("--rounds", type=whole(1), default=7, help="turns of each arm; medians (default: 7)")
    own = kinds.add_parser("simulate_cost", help="what the loop itself costs, by workers and trajectories")
    most = "the most trajectories of a job (default: 1000000)"
    own.add_argument("--most", type=whole(10_000, MAX_INT), default=1_000_000, help=most)


def _add_kernels(kernel: argparse.ArgumentParser) -> None:
    kernel.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    ends = "after which shapes are left out (default: some minutes, by the device)"
    kernel.add_argument("--seconds", type=whole(1), help=ends)
    counts = "CPU threads (default: 1); several: the CPU kernels of every kind on each of these"
    kernel.add_argument("--threads", type=whole(1, MAX_PROCESSES), nargs="+", default=[1], help=counts)
    beside = "the CPU kernels once more beside so many processes that keep a core busy (default: 0)"
    kernel.add_argument("--busy", type=whole(0, MAX_PROCESSES), default=0, help=beside)


def _add_tracing(kind: argparse.ArgumentParser) -> None:
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[8, 32])
    kind.add_argument("--rounds", type=whole(2), default=8, help="turns of each arm (default: 8)")
    kind.add_argument("--vocabulary", type=whole(0), default=151_936, help="of a random model; 0: none")


def _add_bound(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--models", nargs="+", default=["tiny"], help="tiny, smollm2, Hugging Face folders (default: tiny)"
    )
    kind.add_argument("--batches", type=whole(1), nargs="+", default=[1, 2, 3, 4, 8, 32])
    kind.add_argument("--rounds", type=whole(1), default=5, help="turns; the best counts (default: 5)")
    kind.add_argument("--cycles", type=whole(1), default=40, help="of a turn (default: 40)")


def _drafts(text: str) -> int | str:
    """Parse an argument of ``add_argument``: auto, or a number of drafts."""
    return text if text == "auto" else whole(1, 16)(text)


def _part(text: str) -> tuple[str, str]:
    """Parse an argument of ``add_argument``: the name and the file of a trained part."""
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give NAME=PATH")
    return name, path


if __name__ == "__main__":
    run_main(main)

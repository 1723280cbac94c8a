"""SGLang's decoding speed: plain, greedy drafts and sampled drafts at several batch sizes, with and without the plugin.

Each arm has its own engine, since SGLang fixes drafting when it starts; the best of the rounds counts. It needs SGLang,
and a GPU for meaningful numbers.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from bebop.bench.record import noted
from bebop.bench.rollout import RolloutBench
from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig, JobConfig, MonitorConfig, RolloutConfig, SamplingConfig
from bebop.model.checkpoint import load_tokenizer
from bebop.rollout.engine import Engine, Request
from bebop.rollout.sglang.builder import check, make
from bebop.systems import SYSTEMS
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Completion, DecodeStats, SamplingParams

LONGEST_PROMPT = 1024  # tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServedBench(RolloutBench):
    """Settings of the benchmark."""

    every: int  # verification steps of which the plugin measures one, in the arms that have it
    sglang: SglangConfig


def run(bench: ServedBench) -> list[dict[str, Any]]:
    """Return one row per arm and batch size.

    ``x plain`` and ``x without plugin`` are ratios of tokens/s at the same size.
    """
    for system, every in arms(bench):
        check(job(bench, system, every, LONGEST_PROMPT))
    asked, rows = prompts(bench), list[dict[str, Any]]()
    with tqdm(total=len(list(arms(bench))), desc="sglang") as progress:
        for system, every in arms(bench):
            rows += _arm(bench, asked, system, every)
            progress.update()
    bare = {(row["arm"], row["batch"]): row["tokens/s"] for row in rows if row["plugin"] == "off"}
    for row in rows:
        plain = next((bare.get((s, row["batch"])) for s in bench.systems if not SYSTEMS[s].drafts), None)
        row["x plain"] = row["tokens/s"] / plain if plain else None
        row["x without plugin"] = row["tokens/s"] / bare[row["arm"], row["batch"]]
    return sorted(rows, key=lambda row: int(row["batch"]))


def arms(bench: ServedBench) -> Iterator[tuple[str, int]]:
    """Yield each system with the plugin's sampling interval; 0 is without the plugin."""
    for system in bench.systems:
        yield system, 0
        if SYSTEMS[system].drafts and bench.every:
            yield system, bench.every


def prompts(bench: ServedBench) -> list[tuple[int, ...]]:
    """Return as many prompts as the largest batch needs, in groups of four, as in training."""
    source = PromptSource(bench.task, chat_encoder(load_tokenizer(bench.model)), LONGEST_PROMPT)
    return [source.prompt(i // 4).token_ids for i in range(max(bench.batches) * bench.waves)]


def job(bench: ServedBench, system: str, every: int, longest: int) -> JobConfig:
    """Return the configuration of an arm's engine; ``longest`` is the longest prompt, in tokens."""
    return JobConfig(
        model=bench.model,
        task=bench.task,
        decoding=DecodingConfig(system=system, draft_tokens=bench.draft_tokens),
        rollout=RolloutConfig(
            engine="sglang",
            slots=max(bench.batches),
            max_length=longest + bench.max_new_tokens,
            sampling=SamplingConfig(max_new_tokens=bench.max_new_tokens),
            sglang=dataclasses.replace(bench.sglang, monitor_every=every),
        ),
        monitor=MonitorConfig(decode_stats=every > 0),
    )


def _arm(bench: ServedBench, asked: Sequence[tuple[int, ...]], system: str, every: int) -> list[dict[str, Any]]:
    engine, ends = make(job(bench, system, every, max(map(len, asked))))
    params = SamplingParams(max_new_tokens=bench.max_new_tokens, stop_token_ids=ends)
    requests = [Request(id=i, token_ids=prompt, params=params) for i, prompt in enumerate(asked)]
    try:
        side_by_side(engine, requests[:2], 2)  # the first answers compile, capture and allocate
        rows = []
        for batch in bench.batches:
            runs = [_measure(engine, requests[: batch * bench.waves], batch) for _ in range(bench.rounds)]
            best = max(runs, key=lambda row: float(row["tokens/s"]))
            plugin = f"1 in {every}" if every else "off"
            rows.append(noted({"batch": batch, "arm": system, "plugin": plugin, **best}))
        return rows
    finally:
        engine.close()


def _measure(engine: Engine, asked: Sequence[Request], batch: int) -> dict[str, Any]:
    started = time.perf_counter()
    answers = side_by_side(engine, asked, batch)
    seconds = time.perf_counter() - started
    stats = DecodeStats.total(answer.stats for answer in answers)
    return {
        "tokens/s": stats.tokens / seconds,
        "accept length": stats.accept_length,
        "mean answer": stats.tokens / len(answers),
        "seconds": seconds,
    }


def side_by_side(engine: Engine, asked: Sequence[Request], batch: int) -> list[Completion]:
    """Decode all requests, never more than ``batch`` at a time."""
    waiting, done = list(reversed(asked)), list[Completion]()
    while waiting or engine.unfinished:
        while waiting and engine.unfinished < batch:
            engine.add(waiting.pop())
        done += [finished.completion for finished in engine.step()]
    return done

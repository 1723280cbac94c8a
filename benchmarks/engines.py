"""Rollout engines side by side in one run: Hugging Face ``generate``, the embedded engine and vLLM, plain and drafting.

The built-in model answers its own task; another model (plain: ``--systems autoregressive``) answers the same questions.
Each vLLM arm has its own process, which rests while others have their turn: an engine fixes its drafting when it
starts, and two engines cannot share a process. The best of the rounds counts.
"""

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any

import torch
from tqdm import tqdm

from bebop.bench.record import best_of
from bebop.bench.rollout import RolloutBench, measure, requests
from bebop.bench.served import side_by_side
from bebop.config.job import DecodingConfig, JobConfig, MonitorConfig, RolloutConfig, SamplingConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.systems import SYSTEMS
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import DecodeStats

CHOICE = ("autoregressive", "bebop")  # ways of decoding; the first is what others are held against
PLAIN = f"embedded, {CHOICE[0]}"
START = 300.0  # seconds for vLLM
KEPT = ("tokens/s", "accept length", "passes/token", "mean answer")


def arms(systems: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return, for each arm's name, its engine and its way of decoding."""
    return {
        "hf_generate": ("transformers", "hf_generate"),
        **{f"embedded, {system}": ("bebop-rl", system) for system in systems},
        **{f"vllm, {system}": ("vllm", system) for system in systems},
    }


def run(bench: RolloutBench) -> list[dict[str, Any]]:
    """Return one row per arm and batch size; requests are ``waves`` times the batch, 12 or more."""
    if find_spec("vllm") is None:
        raise UserError("bench engines needs vLLM: pip install -e '.[vllm]', see recipes/vllm")
    policy = load_policy(bench.model, need_head=any(SYSTEMS[system].head for system in bench.systems))
    every = arms(bench.systems)
    source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
    rows = []
    with ExitStack() as stack, tqdm(total=len(bench.batches) * bench.rounds * len(every), desc="engines") as progress:
        served = {system: stack.enter_context(Served(bench, system)) for system in bench.systems}
        for batch in bench.batches:
            asked = requests(bench, policy, source, max(12, batch * bench.waves))

            def turn(arm: str, asked: Sequence[Request] = asked, batch: int = batch) -> dict[str, Any]:
                engine, system = every[arm]
                if engine == "vllm":
                    return served[system].measure(asked, batch)
                return measure(bench, policy, asked, batch, system)

            best = best_of(bench.rounds, list(every), turn, "tokens/s", progress, batch=batch)
            plain = best[PLAIN]["tokens/s"]
            for arm, row in best.items():
                found = {name: row[name] for name in KEPT if name in row}
                ratio = row["tokens/s"] / plain
                about = {"batch": batch, "requests": len(asked), "arm": arm}
                rows.append(about | {"x embedded plain": ratio, **found, "version": version_of(every[arm][0])})
    return rows


class Served:
    """vLLM with one way of decoding, in its own process."""

    def __init__(self, bench: RolloutBench, system: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, bench, system), daemon=True)

    def __enter__(self) -> "Served":
        self._process.start()
        self._answer(START)
        return self

    def __exit__(self, *_: object) -> None:
        self._here.close()  # it ends by itself then
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def measure(self, asked: Sequence[Request], batch: int) -> dict[str, Any]:
        """Measure one turn; return a row of numbers."""
        self._here.send((list(asked), batch))
        return self._answer(None)

    def _answer(self, seconds: float | None) -> dict[str, Any]:
        try:
            if seconds is not None and not self._here.poll(seconds):
                raise UserError(f"vLLM did not start within {seconds:.0f} s")
            found: dict[str, Any] = self._here.recv()
        except EOFError:
            raise UserError("vLLM's process ended; what it said stands above") from None
        return found


def _serve(pipe: Connection, bench: RolloutBench, system: str) -> None:
    """Run vLLM in this process and answer the requests of the pipe."""
    from bebop.rollout.vllm.builder import make

    torch.set_num_threads(1)
    engine, _ = make(job(bench, system))
    try:
        pipe.send({})
        while True:
            try:
                asked, batch = pipe.recv()
            except EOFError:
                return
            pipe.send(timed(partial(side_by_side, engine, asked, batch)))
    finally:
        engine.close()


def job(bench: RolloutBench, system: str) -> JobConfig:
    """Return the configuration that vLLM is started with; it has as many slots as the largest batch."""
    return JobConfig(
        model=bench.model,
        task=bench.task,
        decoding=DecodingConfig(system=system, draft_tokens=bench.draft_tokens),
        rollout=RolloutConfig(
            engine="vllm",
            slots=max(bench.batches),
            max_length=512,
            sampling=SamplingConfig(max_new_tokens=bench.max_new_tokens),
        ),
        monitor=MonitorConfig(decode_stats=False),
    )


def timed(answer: Any) -> dict[str, Any]:
    """Time ``answer``; return the row of its completions' statistics and speed."""
    started = time.perf_counter()
    answers = answer()
    seconds = time.perf_counter() - started
    stats = DecodeStats.total(one.stats for one in answers)
    return {
        "tokens/s": stats.tokens / seconds,
        "accept length": stats.accept_length,
        "passes/token": stats.target_forwards / stats.tokens,
        "mean answer": stats.tokens / len(answers),
    }


def version_of(name: str) -> str:
    """Return name and version of a program, or of its build for a CPU."""
    for known in (name, f"{name}-cpu"):
        try:
            return f"{known} {version(known)}"
        except PackageNotFoundError:
            continue
    return "unknown"

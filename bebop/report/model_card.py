"""The model card of an adapted checkpoint: what was trained on what, acceptance before and after, how to serve it."""

import dataclasses
import json
import platform
from itertools import groupby
from pathlib import Path, PurePath
from typing import Any

import torch
import transformers
import yaml

from bebop import __version__
from bebop.adaptation.results import Results
from bebop.config import BUILT_IN
from bebop.config_adapt import AdaptConfig
from bebop.report.adapted_table import drafts, rows, tasks

TAGS = ["speculative-decoding", "mtp", "multi-token-prediction", "rejection-sampling", "bebop"]


def write_card(out: Path, config: AdaptConfig, results: Results) -> None:
    """Write ``README.md`` into the folder of the adapted checkpoint; it names no folder of this machine."""
    (out / "README.md").write_text(render(config, results), encoding="utf-8")


def render(config: AdaptConfig, results: Results) -> str:
    """The whole card."""
    parts = (_front(), _trained(config, results), _acceptance(results), _serving(drafts(results)), _made_with(config))
    return "\n".join(parts)


def model_name(config: AdaptConfig) -> str:
    """The model that was adapted, as a name: the folder's own where it is a folder."""
    return config.model.path if config.model.path in BUILT_IN else Path(config.model.path).resolve().name


def data_text(config: AdaptConfig, results: Results) -> str:
    """What was trained on, in a sentence."""
    data, sampling = config.data, sampling_words(config)
    size = f"{results.rows:,} sequences with {results.tokens:,} answer tokens"
    if data.source == "file":
        return f"{size} from {PurePath(str(data.path)).name}; target distributions at {sampling}"
    return f"{size}, answers that the model itself sampled at {sampling}"


def sampling_words(config: AdaptConfig) -> str:
    """The sampling distribution, as far as it is not the plain one."""
    sampling = config.data.sampling
    plain = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    extra = [f"{name} {getattr(sampling, name):g}" for name, value in plain.items() if getattr(sampling, name) != value]
    return ", ".join([f"temperature {sampling.temperature:g}", *extra])


def _front() -> str:
    """The YAML at the head that model hubs read."""
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": TAGS}
    return f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n"


def _trained(config: AdaptConfig, results: Results) -> str:
    head, train = config.head, config.train
    warm = min(train.warm(results.fresh), results.steps)
    began = "a fresh one, made from the last layer" if results.fresh else "the one that came with the checkpoint"
    warmed = f", after {warm} steps of `{train.warm_objective}`" if warm else ""
    lines = {
        "Objective": f"`{head.objective}`{warmed}",
        "Depth": f"{head.depth} recursive steps",
        "Head": began,
        "Data": data_text(config, results),
        "Tasks": ", ".join(tasks(results)),
        "Steps": f"{results.steps}, {train.rows_per_step} sequences each",
        "Optimiser": f"AdamW, learning rate {head.lr:g} after {head.lr_warmup_steps} steps of warm-up, "
        f"weight decay {head.weight_decay:g}, gradients clipped at {head.max_grad_norm:g}",
        "Seed": str(config.seed),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in lines.items())
    return (
        f"# {model_name(config)} with an adapted MTP head\n\n"
        "The multi-token-prediction head of this checkpoint was trained on the acceptance of its own drafts.\n"
        "Backbone, embedding and language-model head are those of the original, bit for bit: what the model says\n"
        "is unchanged, how fast it can be decoded is what changed.\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _acceptance(results: Results) -> str:
    """The tables of both systems."""
    k = drafts(results)
    text = (
        f"## Acceptance\n\n{results.held_out()}, {k} drafts a cycle, 95 % bootstrap intervals over answers. Accept "
        "length is tokens per\nverification pass (1 is plain decoding); acceptance of draft k is among the cycles that "
        "reached it.\n"
    )
    for system, group in groupby(rows(results), lambda row: row.system):
        body = "\n".join(f"| {r.label} | {r.before} | {r.after} | {r.change} |" for r in group)
        text += f"\n**{system.capitalize()}**\n\n| | before | after | change |\n|---|---|---|---|\n{body}\n"
    return text


def _serving(k: int) -> str:
    return f"""## Serving

SGLang 0.5.14 or later, which drafts with the head and accepts by rejection sampling, so that answers keep the
distribution of the model:

    python -m sglang.launch_server --model-path DIR --speculative-algorithm NEXTN \\
        --speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1} \\
        --speculative-use-rejection-sampling

Reinforcement learning with Bebop, whose rollouts draft with the head:

    python -m bebop.run model=folder model.path=DIR decoding.draft_tokens={k}
"""


def _made_with(config: AdaptConfig) -> str:
    """Versions and configuration."""
    versions = {"bebop-rl": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
    versions |= {"Python": platform.python_version()}
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"## Made with\n\n{made}; `python -m bebop.adapt` with:\n\n```yaml\n{_public(config)}```\n"


def _public(config: AdaptConfig) -> str:
    """The configuration as YAML; of paths only the last part, and none of where this run wrote."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config)))
    values["model"]["path"] = model_name(config)
    for section in ("data", "task"):
        path = values[section]["path"]
        values[section]["path"] = path and PurePath(path).name
    values["task"]["reward"] = PurePath(values["task"]["reward"]).name
    for name in ("dir", "out", "resume", "progress", "tensorboard"):
        del values[name]
    return yaml.safe_dump(values, sort_keys=False)

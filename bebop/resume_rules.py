"""What may change when a run is resumed: one row for every setting of a job and of an adaptation.

``None``: it may change. A text: it may not, and that is why. What a setting *names* (a model's weights and tokenizer, a
file of questions) is held against ``identity.json`` by content, so those folders and files may move.
"""

import json
from collections.abc import Mapping
from typing import Any

MAY = None

_BOTH: dict[str, str | None] = {
    "model.path": MAY,  # another place; another content is refused
    "model.dtype": "the checkpoint was trained in the other precision",
    "model.device": MAY,
    "model.check": MAY,
    "model.init_mtp": "the checkpoint was made for the other head",
    "model.parts": MAY,  # each is held against the backbone
    **dict.fromkeys(
        (f"task.{name}" for name in ("source", "name", "args", "prompt_key", "answer_key", "system", "seed", "size")),
        "questions are known by their numbers, and each number would become another question",
    ),
    "task.path": MAY,  # as model.path
    "task.reward_timeout": MAY,
    "task.reward": "finished answers or labels were rewarded by the other one",
    **dict.fromkeys(
        (f"task.environment.{name}" for name in ("reset_seconds", "step_seconds", "max_restarts", "processes")), MAY
    ),
    **dict.fromkeys(
        (f"task.environment.{name}" for name in ("max_turns", "max_seconds")),
        "finished trajectories in the checkpoint were ended by the other bound",
    ),
}
_SAMPLED = "finished answers in the checkpoint were sampled the other way"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop")
_ALGORITHM = "it would be another algorithm from here on, under the name of one run"

JOB: Mapping[str, str | None] = {
    **_BOTH,
    "rollout.engine": "log-probs of the two engines differ, and finished answers carry the other's",
    **dict.fromkeys(
        (
            f"rollout.{name}"
            for name in ("workers", "slots", "threads", "on_update", "parked_bytes", "dispatch", "in_flight")
        ),
        MAY,
    ),
    "rollout.max_length": "other questions would fit, and questions are known by their numbers",
    "rollout.staleness": "finished answers in the checkpoint were started under the other bound",
    **dict.fromkeys((f"rollout.sampling.{name}" for name in _SAMPLING), _SAMPLED),
    **dict.fromkeys(
        (
            f"rollout.sglang.{name}"
            for name in (
                "urls", "api_key_env", "tensor_parallel", "data_parallel", "memory_fraction", "cache_tokens",
                "attention_backend", "deterministic", "block_verification", "adaptive_steps", "draft", "pause",
                "transfer", "folder", "address", "colocated", "monitor_every", "timeout", "retries", "extra",
            )
        ),
        MAY,
    ),
    **dict.fromkeys(
        (
            f"rollout.vllm.{name}"
            for name in (
                "cache_bytes", "memory_fraction", "eager", "transfer", "folder", "monitor_every", "timeout", "extra",
            )
        ),
        MAY,
    ),
    **dict.fromkeys(
        (
            f"decoding.{name}"
            for name in (
                "system", "draft_tokens", "most_drafts", "draft_temperature", "cost_ratio", "verify_ratio", "options",
            )
        ),
        MAY,  # the distribution of the answers is the same; whether a system is exact travels with each answer
    ),
    **dict.fromkeys(
        (
            f"algorithm.{name}"
            for name in (
                "advantage", "policy_loss", "aggregation", "clip_low", "clip_high", "kl_coefficient",
                "entropy_coefficient", "entropy_target", "tis_level", "tis_cap", "minibatches", "dynamic_sampling",
                "rescore",
            )
        ),
        _ALGORITHM,
    ),
    "trainer.groups_per_step": "prompts are counted in batches, and some would be skipped or trained on twice",
    "trainer.group_size": "finished groups in the checkpoint have the other size",
    **dict.fromkeys(
        (
            f"trainer.{name}"
            for name in (
                "ranks", "threads", "steps", "lr", "lr_warmup_steps", "lr_schedule", "betas", "weight_decay",
                "max_grad_norm", "max_tokens", "save_every", "keep",
            )
        ),
        MAY,
    ),
    "cotrain.mode": MAY,
    **dict.fromkeys(("cotrain.head.objective", "cotrain.head.depth"), _ALGORITHM),
    **dict.fromkeys(
        (
            f"cotrain.head.{name}"
            for name in ("lr", "lr_warmup_steps", "betas", "weight_decay", "max_grad_norm", "max_tokens")
        ),
        MAY,
    ),
    **dict.fromkeys(
        (
            f"monitor.{name}"
            for name in (
                "decode_stats", "drift", "probe_every", "probe_answers", "check_answers", "certify_every", "actions",
                "trace", "tensorboard", "wandb", "ray_metrics", "plots",
            )
        ),
        MAY,
    ),
    "runtime.seed": "answers that start again would draw other random numbers",
    **dict.fromkeys(
        (
            f"runtime.{name}"
            for name in (
                "dir", "resume", "trust", "address", "temp_dir", "port", "dashboard", "dashboard_port", "metrics_port",
                "max_restarts", "hang_after", "progress",
            )
        ),
        MAY,
    ),
}  # fmt: skip

_TEXT = "the text that the head was trained on so far would be another"
_HELD_OUT = "numbers before and after would be measured on different text"

ADAPT: Mapping[str, str | None] = {
    **_BOTH,
    **dict.fromkeys(("data.source", "data.sequences", "data.prompt_key", "data.answer_key", "data.max_length"), _TEXT),
    "data.path": MAY,  # as model.path
    "data.slots": MAY,
    **dict.fromkeys((f"data.sampling.{name}" for name in _SAMPLING), _TEXT),
    **dict.fromkeys(("head.objective", "head.depth"), _ALGORITHM),
    **dict.fromkeys(
        (f"head.{name}" for name in ("lr", "lr_warmup_steps", "betas", "weight_decay", "max_grad_norm", "max_tokens")),
        MAY,
    ),
    "train.rows_per_step": "rows are dealt out by the number of the step, and some would be seen too often",
    **dict.fromkeys(("train.warm_objective", "train.warm_steps"), _ALGORITHM),
    **dict.fromkeys(
        (f"train.{name}" for name in ("steps", "eval_every", "save_every", "keep", "threads", "cache_mb")), MAY
    ),
    **dict.fromkeys(("evaluation.prompts", "evaluation.draft_tokens"), _HELD_OUT),
    "part": "checkpoints of the run hold the other one",
    "options": _ALGORITHM,
    "seed": _TEXT,
    **dict.fromkeys(("dir", "out", "resume", "trust", "tensorboard", "progress"), MAY),
}


def refusals(before: Mapping[str, Any], now: Mapping[str, Any], rules: Mapping[str, str | None]) -> list[str]:
    """One sentence for each setting that must not have changed; both configurations are nested, as in YAML.

    A setting that only one of them has (they may be of different versions of bebop) is not compared.
    """
    old, new = json.loads(json.dumps(before)), json.loads(json.dumps(now))  # tuples and lists are the same here
    refused = []
    for name, reason in rules.items():
        was, is_now = _value(old, name), _value(new, name)
        if reason is not None and was is not _ABSENT and is_now is not _ABSENT and was != is_now:
            refused.append(f"{name} cannot change from {was!r} to {is_now!r} in a run ({reason})")
    return refused


_ABSENT = object()


def _value(config: Any, name: str) -> Any:
    for part in name.split("."):
        if not isinstance(config, dict) or part not in config:
            return _ABSENT
        config = config[part]
    return config

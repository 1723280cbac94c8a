"""Acceptance of drafts in verl's own logger, under the names of ``bebop.run``, with a diagnosis of its changes.

Completions carry their statistics (``stats.FIELD``). The trainer sums them over the batch of its last update.
"""

from collections.abc import Mapping, Sequence
from numbers import Real
from types import ModuleType
from typing import Any

import numpy as np

from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.monitor.drift_monitor import DriftMonitor, MonitorSettings
from bebop.monitor.estimators import decode_metrics, drafting_metrics
from bebop.monitor.records import first_of_kind, from_stats
from bebop.monitor.window import Rate
from bebop.runtime.gauges import RaySink
from bebop.systems import SYSTEMS
from bebop.trajectory import DecodeStats
from bebop.verl_job.hooks import wrap
from bebop.verl_job.settings import VerlConfig, current
from bebop.verl_job.stats import FIELD, turns

HEAD = "actor/head/"  # verl puts actor/ before what its actor reports
PREFIXES = ("rollout/", "turn/", "draft/", "drift/", "head/", "staleness/")  # of Ray gauges


class Reporter:
    """Reporter of one trainer's batches, step after step."""

    def __init__(self, config: VerlConfig, steps: int | None = None) -> None:
        """Start without reports; ``steps`` is the length of the whole run, if known."""
        self.config, self.steps = config, steps
        self.seen = 0  # steps
        self.monitor: DriftMonitor | None = None
        self.gauges = RaySink() if config.prometheus else None

    def report(
        self,
        step: int,
        answers: Sequence[tuple[str, int, Mapping[str, Any] | None]],
        metrics: dict[str, Any],
    ) -> None:
        """Add acceptance to a step's ``metrics``; ``answers`` holds prompt, weight version and statistics."""
        self.seen = step
        for name in [name for name in metrics if name.startswith(HEAD)]:
            metrics[name.removeprefix("actor/")] = metrics.pop(name)
        known = [(prompt, version, turns(stats)) for prompt, version, stats in answers if stats is not None]
        drafted = [answer for answer in known if DecodeStats.total(answer[2]).cycles]
        if drafted:
            metrics.update(self._numbers(step, drafted))
        if self.gauges is not None:
            own = {name: value for name, value in metrics.items() if name.startswith(PREFIXES)}
            self.gauges.write(step, {name: float(value) for name, value in own.items() if isinstance(value, Real)})

    def _numbers(self, step: int, answers: Sequence[tuple[str, int, list[DecodeStats]]]) -> dict[str, float]:
        """Return the metrics of ``answers``: prompt, version, statistics of each turn."""
        numbers = values(acceptance([DecodeStats.total(each) for _, _, each in answers]))
        if any(len(each) > 1 for _, _, each in answers):
            by_turn = [(first_of_kind(turn), one) for _, _, each in answers for turn, one in enumerate(each)]
            numbers |= values(drafting_metrics(by_turn))
        if not self.config.monitor:
            return numbers
        units = {prompt: number for number, prompt in enumerate(dict.fromkeys(prompt for prompt, _, _ in answers))}
        rows = [
            (units[prompt], number, turn, version, one)
            for number, (prompt, version, each) in enumerate(answers)
            for turn, one in enumerate(each)
            if one.cycles
        ]
        records = from_stats(
            [stats for *_, stats in rows],
            step,
            unit=[unit for unit, *_ in rows],
            answer=[number for _, number, *_ in rows],
            turn=[turn for _, _, turn, *_ in rows],
            version=[version for *_, version, _ in rows],
            lag=[max(0, step - 1 - version) for *_, version, _ in rows],
        )
        if self.monitor is None:
            rate: Rate = "overlap" if self.config.rollout_rule == "rejection" else "accepted"
            self.monitor = DriftMonitor(MonitorSettings(rate=rate, steps=self.steps))
        diagnosis = self.monitor.observe(records)
        return numbers | ({} if diagnosis is None else diagnosis.metrics())


def acceptance(stats: Sequence[DecodeStats]) -> dict[str, Any]:
    """Return ``rollout/accept_length``, rates and overlaps by position, and entropies, as ``bebop.run`` logs them."""
    return dict(decode_metrics(DecodeStats.total(stats)))


def report_v1(trainer_base: ModuleType) -> None:
    """Hook the trainer of verl 0.9 in its modes sync, colocate_async and separate_async."""
    queue = trainer_base.tq

    def around(
        original: Any, trainer: Any, batch: Any, metrics: dict[str, Any], *args: Any, global_steps: int, **kwargs: Any
    ) -> None:
        original(trainer, batch, metrics, *args, global_steps=global_steps, **kwargs)
        data = queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
        rows = zip(batch.keys, batch.tags, data.pop("extra_fields").tolist(), strict=True)
        answers = [
            (key.rsplit("_", 2)[0], int(tag.get("max_global_steps") or 0), dict(extra or {}).get(FIELD))
            for key, tag, extra in rows
            if not tag.get("is_padding", False)
        ]
        if answers and all(stats is None for _, _, stats in answers) and speculates(trainer.config):
            raise UserError(
                "bebop.metrics=True: completions came without statistics of their drafts, so the hook on the rollout "
                "engine did not take; set bebop.metrics=false to go on without"
            )
        _reporter(trainer, trainer.total_training_steps).report(global_steps, answers, metrics)

    wrap(trainer_base.PPOTrainer, "_compute_metrics", around)


def report_batch(ray_trainer: ModuleType) -> None:
    """Hook trainers that hold whole batches, such as ``fully_async_policy``: statistics lie beside the tensors."""

    def around(original: Any, batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics: dict[str, Any] = original(batch, *args, **kwargs)
        columns = batch.non_tensor_batch
        if FIELD in columns:
            prompts = columns.get("uid", np.arange(len(columns[FIELD])))
            versions = columns.get("max_global_steps", np.zeros(len(prompts)))
            rows = zip(prompts, versions, columns[FIELD], strict=True)
            answers = [(str(prompt), int(version or 0), stats) for prompt, version, stats in rows]
            reporter = _reporter(ray_trainer)
            reporter.report(reporter.seen + 1, answers, metrics)
        return metrics

    wrap(ray_trainer, "compute_data_metrics", around)


def speculates(config: Any) -> bool:
    """Return whether the job's rollout engine drafts, according to its configuration."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "bebop":
        engine = rollout.engine_kwargs.get("bebop") or {}
        return SYSTEMS[engine.get("system", "bebop")].drafts
    mtp = config.actor_rollout_ref.model.mtp
    return bool(rollout.name in ("sglang", "vllm") and mtp.enable and mtp.enable_rollout)


def _reporter(owner: Any, steps: int | None = None) -> Reporter:
    """Return the reporter of a trainer, or of a module if each process has one trainer."""
    config = current()
    assert config is not None
    reporter: Reporter = owner.__dict__.setdefault("bebop_reporter", None) or Reporter(config, steps)
    owner.__dict__["bebop_reporter"] = reporter
    return reporter

"""Monitor of a running job: takes finished groups, returns metrics and proposals, and logs everything. No Ray, no
torch.

``drift.jsonl`` holds the observations and ``controller.jsonl`` the conclusions, one line a step. The monitor sees the
logged values, rounding included. So a resumed run replays its log and continues as if it had never stopped.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from bebop.config.job import DecodingConfig, JobConfig, MonitorConfig
from bebop.driver.protocols import Trainer
from bebop.metrics.sinks import StepLog
from bebop.monitor.certified import Certificate, Certified
from bebop.monitor.controller import Action, ControllerConfig, Health
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.logs import iter_log, log_row, read_row
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.monitor.records import from_groups
from bebop.systems import SYSTEMS
from bebop.trajectory import Group, Trajectory, before

COTRAIN = ("cotrain_start", "cotrain_stop")
DECODING = ("set_system", "set_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Result of one step: metrics for the log, and the action that the job carries out now (kind ``none``: nothing)."""

    metrics: dict[str, float]
    action: Action


class NullMonitor:
    """Monitor that observes nothing and changes nothing but reads the certificate. Same methods as ``JobMonitor``."""

    fingerprints = False

    def __init__(self, config: JobConfig) -> None:
        self.decoding, self.cotraining = config.decoding, config.cotrain.mode == "always"
        self.certificate = Certificate(config)

    async def read(
        self, step: int, groups: Sequence[Group], trainer: Trainer, undisturbed: bool = True
    ) -> tuple[None, None, Certified | None]:
        """Read only the certificate, if it is due."""
        return None, None, await self.certificate.read(step, groups, trainer, undisturbed)

    def observe(
        self,
        step: int,
        groups: Sequence[Group],
        version: int,
        reading: ProbeReading | None = None,
        sweep: Sweep | None = None,
        certified: Certified | None = None,
        health: Health | None = None,
    ) -> Observation:
        """Return the certificate's metrics and no action."""
        return Observation(metrics={} if certified is None else certified.metrics(), action=Action())

    def state(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Ignore ``state``: there is nothing to restore."""

    def close(self) -> None:
        """Do nothing: no log is open."""


class JobMonitor:
    """Monitor of one job; call ``observe`` once a step, in order."""

    fingerprints = True  # the heads that workers run are compared with the trainer's

    def __init__(self, config: JobConfig, folder: Path, resume_from: int = 0) -> None:
        """Keep logs in ``folder`` and continue after step ``resume_from``; later lines are dropped."""
        self.config = config
        self.monitor = DriftMonitor(
            settings(config.decoding, config.monitor, config.trainer.steps, config.cotrain.mode)
        )
        self.texts: tuple[ProbeText, ...] = ()  # the probe set
        self.decoding = config.decoding  # as the actions so far have left it
        self.certificate = Certificate(config)
        self._resumed = resume_from
        self._restart_at: int | None = None  # first step that is decoded wholly as ``decoding`` says
        self._observed = StepLog(folder / "drift.jsonl", resume_from)
        self._concluded = StepLog(folder / "controller.jsonl", resume_from)
        if self._observed.path.stat().st_size:
            for logged in iter_log(self._observed.path):
                self._restart_at = None if logged.restart else self._restart_at
                self._follow(logged.feed(self.monitor))

    @property
    def cotraining(self) -> bool:
        """Return whether the next update should train the head as well."""
        mode = self.config.cotrain.mode
        return mode == "always" or (mode == "auto" and self.monitor.controller.cotraining)

    def probe_due(self, step: int, groups: Sequence[Group]) -> tuple[tuple[ProbeText, ...], bool] | None:
        """Return the texts to read before update ``step`` (from 1) and whether to sweep temperatures; None if not due.

        The first batch's completions become the texts. Every step is read while the state is unsettled or the head is
        being repaired.
        """
        mode = self.config.cotrain.mode
        every = self.config.monitor.probe_every if SYSTEMS[self.decoding.system].head else 0  # it reads the head
        if not self.texts and every:
            self.texts = choose(groups, self.config.monitor.probe_completions)
        if not every or len(self.texts) < 2:
            return None
        restarts = self._restart_at is not None and step >= self._restart_at
        first = restarts or not self.monitor.has_reading
        closely = self.monitor.controller.unsettled or (mode == "auto" and self.cotraining)
        due = first or step % every == 0 or closely
        return (self.texts, first) if due else None

    async def read(
        self, step: int, groups: Sequence[Group], trainer: Trainer, undisturbed: bool = True
    ) -> tuple[ProbeReading | None, Sweep | None, Certified | None]:
        """Read the probe set under the current weights and the certificate before update ``step``, each only if due."""
        due = self.probe_due(step, groups)
        # Only slopes need more than one draft, and monitoring the head alone uses no slopes.
        alone, decoding = self.monitor.settings.head_alone, self.decoding
        decoding = dataclasses.replace(decoding, draft_tokens=1) if alone else decoding
        reading, sweep = (None, None) if due is None else await trainer.read_probe_set(*due, decoding)
        return reading, sweep, await self.certificate.read(step, groups, trainer, undisturbed)

    def observe(
        self,
        step: int,
        groups: Sequence[Group],
        version: int,
        reading: ProbeReading | None = None,
        sweep: Sweep | None = None,
        certified: Certified | None = None,
        health: Health | None = None,
    ) -> Observation:
        """Log and explain the groups of update ``step``, used for training at weights ``version``; return metrics and
        action.
        """
        restart = self._restart_at is not None and step >= self._restart_at
        self._restart_at = None if restart else self._restart_at
        s = self.monitor.settings
        records = from_groups(groups, step, version, s.head_alone).sample(s.units, s.seed)
        ill = health if health is not None and health.diagnosis() else None
        row = log_row(records, reading, sweep, certified, ill, restart)
        explanation = read_row(row).feed(self.monitor)
        self._observed.write(row)
        metrics = {} if certified is None else certified.metrics()
        if explanation is None:
            return Observation(metrics=metrics, action=Action())
        self._follow(explanation)
        self._record(explanation)
        taken = explanation.action if self._carried_out(explanation.action) else Action()
        metrics |= explanation.metrics() | {"drift/cotraining": float(self.cotraining)}
        return Observation(metrics=metrics, action=taken)

    def state(self) -> dict[str, Any]:
        """Return the state for the job's checkpoint: the probe set and the decoding; everything else is in the log."""
        asked, now = dataclasses.asdict(self.config.decoding), dataclasses.asdict(self.decoding)
        return {"bank": self.texts, "asked": asked, "decoding": now, "restart_at": self._restart_at}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the probe set and the decoding that actions have left; other decoding gets a reference of its own.

        The log is replayed as if the whole run had been decoded as the job is configured now. So what its actions
        changed counts only if the checkpoint's job was configured alike.
        """
        self.texts = state.get("bank", ())
        if "decoding" not in state:  # an older version wrote it: decoding is taken as unchanged
            return
        asked, actions = self.config.decoding, self.config.monitor.actions
        acted = actions and _same(asked, state["asked"])
        by_actions = {name: state["decoding"][name] for name in ("system", "draft_tokens")} if acted else {}
        self.decoding = dataclasses.replace(asked, **by_actions)
        changed = not _same(self.decoding, state["decoding"])
        self._restart_at = state["restart_at"]
        if changed:
            self._restart_at = self._resumed + self.config.rollout.staleness + 1
        if self._restart_at is not None:
            self.certificate.since = max(self.certificate.since, self._restart_at)
        if changed or actions:
            own = settings(self.decoding, self.config.monitor).controller
            self.monitor.controller.system, self.monitor.controller.drafts = own.system, own.drafts

    def close(self) -> None:
        """Close the logs."""
        self._observed.close()
        self._concluded.close()

    def _carried_out(self, action: Action) -> bool:
        """Return whether the job itself carries out this action; if not, it is a proposal for the log's reader."""
        if action.kind in DECODING:
            return self.config.monitor.actions
        return action.kind == "resync" or (action.kind in COTRAIN and self.config.cotrain.mode == "auto")

    def _follow(self, explanation: Explanation | None) -> None:
        """Update decoding and certificate after an action; completions in flight at the change belong to neither
        reference.
        """
        if explanation is None or not self._carried_out(explanation.action):
            return
        if explanation.action.kind in ("resync", *DECODING):
            self.certificate.restart(explanation.step)
        if explanation.action.kind not in DECODING:
            return
        field = "system" if explanation.action.kind == "set_system" else "draft_tokens"
        self.decoding = dataclasses.replace(self.decoding, **{field: explanation.action.value})  # type: ignore[arg-type]
        self._restart_at = explanation.step + self.config.rollout.staleness + 1

    def _record(self, explanation: Explanation) -> None:
        """Write a line of ``controller.jsonl`` if the state changed or an action is proposed."""
        verdict = explanation.verdict
        if not verdict.changed and verdict.action.kind == "none":
            return
        action = dataclasses.asdict(verdict.action) | {"carried_out": self._carried_out(verdict.action)}
        self._concluded.write(
            {"step": explanation.step, "state": verdict.state, "evidence": verdict.evidence, "action": action}
        )


def _same(decoding: DecodingConfig, row: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's ``row`` is this decoding; settings that an older version did not have are equal."""
    fields = dataclasses.asdict(decoding)
    return fields | dict(row) == fields


Monitor = JobMonitor | NullMonitor


def can_monitor(config: JobConfig) -> bool:
    """Return whether a job can be monitored; a head beside history needs measured overlaps (``decode_stats``)."""
    system, monitor = SYSTEMS[config.decoding.system], config.monitor
    return monitor.drift and system.monitored and (monitor.decode_stats or not system.history)


def settings(
    decoding: DecodingConfig, monitor: MonitorConfig, steps: int | None = None, cotrain: str = "off"
) -> MonitorSettings:
    """Return the monitor's settings for a job with ``cotrain.mode`` ``cotrain``.

    A greedy draft's distribution is one-hot, so its overlap is p(argmax q), which is its acceptance probability.
    """
    system = SYSTEMS[decoding.system]
    fixed = system.fixed_length and not decoding.timed and not system.history  # history drafts as many as it is sure of
    chain = not system.tree  # more nodes of a tree need not be deeper
    # Only rejection sampling accepts with the overlap. PAD also accepts overridden drafts, block verification decides
    # over the whole chain, and a tree has further children.
    by_overlap = system.rule_name == "rejection"
    return MonitorSettings(
        head_alone=system.history,
        rate="overlap" if monitor.decode_stats and by_overlap else "accepted",
        steps=steps,
        costs=decoding.costs,
        controller=ControllerConfig(
            cotrains=cotrain == "auto",
            system=decoding.system if system.other else None,
            drafts=decoding.limit if system.drafts and chain and fixed else None,
            most_drafts=decoding.limit + 1 if monitor.actions else None,
        ),
    )


def choose(groups: Sequence[Group], count: int) -> tuple[ProbeText, ...]:
    """Choose up to ``count`` completions of more than one token, from as many prompts as possible.

    A trajectory of several turns gives one of its completions, with everything before it as the prompt. The members of
    a group give different turns.
    """
    found = [[_text(group, t, member) for member, t in enumerate(group.trajectories)] for group in groups]
    members = [[text for text in texts if text is not None] for texts in found]
    return tuple(text for text in chain.from_iterable(zip_longest(*members)) if text is not None)[:count]


def _text(group: Group, trajectory: Trajectory, member: int) -> ProbeText | None:
    """Return one completion of a trajectory as a probe text, shown at its least likely token, where distributions are
    wide.

    None if all turns have a single token.
    """
    turns = [place for place, turn in enumerate(trajectory.turns) if len(turn.completion.token_ids) > 1]
    if not turns:
        return None
    place = turns[member % len(turns)]
    answer = trajectory.turns[place].completion
    rarest = 1 + int(answer.logprobs[1:].argmin())
    prompt = (*group.prompt.token_ids, *before(trajectory.turns, place))
    return ProbeText(prompt=prompt, answer=tuple(answer.token_ids.tolist()), shown=rarest)

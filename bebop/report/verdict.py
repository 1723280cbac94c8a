"""Verdict on a run in one sentence and advice in another: the first text that a reader of the page sees."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.command import shown_command, shown_path
from bebop.config.fields import settings
from bebop.config.job import JobConfig
from bebop.monitor.controller import CAUSES, State
from bebop.monitor.drift import Decomposition
from bebop.monitor.drift_monitor import Explanation
from bebop.monitor.estimate import Estimate
from bebop.report.runs import DASH, FIRST, Run, windows
from bebop.run_dir.checkpoints import holds_adapter, newest_model
from bebop.systems import SYSTEMS
from bebop.systems.base import System

LEVEL = 0.999  # of the interval of a change that is said to be one, as the controller's
IDLE = 0.3  # share of its time that a trainer may wait before the report gives advice
UNITS = {"tokens": "tokens a cycle", "rate": "of the acceptance rate"}
NOTHING = "Nothing needs to be done."


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice in a sentence, and its kind: rerun with other settings, adapt the model, or no command."""

    text: str
    kind: Literal["run", "adapt", "none"] = "run"
    settings: tuple[str, ...] = ()


def ended(said: "Said", paths: Mapping[str, Path], commands: Mapping[str, str] | None = None) -> list[str]:
    """Return the lines that the terminal shows at the end of a run: verdict, advice, paths and commands.

    ``paths`` and ``commands`` map labels to values. Empty values are left out.
    """
    rows = {"verdict": said.verdict, "advice": said.advice, "next": said.command}
    rows |= {name: str(shown_path(path)) for name, path in paths.items()} | dict(commands or {})
    return [f"{name}: {text}" for name, text in rows.items() if text]


NO_ADVICE = Advice(text=NOTHING, kind="none")
UNEXPLAINED = Advice(text="No advice follows before the cause is known.", kind="none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """Verdict and advice, a sentence each, with the command that carries out the advice."""

    verdict: str
    advice: str
    command: str = ""  # carries out the advice; empty: no command does

    @property
    def shown(self) -> str:
        """Return the advice for a page, followed by its command in backticks."""
        return f"{self.advice} `{self.command}`" if self.command else self.advice


def said(run: Run | None, explanations: Sequence[Explanation]) -> Said:
    """Return verdict and advice on a run, or on a log alone (``run`` is None).

    ``explanations``: one a step, empty if acceptance was not monitored.
    """
    moved, advice = _acceptance(run, explanations)
    reward = _reward(run) if run is not None else ""
    verdict = "; ".join(part for part in (reward, moved) if part)
    if advice in (NO_ADVICE, UNEXPLAINED) and run is not None:
        advice = _waiting(run) or advice
    command = "" if run is None else _command(run, advice)
    return Said(verdict=f"{verdict[:1].upper()}{verdict[1:]}.", advice=advice.text, command=command)


def _command(run: Run, advice: Advice) -> str:
    """Return the command that carries out the advice; empty if there is none or the run's folder is unknown.

    A run continues from its folder, beyond its last step if it has reached that. It starts anew if a setting changes
    that a resumed run may not change.
    """
    if run.place is None or advice.kind == "none":
        return ""
    if advice.kind == "adapt":
        newest, first = newest_model(run.folder or Path()), ""
        model = run.setting("model.path") if newest is None else str(Path(run.place, newest))
        tasks = [one for one in run.given or () if one.startswith("task")]
        if newest is not None and holds_adapter(Path(run.folder or "", newest)):  # it is merged first
            model = str(Path(run.place, "merged"))
            first = shown_command("export", "--run", str(run.place), "--out", model) + " && "
        if run.setting("model.path") == "tiny":  # its checkpoint is a folder, whose default is a large model's rate
            tasks.append("head.lr=0.002")
        return first + shown_command("adapt", *advice.settings, f"model.path={model}", *tasks)
    names = [one.partition("=")[0] for one in advice.settings]
    if any(one.fixed and one.name in names for one in settings(JobConfig)):
        own = tuple(f"{name}=" for name in (*names, "runtime.dir", "runtime.resume"))
        kept = [one for one in run.given or () if not one.startswith(own)]
        return shown_command("run", *kept, *advice.settings)
    steps, last = run.setting("trainer.steps"), run.steps[-1]
    more = [f"trainer.steps={2 * last}"] if steps.isdigit() and last >= int(steps) else []
    go_on = [f"runtime.dir={run.place}", "runtime.resume=true"]
    return shown_command("run", *go_on, *advice.settings, *more)


def _reward(run: Run) -> str:
    """Return in words how the reward moved from the first steps to the last, as far as its spread allows."""
    first, last = windows(run.columns.get("reward/mean", []))
    if len(first) + len(last) < FIRST + 2:
        return f"after {_steps(run.updates)} it is too early to say how the reward moves" if last else ""
    a, b = (sum(part) / len(part) for part in (first, last))
    error = math.sqrt(sum(_variance(part) / len(part) for part in (first, last)))
    word = "did not move clearly" if abs(b - a) <= 2 * error else "rose" if b > a else "fell"
    return f"the reward {word} in {_steps(run.updates)} ({a:.2f} → {b:.2f})"


def _acceptance(run: Run | None, explanations: Sequence[Explanation]) -> tuple[str, Advice]:
    """Return in words how acceptance moved, with the advice that follows."""
    config = run.config if run is not None else {}
    system = _system(config)
    if system is not None and not system.drafts:
        setting = f"decoding={_default_system()}"
        text = f"Decode speculatively to be faster, for instance {setting}."
        return "nothing was drafted", Advice(text=text, settings=(setting,))
    if system is not None and system.history and not (system.head and explanations):
        return (
            "acceptance of drafts from history moves with how completions repeat, so nothing was concluded from it",
            NO_ADVICE,
        )
    if not explanations:
        watch = "monitor.drift=true"
        return "why acceptance moved was not watched", Advice(text=f"Watch it with {watch}.", settings=(watch,))
    last = explanations[-1]
    if last.state == "broken":
        since = _since(explanations)
        return f"the engine has not drafted or drawn as it should since step {since}", _repair(last)
    if system is not None and system.history:
        return _beside_history(explanations, system, config)
    cause = last.parts.get("bank", last.parts.get("length"))
    if cause is None:
        return (
            f"the accept length is {last.length.text()}, and it takes more steps to say whether it moves",
            Advice(text="Let it run on: changes are held against the first five steps."),
        )
    if (judged := _judged(cause, explanations, system, config)) is not None:
        return judged
    held = f"acceptance held, at {last.length.text()} tokens a cycle"
    return held, _proposed(explanations)


def _beside_history(
    explanations: Sequence[Explanation], system: System, config: Mapping[str, Any]
) -> tuple[str, Advice]:
    """Judge the head alone, by the probe set: drafts from history do not count."""
    read = [bank for e in explanations if (bank := e.parts.get("bank")) is not None]
    if not read:
        return (
            "the head, which drafts beside history, was not read on the same texts twice, so nothing is said of it",
            Advice(text="Let it run on, with monitor.probe_every above 0.", settings=("monitor.probe_every=10",)),
        )
    if (judged := _judged(read[-1], explanations, system, config)) is not None:
        return f"{judged[0]} (the head by itself, whatever came from history)", judged[1]
    return "the head by itself held, whatever came from history", NO_ADVICE


def _judged(
    cause: Decomposition, explanations: Sequence[Explanation], system: System | None, config: Mapping[str, Any]
) -> tuple[str, Advice] | None:
    """Return in words by how much acceptance moved, and why if that is known, with the advice; None if it held."""
    state, change = explanations[-1].state, cause.change
    if state in CAUSES and not cause.unidentified:
        return _moved(cause, state, system, config)
    if not change.known:
        return "too little was measured to say whether acceptance moved", UNEXPLAINED
    if not (abs(change.point) >= cause.small and change.excludes_zero(LEVEL)):
        return None
    why = "and why is not known"
    if state in CAUSES and (earlier := _earlier(explanations)) is not None:
        why = f"at first because {_because(state, _explained(earlier, state).point > 0)}; why is not known any more"
    fell, reason = change.point < 0, f": {cause.unidentified}" if cause.unidentified else ""
    said = f"acceptance {'fell' if fell else 'rose'} by {_size(change)} {UNITS[cause.unit]}, {why}{reason}"
    advice = _proposed(explanations)
    return said, UNEXPLAINED if fell and advice == NO_ADVICE else advice


def _earlier(explanations: Sequence[Explanation]) -> Decomposition | None:
    """Return the newest change in the present state whose cause was known."""
    state = explanations[-1].state
    found = (e.parts.get("bank", e.parts.get("length")) for e in reversed(explanations) if e.state == state)
    return next((cause for cause in found if cause is not None and not cause.unidentified), None)


def _moved(cause: Decomposition, state: State, system: System | None, config: Mapping[str, Any]) -> tuple[str, Advice]:
    """Return in words why and by how much acceptance moved, with the advice that follows."""
    part = _explained(cause, state)
    size, because = f"{_size(part)} {UNITS[cause.unit]}", _because(state, part.point > 0)
    if part.point > 0:
        return f"acceptance gained {size} because {because}", NO_ADVICE
    if state == "entropy-driven":
        setting = "decoding=bebop_adaptive"
        text = f"Leave the head as it is; where speed matters, draft less while the policy explores ({setting})."
        because = f"{because}; the head still fits"
        return f"acceptance lost {size} because {because}", Advice(text=text, settings=(setting,))
    return f"acceptance lost {size} because {because}", _fit(system, config)


def _because(state: State, gained: bool) -> str:
    """Return in words what the state says about the cause of a gain or a loss."""
    if state == "entropy-driven":
        return "the policy is more certain than at the start" if gained else "the policy has become less certain"
    return "drafts fit the policy better than at the start" if gained else "the draft head no longer fits the policy"


def _explained(cause: Decomposition, state: State) -> Estimate:
    """Return the part of the change that the state stands for."""
    return cause.entropy if state == "entropy-driven" else cause.mismatch


def _fit(system: System | None, config: Mapping[str, Any]) -> Advice:
    """Return the advice that makes drafts fit the policy again."""
    if system is not None and not system.head:
        part = system.needs[0] if system.needs else ""
        if not part:
            return NO_ADVICE
        command = shown_command("adapt", f"part={part}")
        text = f"Train its part on completions of this policy: {command}."
        return Advice(text=text, kind="adapt", settings=(f"part={part}",))
    if str((config.get("cotrain") or {}).get("mode", "off")) == "off":
        setting = "cotrain.mode=auto"
        return Advice(text=f"Train the head beside the policy: go on with {setting}.", settings=(setting,))
    text = (
        "Co-training is on and has not caught up: raise cotrain.head.lr, or adapt the head anew to the newest "
        f"checkpoint ({shown_command('adapt')})."
    )
    return Advice(text=text, kind="adapt")


def _repair(last: Explanation) -> Advice:
    """Return the advice for a broken engine: its evidence says which weights, completions or drafts are wrong."""
    text = f"Do not trust what was learned since then before this is mended: {last.verdict.evidence}."
    return Advice(text=text, kind="none")


def _proposed(explanations: Sequence[Explanation]) -> Advice:
    """Return the controller's newest proposal on system or draft length as advice."""
    for e in reversed(explanations):
        if e.action.kind == "set_length":
            setting = f"decoding.draft_tokens={e.action.value}"
        elif e.action.kind == "set_system":
            setting = f"decoding={e.action.value}"
        else:
            continue
        return Advice(text=f"Set {setting}: {e.action.why}.", settings=(setting,))
    return NO_ADVICE


def _waiting(run: Run) -> Advice | None:
    """Return advice if the trainer waits too much for completions; else None."""
    idle, whole = (
        sum(value for value in run.columns.get(f"time/{name}", []) if value is not None) for name in ("idle", "step")
    )
    if not whole or idle / whole < IDLE:
        return None
    setting, words = "rollout.staleness=1", "rollout.staleness=1"
    if run.setting("rollout.staleness") != "0":
        workers = run.setting("rollout.workers")
        setting, words = (
            f"rollout.workers={int(workers) + 1 if workers.isdigit() else 2}",
            "another worker (rollout.workers)",
        )
    text = f"The trainer waits for completions {100 * idle / whole:.0f} % of the time: try {words}."
    return Advice(text=text, settings=(setting,))


def _size(part: Estimate) -> str:
    """Return the absolute size with its interval as text; the surrounding words give the direction."""
    sign = math.copysign(1, part.point)
    low, high = sorted(sign * end for end in part.interval())
    return f"{abs(part.point):.2g} [{low:.2g}, {high:.2g}]"


def _since(explanations: Sequence[Explanation]) -> int:
    """Return the first step of the current state."""
    first = explanations[-1]
    for e in reversed(explanations):
        if e.state != first.state:
            break
        first = e
    return first.step


def _system(config: Mapping[str, Any]) -> System | None:
    return SYSTEMS.get(str((config.get("decoding") or {}).get("system", DASH)))


def _default_system() -> str:
    """Return the first system that samples drafts from an MTP head."""
    return next(name for name, row in SYSTEMS.items() if row.head and row.sampled)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _variance(values: Sequence[float]) -> float:
    middle = sum(values) / len(values)
    return sum((value - middle) ** 2 for value in values) / max(1, len(values) - 1)

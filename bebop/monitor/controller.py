"""Controller of the drift monitor: decides the draft's state, its cause, and the action to take.

It looks at every step, so it decides at a stricter level than the displayed 95 %. A state must be the candidate twice
in a row (``broken`` once). The controller never acts on an interval that includes zero, nor on a negligible change.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bebop.monitor.drift import Decomposition
from bebop.monitor.estimate import Estimate
from bebop.systems import SYSTEMS

State = Literal["steady", "entropy-driven", "mismatch-driven", "broken"]
Kind = Literal["none", "resync", "cotrain_start", "cotrain_stop", "set_length", "set_system"]
CAUSES: tuple[State, ...] = ("entropy-driven", "mismatch-driven")
CAUSAL = ("bank", "temperature")  # sources that change the entropy alone, rather than compare what differs otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Proposed action, as data: the code that runs the job decides whether to carry it out."""

    kind: Kind = "none"
    value: int | str | None = None  # drafts for set_length, a decoding system for set_system
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """State that an engine reports and the expected state; a None field is not compared."""

    worker: int | None = None  # the rollout worker that says so
    version: int | None = None
    expected_version: int | None = None
    head_checksum: str | None = None
    expected_head_checksum: str | None = None

    def to_row(self) -> dict[str, Any]:
        """Return the row for ``drift.jsonl``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Health":
        """Read a row that ``to_row`` wrote."""
        return cls(**row)

    def diagnosis(self) -> str:
        """Return the fault in words; empty if there is none."""
        pairs = (
            ("weight version", self.version, self.expected_version),
            ("checksum of the head", self.head_checksum, self.expected_head_checksum),
        )
        wrong = [f"{what} is {is_}, not {want}" for what, is_, want in pairs if None not in (is_, want) and is_ != want]
        who = "the engine's" if self.worker is None else f"rollout worker {self.worker}'s"
        return f"{who} {'; '.join(wrong)}" if wrong else ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Signals:
    """Input of the controller at one step."""

    step: int
    cause: Decomposition | None  # the change of the last steps against the reference; None: no reference yet
    now: Estimate  # accept length of this step alone
    before: Estimate | None  # accept length of the steps before it
    others: tuple[Decomposition, ...] = ()  # the same change under other slopes
    boundary: Estimate | None = None  # overlap minus p(argmax q)
    drafts: tuple[int, Estimate] | None = None  # the best number of drafts and its relative gain
    health: Health | None = None
    uncertified: str = ""  # why completions do not follow their distribution, at a step that finds so
    chance: float | None = None  # rate of unrelated distributions as measured; None: the configured one


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """State of the draft after a step, with evidence and action.

    >>> Verdict(step=7, state="steady", evidence="accept length 2.8 [2.7, 2.9]", action=Action())  # doctest: +SKIP
    """

    step: int
    state: State
    evidence: str
    action: Action
    changed: bool = False  # whether the state is another one than before


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    """Thresholds of the controller. ``bebop.monitor.drift.SMALL`` defines negligible changes."""

    level: float = 0.999  # of the intervals that decide
    patience: int = 2  # steps in a row that a state must be seen before it is entered or left
    chance: float = 0.1  # acceptance rate of a head that has nothing to do with the model
    collapse: float = 0.2  # broken: the share of accepted drafts that remains, if chance is lower
    relief: float = 0.5  # a cause is over once it is below this share of a change of no consequence, or uncertain
    pause: int = 10  # steps between two actions on system or length
    least_gain: float = 0.02  # relative speed that another length must promise
    cotrains: bool = True  # the job trains the head when it is told to; then nothing else is proposed meanwhile
    system: str | None = None  # what runs now; None: never propose another
    drafts: int | None = None  # drafts now; None: never propose another number
    most_drafts: int | None = None  # that the engine has room for


class Controller:
    """State machine that judges each step; it remembers its state, so that it does not flap."""

    def __init__(self, config: ControllerConfig | None = None) -> None:
        self.config = config or ControllerConfig()
        self.state: State = "steady"
        self.cotraining = False
        self.system, self.drafts = self.config.system, self.config.drafts
        self._seen: list[State] = []  # candidates of the last steps
        self._healthy: Estimate | None = None  # accept length before it broke
        self._broken_for = 0  # steps in a row
        self._uncertified = ""  # what stands against the engine's completions; cleared when weights are sent again
        self._sent_again = False  # for that reason
        self._acted = -self.config.pause  # step of the last action on system or length

    @property
    def unsettled(self) -> bool:
        """Return whether the probe set should be read more often: the last step suggested another state, or it is
        broken.
        """
        if self._uncertified:  # no reading of drafts says more about that
            return False
        return self.state == "broken" or (bool(self._seen) and self._seen[-1] != self.state)

    def judge(self, signals: Signals) -> Verdict:
        """Update the state with one step's signals and return the verdict."""
        if self.state != "broken":
            self._healthy = signals.before
        self._uncertified = signals.uncertified or self._uncertified
        broken, why = self._broken(signals)
        candidate: State = "broken" if broken else self._candidate(signals.cause, signals.others)
        before = self.state
        self._seen = [*self._seen, candidate][-self.config.patience :]
        if broken or (len(self._seen) == self.config.patience and len(set(self._seen)) == 1):
            self.state = candidate
        self._broken_for = self._broken_for + 1 if self.state == "broken" else 0
        evidence = why if self.state == "broken" and why else _evidence(signals)
        action = self._act(signals, evidence)
        return Verdict(
            step=signals.step, state=self.state, evidence=evidence, action=action, changed=self.state != before
        )

    def _broken(self, signals: Signals) -> tuple[bool, str]:
        """Return whether drafts are no better than chance, or the engine has wrong weights or completions, and the
        reason.
        """
        diagnosis = (signals.health.diagnosis() if signals.health else "") or self._uncertified
        if diagnosis:
            return True, diagnosis
        healthy = self._healthy
        if healthy is None or not (healthy.known and signals.now.known):
            return False, ""
        chance = self.config.chance if signals.chance is None else signals.chance
        floor = 1 + max(chance, self.config.collapse * (healthy.point - 1))
        drop = signals.now - healthy
        fell = drop.point < 0 and drop.excludes_zero(self.config.level)
        if not (fell and signals.now.interval(self.config.level)[0] <= floor):
            return False, ""
        what = f"accept length fell to {signals.now.text()} from {healthy.text()}"
        return True, f"{what}; around {floor:.2f} hardly a draft is accepted: look at the weights that were synced last"

    def _candidate(self, cause: Decomposition | None, others: Sequence[Decomposition]) -> State:
        """Return the state that this step alone suggests; the present state stays until its cause is clearly over."""
        if cause is None:  # the reference is not complete
            return self.state if self.state in CAUSES else "steady"
        if cause.unidentified:
            return self.state if self.state != "broken" and self._moved(cause.change, cause.small) else "steady"
        strong = {state: abs(_part(cause, state).point) for state in CAUSES if self._holds(cause, others, state)}
        if not strong:
            held = _part(cause, self.state) if self.state in CAUSES else None
            lasts = held is not None and held.excludes_zero() and abs(held.point) >= self.config.relief * cause.small
            return self.state if lasts else "steady"
        leader = max(strong, key=lambda state: strong[state])
        # Two causes of about the same size must not take turns.
        return self.state if self.state in strong and strong[leader] < 1.25 * strong[self.state] else leader

    def _holds(self, cause: Decomposition, others: Sequence[Decomposition], state: State) -> bool:
        """Return whether a part is significant and does not rest on a merely correlational slope.

        Entropy goes with difficulty between completions, so a slope over them may be too steep. Such a part counts only
        if acceptance itself moved the same way and no other slope says the opposite.
        """
        part = _part(cause, state)
        if not self._moved(part, cause.small):
            return False
        if cause.source in CAUSAL:
            return True
        along = self._moved(cause.change, cause.small) and cause.change.point * part.point > 0
        rest = [_part(other, state) for other in others if not other.unidentified]
        return along and not any(p.excludes_zero() and p.point * part.point < 0 for p in rest)

    def _moved(self, part: Estimate, small: float) -> bool:
        """Return whether a part is significant and not negligible."""
        return part.known and abs(part.point) >= small and part.excludes_zero(self.config.level)

    def _act(self, signals: Signals, evidence: str) -> Action:
        """Choose at most one action for this step."""
        if self.state == "broken":
            repair = self._repair(signals.health, evidence)
            if repair.kind == "resync":  # evidence starts again
                self._uncertified = ""
            return repair
        cause = signals.cause
        lost = cause is not None and self._moved(cause.mismatch, cause.small) and cause.mismatch.point < 0
        if self.state == "mismatch-driven" and lost and not self.cotraining:
            self.cotraining = True
            return Action(kind="cotrain_start", why=evidence)
        if self.state == "steady" and self.cotraining:
            self.cotraining = False
            return Action(kind="cotrain_stop", why=evidence)
        # Other decoding begins a new reference, to which a head that does not fit yet would be the norm.
        if (self.cotraining and self.config.cotrains) or signals.step - self._acted < self.config.pause:
            return Action()
        action = self._system(signals.boundary) or self._length(signals.drafts)
        if action is None:
            return Action()
        self._acted = signals.step
        return action

    def _repair(self, health: Health | None, evidence: str) -> Action:
        """Send the weights again; if the engine has the right weights and drafts are no better, train the head.

        Wrong weights are the only cause of wrong completions that a job can repair, and they can look like any other
        cause.
        So the weights are sent again once for that reason. A later finding is for a person.
        """
        wrong = health is not None and bool(health.diagnosis())
        if self._uncertified and not wrong:
            if self._sent_again:
                return Action(why=f"it is not the weights, which were sent again: {evidence}")
            self._sent_again = True
            return Action(kind="resync", why=f"weights may look like any cause: {evidence}")
        if wrong or self._broken_for == 1:
            return Action(kind="resync", why=f"check the weight sync: {evidence}")
        if self._broken_for > self.config.patience + 1 and not self.cotraining:
            self.cotraining = True
            return Action(kind="cotrain_start", why=f"new weights did not help: {evidence}")
        return Action(why="check the weight sync")

    def _system(self, boundary: Estimate | None) -> Action | None:
        """Propose the system on the other side of the decision boundary, if the boundary is significant."""
        now = SYSTEMS[self.system] if self.system is not None else None
        if now is None or now.other is None or boundary is None or not boundary.excludes_zero(self.config.level):
            return None
        if now.sampled == (boundary.point > 0):
            return None
        self.system = now.other
        return Action(kind="set_system", value=now.other, why=f"overlap minus p(argmax q) is {boundary.text()}")

    def _length(self, drafts: tuple[int, Estimate] | None) -> Action | None:
        """Propose another number of drafts if its gain is significant and the engine has room for it."""
        if drafts is None or self.drafts is None or drafts[0] == self.drafts:
            return None
        best, gain = drafts
        if best > (self.config.most_drafts or best):
            return None
        if gain.point < self.config.least_gain or not gain.excludes_zero(self.config.level):
            return None
        why = f"{best} instead of {self.drafts} drafts: relative speed {gain.text()}"
        self.drafts = best
        return Action(kind="set_length", value=best, why=why)


def _part(cause: Decomposition, state: State) -> Estimate:
    return cause.entropy if state == "entropy-driven" else cause.mismatch


def _evidence(signals: Signals) -> str:
    """Return in words which measure moved, by how much and why."""
    cause = signals.cause
    if cause is None:
        return f"accept length {signals.now.text()}; the reference is not complete yet"
    what = {"tokens": "accept length", "rate": "acceptance rate"}[cause.unit]
    moved = f"{what} moved by {cause.change.text()} against the reference"
    if cause.unidentified:
        return f"{moved}; its cause is unidentified: {cause.unidentified}"
    parts = f"entropy {cause.entropy.text()}, mismatch {cause.mismatch.text()}"
    source = cause.source if cause.name == "bank" else f"{cause.source} slope"
    return f"{moved}: {parts} ({source}; entropy itself {cause.entropy_change.text()} nats)"

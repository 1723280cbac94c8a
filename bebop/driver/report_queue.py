"""The rule by which rollout workers, real or simulated, report completions.

A report costs the driver a call, so completions wait for one another, but not for long:

- A finished assignment is due at once.
- Where prompts are pulled, completions of unfinished assignments are reported before the rest of their assignment. They
  are due once they are as many as a group. If a slot is free, they wait for ``LINGER_SECONDS`` only, since their report
  brings work.
- Where prompts are dealt statically, assignments are reported whole.
"""

from dataclasses import dataclass, field

from bebop.driver.protocols import Assignment, PartialGroup
from bebop.trajectory import Prompt, Trajectory


@dataclass(slots=True, kw_only=True)
class OpenAssignment:
    """An assignment with unreported completions."""

    prompt: Prompt  # with the tokens that its environment began with
    members: tuple[int, ...]
    missing: int  # members that are not finished
    finished: dict[int, Trajectory | None] = field(default_factory=dict)  # unreported results by member; None: lost


class ReportQueue:
    """Completions of one worker that are waiting for a report."""

    def __init__(self, *, pulls: bool, group_size: int, slots: int) -> None:
        self.pulls, self.group_size, self.slots = pulls, group_size, slots
        self.decoding = 0  # completions that are queued or being decoded; the worker lowers it
        self._finished: dict[int, OpenAssignment] = {}  # assignments with completions to report, by id
        self._count = 0  # completions to report
        self._whole = False  # whether an assignment among them is finished

    def open(self, assignment: Assignment) -> OpenAssignment:
        """Register an assignment for decoding."""
        self.decoding += len(assignment.members)
        return OpenAssignment(prompt=assignment.prompt, members=assignment.members, missing=len(assignment.members))

    def finish(self, part: OpenAssignment, member: int, trajectory: Trajectory | None) -> None:
        """Add the result of a member; None if it was lost."""
        part.finished[member] = trajectory
        part.missing -= 1
        self._finished[id(part)] = part
        self._count += 1
        self._whole = self._whole or not part.missing

    @property
    def due(self) -> bool:
        """Return whether there is a completion that must not wait."""
        return self._whole or (self.pulls and self._count >= self.group_size)

    @property
    def starving(self) -> bool:
        """Return whether there are completions to report while a slot is free."""
        return self.pulls and self._count > 0 and self.decoding < self.slots

    def take(self) -> tuple[PartialGroup, ...]:
        """Return the completions to report, and remove them from the queue."""
        parts = []
        for key, part in list(self._finished.items()):
            if part.missing and not self.pulls:
                continue
            del self._finished[key]
            finished, part.finished = part.finished, {}
            members = tuple(m for m in part.members if m in finished)
            trajectories = tuple(finished[m] for m in members)
            parts.append(PartialGroup(prompt=part.prompt, members=members, trajectories=trajectories))
            self._count -= len(members)
        self._whole = False
        return tuple(parts)

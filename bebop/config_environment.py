"""Settings of environments: trajectories of several turns."""

from dataclasses import dataclass

from bebop.parsing import above, at_least, check_settings, setting, within


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """How long a trajectory may become, and what its environment may take.

    A turn has ``rollout.sampling.max_new_tokens`` at most, a trajectory ``rollout.max_length`` with all that was read.
    """

    max_turns: int = setting(16, "answers of the policy in one trajectory", within(1, 10_000))
    max_seconds: float = setting(
        3600.0, "of a trajectory; no turn begins after them", above(0, unit="seconds", finite=False)
    )
    reset_seconds: float = setting(60.0, "that an environment may take to begin; else it is lost", above(0))
    step_seconds: float = setting(30.0, "that one step of it may take; else it is lost", above(0))
    max_restarts: int = setting(2, "times that a trajectory begins again with another one", at_least(0, "never"))
    processes: int = setting(
        8, "of one worker for environments that block: as many are open at a time, others wait", within(1, 1024)
    )

    def __post_init__(self) -> None:
        check_settings(self, "task.environment.")

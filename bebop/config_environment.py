"""Define the settings of environments: trajectories of several turns."""

from dataclasses import dataclass

from bebop.parsing import Settings, above, at_least, setting, within

OTHER_BOUND = "finished trajectories in the checkpoint were ended by the other bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig(Settings):
    """How long a trajectory may become, and what its environment may take.

    A turn has ``rollout.sampling.max_new_tokens`` at most, a trajectory ``rollout.max_length`` with all that was read.
    """

    SECTION = "task.environment."
    max_turns: int = setting(16, "completions in one trajectory", within(1, 10_000), fixed=OTHER_BOUND)
    max_seconds: float = setting(
        3600.0,
        "of a trajectory; no turn begins after them",
        above(0, unit="seconds", finite=False),
        fixed=OTHER_BOUND,
    )
    reset_seconds: float = setting(60.0, "that an environment may take to begin; else it is lost", above(0))
    step_seconds: float = setting(30.0, "that one step of it may take; else it is lost", above(0))
    max_restarts: int = setting(2, "times that a trajectory begins again with another one", at_least(0, "never"))
    processes: int = setting(
        8, "of one worker for environments that block: as many are open at a time, others wait", within(1, 1024)
    )

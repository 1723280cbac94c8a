"""The group ``task`` of settings: sources of prompts, rewards of completions, bounds of an environment."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from bebop.config.fields import (
    MAX_INT,
    NOT_EMPTY,
    POSITIVE,
    Limit,
    Settings,
    above,
    at_least,
    readable_rows,
    section,
    setting,
    within,
)

RewardSignature = Literal["auto", "text", "trl", "trl_messages", "verl"]  # see bebop/tasks/signatures.py
QUESTIONS = within(1, 1 << 20)  # their order is kept in memory
OTHER_REWARD = "finished completions or labels were rewarded by the other one"
OTHER_BOUND = "finished trajectories in the checkpoint were ended by the other bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig(Settings):
    """Limits of a trajectory and of the resources of its environment.

    A turn has at most ``rollout.sampling.max_new_tokens``. A trajectory has at most ``rollout.max_length``,
    observations included.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig(Settings):
    """Where prompts come from and how completions are rewarded."""

    SECTION = "task."
    source: Literal["reasoning_gym", "file", "environment"] = setting("reasoning_gym", "where prompts come from")
    name: str = setting(
        "chain_sum", "reasoning-gym data set, a label for a file, an environment or path/to/file.py:Class", NOT_EMPTY
    )
    args: dict[str, Any] = setting(dict, "arguments of the reasoning-gym data set or the environment")
    path: str | None = setting(None, "an existing .jsonl or .parquet file", only="file", fixed="")
    prompt_key: str = setting("question", "a text or messages; dots go into nested rows", NOT_EMPTY, only="file")
    answer_key: str = setting("answer", "in verl's files: reward_model.ground_truth", NOT_EMPTY, only="file")
    reward: str | tuple[str, ...] = setting(
        "auto",
        "auto, math_verify, package.module.function or path/to/file.py:function; or a list of them: docs/rewards.md",
        Limit(lambda given: bool(given), "give a function, or a list of at least one"),
        fixed=OTHER_REWARD,
    )
    reward_weights: tuple[float, ...] | None = setting(
        None, "one for each function in the list of task.reward; null: 1 each", fixed=OTHER_REWARD
    )
    reward_signature: RewardSignature = setting(
        "auto",
        "of functions of yours: text is (text, item), the others those of TRL and verl; auto: by parameter names",
        fixed=OTHER_REWARD,
    )
    reward_batch: int = setting(
        16, "completions that an async function, or one with TRL's signature, is given at once", POSITIVE, fixed=""
    )
    reward_timeout: float = setting(30.0, "for one call of a function of yours", above(0, unit="seconds"), fixed="")
    system: str | None = setting("auto", "system message; null: none; auto: how to answer, for models not trained to")
    seed: int = setting(0, "of the questions", within(0, MAX_INT))
    size: int | None = setting(
        None, "questions, all asked once an epoch in a new order; null: all rows of a file, else endless", QUESTIONS
    )
    environment: EnvironmentConfig = section(EnvironmentConfig, only="environment", fixed="")

    @property
    def rewards(self) -> tuple[str, ...]:
        """Return the names of the reward functions: at least one."""
        return (self.reward,) if isinstance(self.reward, str) else self.reward

    @property
    def turns(self) -> bool:
        """Return whether completions are trajectories of several turns, with an environment."""
        return self.source == "environment"

    def _validate(self) -> None:
        readable_rows("task.path", self.path, needed=self.source == "file")
        if self.turns:
            own = "an environment gives it"
            self.require(self.system in ("auto", None), "system", f"{own}, as a message of its reset: give auto")
            self.require(self.reward == "auto", "reward", f"{own} with each step: give auto")
            self.require(self.reward_weights is None, "reward_weights", f"{own} with each step: give null")
        names, weights = self.rewards, self.reward_weights
        self.require(all(names), "reward", "give a function, or a list of functions without an empty name")
        self.require(len({*names}) == len(names), "reward", "give each function once")
        fits = weights is None or (len(weights) == len(names) and all(map(math.isfinite, weights)))
        self.require(fits, "reward_weights", f"give a finite number for each of task.reward, here {len(names)}")

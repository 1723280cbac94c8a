"""Learning rate as a function of the number of finished updates: nothing to save, nothing to restore."""

import math

from bebop.config import HeadConfig, TrainerConfig


def learning_rate(config: TrainerConfig, version: int) -> float:
    """The rate of the update that follows ``version`` finished ones: linear warm-up, then the schedule.

    ``cosine`` and ``linear`` would reach 0 at update ``steps``, one after the last.
    """
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    done = (version - config.lr_warmup_steps) / max(1, config.steps - config.lr_warmup_steps)
    done = min(1.0, done)
    factors = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.lr * factors[config.lr_schedule]


def warm_up(config: HeadConfig, version: int) -> float:
    """The rate of a head's update that follows ``version`` finished ones: linear warm-up, then constant."""
    return config.lr * min(1.0, (version + 1) / max(1, config.lr_warmup_steps))

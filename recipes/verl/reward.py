"""Rewards of reasoning-gym's tasks in the form of verl's ``reward.custom_reward_function``."""

import json
from typing import Any

from bebop.config.job import TaskConfig
from bebop.tasks.rewards import make_reward
from bebop.trajectory import Prompt


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None, **settings: Any
) -> float:
    """Score the text between <answer> and </answer> by the verifier of the data set ``data_source``."""
    item = json.loads((extra_info or {})["item"])
    prompt = Prompt(index=int((extra_info or {})["index"]), task=data_source, text="", token_ids=(), item=item)
    return float(make_reward(TaskConfig(name=data_source))(solution_str, prompt))

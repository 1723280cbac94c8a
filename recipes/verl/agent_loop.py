"""Bebop's environments as an agent loop of verl: ``environment_loop`` under the name ``bebop_environment``.

A file of agent loops registers it, ``actor_rollout_ref.rollout.agent.agent_loop_config_path``. Its entry names the
environment and the limits (README.md). A row of the data set selects its question by ``extra_info.index``.
"""

import functools
import json
import uuid
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.utils.fs import copy_to_local

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import stop_tokens
from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.environment import find_kind
from bebop.tasks.episodes import Episodes
from bebop.verl_job.environment_loop import EnvironmentLoop, Limits
from bebop.verl_job.settings import plain
from bebop.verl_job.stats import COLLECTED

# Fields that are kept from each request's output; ``stats`` sums the statistics of drafts.
VERSIONS = ("global_steps", "min_global_steps", "max_global_steps")


@functools.cache
def episodes(name: str, args: str, reset_seconds: float, step_seconds: float, processes: int) -> Episodes:
    """Return the episodes that all loops of one worker share; verl makes one loop per trajectory. ``args`` is JSON."""
    limits: dict[str, Any] = {"reset_seconds": reset_seconds, "step_seconds": step_seconds, "processes": processes}
    return Episodes(find_kind(name), json.loads(args), **limits)


class EnvironmentAgentLoop(AgentLoopBase):
    """Agent loop that plays one trajectory; verl makes a loop for each, with the settings of its file."""

    def __init__(
        self,
        *given: Any,
        environment: str,
        args: Any = None,
        seed: int = 0,
        turn_tokens: int | None = None,
        reset_seconds: float = 60.0,
        step_seconds: float = 30.0,
        processes: int = 8,
        max_turns: int = 16,
        max_seconds: float = 3600.0,
        max_restarts: int = 2,
        **settings: Any,
    ) -> None:
        """Set up one loop.

        ``environment`` is a name or path/to/file.py:Class; the other settings are named as in ``task.environment``.
        """
        super().__init__(*given, **settings)
        rollout = self.rollout_config
        self.args: Any = plain(args or {})
        limits = Limits(
            max_turns=max_turns,
            max_seconds=max_seconds,
            max_restarts=max_restarts,
            turn_tokens=turn_tokens or rollout.response_length,
            prompt_tokens=rollout.prompt_length,
            tokens=rollout.response_length,
        )
        stops = _stops(self.config.actor_rollout_ref.model.path)
        delta = ChatDelta.checked(self.tokenizer, stops)
        arguments = json.dumps(self.args, sort_keys=True)
        shared = episodes(environment, arguments, reset_seconds, step_seconds, processes)
        self.environment = EnvironmentLoop(shared, delta, stops, limits, seed)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play a trajectory; return an empty list if it was lost, so that verl leaves it out of its group."""
        index = (row.get("extra_info") or {}).get("index")
        if index is None:
            raise UserError("a row of the data set has no extra_info.index: it says which question is asked")
        fields: dict[str, Any] = {}
        request = f"det-{row.get('priority', 0)}" if self.rollout_config.full_determinism else uuid.uuid4().hex

        async def generate(ids: list[int], room: int) -> tuple[list[int], list[float] | None]:
            params = {**sampling_params, "max_tokens": room}
            output = await self.server_manager.generate(request_id=request, prompt_ids=ids, sampling_params=params)
            oldest = fields.get("min_global_steps", output.extra_fields.get("min_global_steps"))
            fields.update({name: value for name, value in output.extra_fields.items() if name in VERSIONS})
            if oldest is not None:
                fields["min_global_steps"] = oldest
            return list(output.token_ids), output.log_probs or None

        def begin() -> None:
            fields.clear()
            if (collected := COLLECTED.get()) is not None:
                collected.clear()

        played = await self.environment.play(int(index), self.args, generate, begin)
        if played is None:
            return []
        counts = {"ended": played.ended, "restarts": played.restarts, **played.counts}
        return AgentLoopOutput(
            prompt_ids=played.prompt,
            response_ids=played.response,
            response_mask=played.mask,
            response_logprobs=played.logprobs,
            reward_score=played.reward,
            num_turns=2 * played.turns,
            metrics=AgentLoopMetrics(),
            extra_fields={
                **fields,
                "turn_scores": [],
                "tool_rewards": [],
                "reward_extra_info": {},
                "bebop_environment": counts,
            },
        )


@functools.cache
def _stops(path: str) -> tuple[int, ...]:
    return stop_tokens(ModelConfig(path=copy_to_local(path)))

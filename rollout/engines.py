"""The engine that a job asks for, and the worker that drives it."""

import torch

from bebop.config import JobConfig
from bebop.decoding import SYSTEMS
from bebop.model.checkpoint import load_policy
from bebop.rollout import sglang_builder
from bebop.rollout.engine import Engine
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.rewards import checked, make_reward


def make_worker(config: JobConfig) -> RolloutWorker:
    """A rollout worker with the engine that the job asks for, not started."""
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)  # a fresh head must be the same everywhere
    engine, eos = _torch_engine(config) if config.rollout.engine == "torch" else sglang_builder.make_engine(config)
    reward = make_reward(config.task)
    return RolloutWorker(engine, lambda text, prompt: checked(reward, text, prompt), config, eos)


def _torch_engine(config: JobConfig) -> tuple[Engine, tuple[int, ...]]:
    """The embedded engine, and the tokens that end an answer."""
    policy = load_policy(config.model, need_head=SYSTEMS[config.decoding.system].head)
    engine = TorchEngine(
        policy,
        config.decoding,
        slots=config.rollout.slots,
        max_length=config.rollout.max_length,
        on_update=config.rollout.on_update,
        measure=config.monitor.decode_stats,
        room=config.decoding.draft_tokens + 1 if config.monitor.actions else 0,
    )
    return engine, policy.eos_token_ids

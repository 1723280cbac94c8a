"""What runs inside a job's processes: a rollout worker with its engine, a rank of the trainer. No Ray here."""

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.config import DecodingConfig, JobConfig
from bebop.decoding import SYSTEMS
from bebop.metrics import Metrics
from bebop.model.checkpoint import load_policy
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.rollout.engine import Engine
from bebop.rollout.sglang_builder import make_engine
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker, WorkerReport
from bebop.tasks.rewards import checked, make_reward
from bebop.trainer.actor import TrainerWorker
from bebop.trajectory import Batch, Prompt

COLLECT_SECONDS = 5.0  # a collect call that finds nothing returns after this long


def make_worker(config: JobConfig) -> RolloutWorker:
    """A rollout worker with the engine that the job asks for, not started."""
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)  # a fresh MTP head must be the same everywhere
    engine, eos = _torch_engine(config) if config.rollout.engine == "torch" else make_engine(config)
    reward = make_reward(config.task)
    return RolloutWorker(engine, lambda text, prompt: checked(reward, text, prompt), config, eos)


def _torch_engine(config: JobConfig) -> tuple[Engine, tuple[int, ...]]:
    """The embedded engine, and the tokens that end an answer."""
    policy = load_policy(config.model, need_mtp=SYSTEMS[config.decoding.system].head)
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


class RolloutActor:
    """A rollout worker in a process of its own; calls come in on threads beside the decoding thread."""

    def setup(self, config: JobConfig) -> int:
        """Load model and task and start decoding; the process id."""
        self.worker = make_worker(config)
        self.worker.start()
        return os.getpid()

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """See ``RolloutWorker``."""
        self.worker.submit(prompts)

    def collect(self) -> WorkerReport:
        """See ``RolloutWorker``."""
        return self.worker.collect(COLLECT_SECONDS)

    def set_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See ``RolloutWorker``."""
        self.worker.set_weights(weights, version)

    def set_decoding(self, decoding: DecodingConfig) -> None:
        """See ``RolloutWorker``."""
        self.worker.set_decoding(decoding)


class TrainerActor:
    """One rank of the trainer in a process of its own."""

    def free_port(self) -> int:
        """A port of this rank's machine, for the others to meet at."""
        return free_port()

    def setup(self, config: JobConfig, rank: int, world: int, meeting: str | None) -> int:
        """Load the policy and meet the other ranks; the process id."""
        self.worker = TrainerWorker(config, rank, world, meeting)
        return os.getpid()

    def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``TrainerWorker``."""
        return self.worker.update(batch, cotrain)

    def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """See ``TrainerWorker``."""
        return self.worker.read_probe_set(texts, sweep, decoding)

    def version(self) -> int:
        """See ``TrainerWorker``."""
        return self.worker.version()

    def weights(self, head: bool) -> dict[str, Tensor]:
        """See ``TrainerWorker``."""
        return self.worker.weights(head)

    def head_fingerprint(self) -> str:
        """See ``TrainerWorker``."""
        return self.worker.head_fingerprint()

    def save(self, folder: Path, loop_state: dict[str, Any]) -> None:
        """See ``TrainerWorker``."""
        self.worker.save(folder, loop_state)

    def load(self, folder: Path) -> dict[str, Any]:
        """See ``TrainerWorker``."""
        return self.worker.load(folder)


def free_port() -> int:
    """A TCP port that is free on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

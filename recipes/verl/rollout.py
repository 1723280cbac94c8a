"""The embedded engine behind verl's rollout interface: ``actor_rollout_ref.rollout.name=bebop``.

A replica is one Ray actor with one engine on one device (parallel sizes above 1 are refused). Weights reach it through
Ray's object store. It was tested only on a CPU.
"""

import os
from typing import Any

import ray
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_name
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from bebop.errors import UserError
from bebop.verl_job.server import EmbeddedServer, ServerConfig
from bebop.verl_job.settings import parse_engine


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's actor, by which the training worker finds it."""
    return f"bebop_server_{replica_rank}"


class VerlServer(EmbeddedServer):
    """Server whose output has verl's own type."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of ``EmbeddedServer`` as a ``TokenOutput``."""
        return TokenOutput(**await super().generate(*args, **kwargs))


class EmbeddedReplica(RolloutReplica):
    """Replica that starts the server and hands it to verl."""

    async def launch_servers(self) -> None:
        """Start one actor; Ray's GPUs stay with the training workers."""
        rollout = self.config
        parallel = {
            name: int(getattr(rollout, name))
            for name in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        }
        wrong = next((name for name, size in parallel.items() if size != 1), None)
        if wrong is not None:
            raise UserError(f"rollout.{wrong}={parallel[wrong]} is not possible with rollout.name=bebop: give 1")
        config = ServerConfig(
            path=copy_to_local(self.model_config["path"]),
            dtype=rollout.dtype,
            device="cpu" if get_device_name() == "cpu" else "auto",
            prompt_length=rollout.prompt_length,
            response_length=rollout.response_length,
            max_length=rollout.max_model_len or rollout.prompt_length + rollout.response_length,
            seed=rollout.seed,
            engine=parse_engine(dict(rollout.engine_kwargs or {}).get("bebop")),
        )
        options: dict[str, Any] = {"num_cpus": 0, "max_concurrency": self.max_concurrency}
        name = server_name(self.replica_rank)
        self._server_handle = ray.remote(VerlServer).options(name=name, **options).remote(config)
        await self._server_handle.ready.remote()
        self.servers = [self._server_handle]
        self._server_address = f"{name}:0"


class EmbeddedAdapter(BaseRollout):
    """Training worker's side: sends weights to its replica's server."""

    is_leader_rank = True

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank == -1 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the engine keeps its memory."""

    async def release(self) -> None:
        """Do nothing: the engine keeps its memory."""

    async def update_weights(
        self, weights: Any, wire_format: str = "named_tensors", global_steps: int | None = None, **settings: Any
    ) -> None:
        """Collect whole tensors (every rank takes part) and send them; return once the engine decodes with them."""
        if wire_format != "named_tensors" or settings.get("peft_config") is not None:
            raise UserError("the embedded engine takes whole weights: no LoRA adapters, no differences")
        named = {name: _whole(tensor) async for name, tensor in ensure_async_iterator(weights)}
        server = ray.get_actor(server_name(self.replica_rank))
        await server.load.remote(ray.put(named), global_steps)


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)

"""What a stock job needs on a CPU and verl does not bring, without a line of the plug-in: a platform and a rollout.

Loaded through VERL_USE_EXTERNAL_MODULES. Answers depend on the prompt, the weights and how often it was asked, so two
jobs that learn the same are asked and answered the same.
"""

import contextlib
from typing import Any

import ray
import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

TOKENS = 12


class Device:
    """``torch.cpu`` with the calls of ``torch.cuda`` that verl makes."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        named = {"mem_get_info": (0, 1), "get_device_name": "CPU"}
        return lambda *args, **kwargs: named.get(name, 0 if "memory_" in name else None)


class PlatformStock(PlatformBase):
    """The CPU."""

    device_name, vendor_name, device_module = "cpu", "cpu", Device()


def _answer(value: Any) -> Any:
    return lambda self, *args, **kwargs: value


ANSWERS = {
    "is_available": True,
    "is_platform_available": False,
    "current_device": torch.device("cpu"),
    "device_count": 1,
    "get_device_capability": (None, None),
    "communication_backend_name": "gloo",
    "visible_devices_envvar": "VERL_STOCK_VISIBLE_DEVICES",
    "ray_resource_name": "GPU",
    "ray_noset_envvars": [],
    "is_ipc_supported": False,
    "nvtx_range": contextlib.nullcontext(),
}
for name in PlatformBase.__abstractmethods__:
    if name not in vars(PlatformStock):
        setattr(PlatformStock, name, _answer(ANSWERS.get(name)))
PlatformStock.__abstractmethods__ = frozenset()
PlatformStock.manual_seed = PlatformStock.manual_seed_all = lambda self, seed: torch.manual_seed(seed)
PlatformRegistry.register(platform="stock")(PlatformStock)

_init = torch.distributed.init_process_group


def _one_backend(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    return _init("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = _one_backend


class Server:
    """A model of transformers, one token at a time."""

    def __init__(self, path: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.version = 0
        self.asked: dict[tuple[int, ...], int] = {}

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.model.load_state_dict(weights, strict=False)  # a head may be among them
        self.version = version

    @torch.no_grad()
    def generate(self, prompt_ids: list[int], **settings: Any) -> Any:
        key = tuple(prompt_ids)
        self.asked[key] = self.asked.get(key, 0) + 1
        random = torch.Generator().manual_seed(hash((key, self.asked[key])) % 2**31)
        ids, logprobs = list(prompt_ids), []
        for _ in range(TOKENS):
            logits = self.model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
            ids.append(int(torch.multinomial(logits.exp(), 1, generator=random)))
            logprobs.append(float(logits[ids[-1]]))
        extra = {"global_steps": self.version}
        tokens = ids[len(prompt_ids) :]
        return TokenOutput(token_ids=tokens, log_probs=logprobs, stop_reason="completed", extra_fields=extra)

    def nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wake_up = sleep = abort_all_requests = resume_generation = nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = nothing


class Adapter(base.BaseRollout):
    """Hands weights to the server."""

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, wire_format: str = "", global_steps: int = 0, **settings: Any) -> None:
        named = {n: (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for n, t in weights}
        await ray.get_actor("stock_server").load.remote(named, global_steps)


class Replica(RolloutReplica):
    """One server."""

    async def launch_servers(self) -> None:
        options = {"name": "stock_server", "num_cpus": 0}
        self._server_handle = ray.remote(Server).options(**options).remote(self.model_config["path"])
        self.servers, self._server_address = [self._server_handle], "stock:0"


base._ROLLOUT_REGISTRY["stock", "async"] = "stock.Adapter"
RolloutReplicaRegistry.register("stock", lambda: Replica)

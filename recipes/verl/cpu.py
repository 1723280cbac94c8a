"""The CPU as a platform of verl, which has none built in: for tests and demonstrations on a machine without a GPU.

``VERL_PLATFORM=cpu`` chooses it. Ray's GPUs are only numbers there: set ``ray_init.num_gpus``.
"""

import contextlib
import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch.multiprocessing import reductions
from verl.plugin.platform.platform_base import PlatformBase

from bebop.verl_job.hooks import wrap

VISIBLE = "VERL_CPU_VISIBLE_DEVICES"
CONSTANTS = {
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"), 0),
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "ipc_collect", "set_device"), None),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), None),
    "mem_get_info": (0, 1),
    "get_device_name": "CPU",
}


class CpuDevice:
    """``torch.cpu`` with the functions of ``torch.cuda`` that verl calls."""

    def __getattr__(self, name: str) -> Any:
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        if name in CONSTANTS:
            return lambda *args, **kwargs: CONSTANTS[name]
        return getattr(torch.cpu, name)


class PlatformCPU(PlatformBase):
    """The CPU as a ``PlatformBase``."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = CpuDevice()

    def is_available(self) -> bool:
        """Return True: there always is a CPU."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return False: verl must not choose the CPU unless asked."""
        return False

    def current_device(self) -> Any:
        """Return the device itself: torch refuses the number 0 here."""
        return torch.device("cpu")

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing: nothing runs asynchronously."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing: the CPU has no allocator settings."""

    def empty_cache(self) -> None:
        """Do nothing: the CPU has no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        """Return no capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return Gloo."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return a variable that nothing else reads."""
        return VISIBLE

    def nvtx_range(self, msg: str) -> Any:
        """Return a context that does nothing."""
        return contextlib.nullcontext()

    def profiler_start(self) -> None:
        """Do nothing: there is no profiler."""

    def profiler_stop(self) -> None:
        """Do nothing: there is no profiler."""

    def ray_resource_name(self) -> str:
        """Return Ray's GPUs, which are only numbers here."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False."""
        return False

    def cudart(self) -> Any:
        """Return None."""
        return None


def register_platform(manager: ModuleType) -> None:
    """Register the platform that ``VERL_PLATFORM=cpu`` chooses."""
    os.environ.setdefault(VISIBLE, "0")  # verl's launcher of SGLang reads it in every worker
    manager.PlatformRegistry.register(platform="cpu")(PlatformCPU)


def register_engine(module: ModuleType) -> None:
    """Let verl's FSDP2 engine train on the CPU; verl registers it only for GPU and NPU."""
    module.EngineRegistry.register("language_model", "fsdp2", device="cpu")(module.FSDPEngineWithLMHead)


def one_backend(distributed: ModuleType) -> None:
    """Let verl request only the backend ``cpu:gloo``.

    torch rejects ``cpu:gloo,<device>:<backend>`` if both parts name the same device.
    """

    def around(original: Any, timeout_second: float | None = None, backend: str | None = None) -> Any:
        return original(timeout_second, backend or "cpu:gloo")

    wrap(distributed, "initialize_global_process_group_ray", around)


def share_by_name(_sglang_rollout: ModuleType) -> None:
    """Let verl's SGLang adapter share CPU tensors between processes.

    SGLang's own reduction writes a device's UUID into the seventh argument of every tensor, but a CPU tensor has three.
    The server does not descend from the worker, so memory is shared by name and not by file descriptor.
    """
    torch.multiprocessing.set_sharing_strategy("file_system")
    patch_torch = importlib.import_module("sglang.srt.utils.patch_torch")
    torch_own: Any = reductions  # SGLang keeps torch's function in torch's module

    def around(original: Any, tensor: Any) -> Any:
        return torch_own._reduce_tensor_original(tensor) if tensor.device.type == "cpu" else original(tensor)

    wrap(patch_torch, "_reduce_tensor_modified", around)


def import_sglang(replica: ModuleType) -> None:
    """Let verl import SGLang for the CPU, with kernels in Triton's interpreter.

    verl's own loader requests SGLang's CPU engine during its import, since it expects a GPU only in the servers. That
    engine needs the package ``sgl_kernel``, which has no build for this torch.
    """

    def load() -> Any:
        return importlib.import_module("verl.workers.rollout.sglang_rollout.async_sglang_server").SGLangReplica

    replica.RolloutReplicaRegistry.register("sglang", load)

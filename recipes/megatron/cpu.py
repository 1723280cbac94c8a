"""megatron-core where there is no GPU: what it asks of CUDA without a choice is answered here, once per process."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def prepare() -> None:
    """Let megatron-core run on CPU tensors; does nothing where there is a GPU.

    Replaced are the device that buffers are made on, a move to it, waiting for it, and the states of CUDA's random
    generators (weights are read from a checkpoint and nothing drops out, so no numbers are drawn).
    """
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = _stay  # type: ignore[assignment, method-assign]
    random.initialize_rng_tracker()
    tracker: Any = random._CUDA_RNG_STATE_TRACKER
    tracker.fork = _no_fork


def _stay(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _no_fork(name: str = "") -> AbstractContextManager[None]:
    return nullcontext()

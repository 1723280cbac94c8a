"""States as a checkpoint keeps them."""

from typing import Any

import numpy as np
import torch


def portable(value: Any) -> Any:
    """Arrays as tensors, tuples as lists: what ``torch.load(weights_only=True)`` reads."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {name: portable(inner) for name, inner in value.items()}
    return [portable(inner) for inner in value] if isinstance(value, list | tuple) else value


def arrays(value: Any) -> Any:
    """Tensors as arrays of their own, the way back."""
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy().copy()
    if isinstance(value, dict):
        return {name: arrays(inner) for name, inner in value.items()}
    return [arrays(inner) for inner in value] if isinstance(value, list) else value

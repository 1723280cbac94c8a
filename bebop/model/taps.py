"""The states between a model's layers, for parts that read them."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor


@contextmanager
def tapped(modules: Any, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """What comes out of these decoder layers while the block runs; negative ones count from the last."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _inputs, out: states.update({layer: out[0] if isinstance(out, tuple) else out})

    hooks = [modules[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()

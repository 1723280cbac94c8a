"""Cycles that a CUDA graph can hold: their bodies read nothing of the device and are the same operations every time.

A CUDA graph is imitated by ``Tape``: it runs a body once, takes back all that was written, and keeps every operator
with the very tensors that it had. Playing it runs these operators again and knows nothing of Python: what a body took
from the host is as it was. So what does not survive a graph does not survive here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Plan, Rows
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import decoder_of, started
from tests.rollout.test_launches import HostWait, NoCopies

STATIC = [name for name, system in SYSTEMS.items() if system.static]
# Operators that a device's numbers come to the host by, or that make a tensor as large as such a number says.
READS = {
    "item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "is_nonzero", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "masked_select", "repeat_interleave", "bincount",
}  # fmt: skip
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Watched(TorchDispatchMode):
    """Sees every operator that is not made of others; raises ``HostWait`` for one that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[tuple[int, ...], ...]]] = []  # names, and shapes of what comes out

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; in inference mode even those arrive that are made of others."""
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name.removeprefix("aten::")
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
        if name in READS or (name in INDEXES and masks):
            raise HostWait(f"{name} of {[tuple(x.shape) for x in tree_leaves(args) if isinstance(x, Tensor)]}")
        return self.run(name, func, args, kwargs)

    def run(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that is allowed. Views are no work, and some are kept from cycle to cycle."""
        out = func(*args, **kwargs)
        if not func.is_view:
            self.shapes.append((name, tuple(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))))
        return out


@contextmanager
def watched() -> Iterator[Watched]:
    """Within this block operators are seen, and copies between host and device are refused."""
    with NoCopies(), Watched() as one:
        yield one


# ---- bodies


@cache
def policy(needs: bool) -> Policy:
    """A policy, with the parts of systems or without; nobody may change it."""
    return tiny_policy(seed=3, dtype=torch.float64, with_parts=needs)


def engine(system: str, slots: int = 4, max_length: int = 64, **settings: Any) -> TorchEngine:
    config = DecodingConfig(system=system, draft_tokens=3, cost_ratio=0.2, verify_ratio=0.1)
    return TorchEngine(policy(bool(SYSTEMS[system].needs)), config, slots=slots, max_length=max_length, **settings)


ASKED: dict[str, dict[str, Any]] = {
    "neutral": {},
    "of all kinds": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
}


@pytest.mark.parametrize(
    ("system", "asked"),
    slow_but(
        [*((system, "neutral") for system in STATIC), ("bebop_tree", "of all kinds")],
        [(system, asked) for system in STATIC for asked in ASKED],
        several=True,
    ),
)
def test_a_body_reads_nothing_and_is_the_same_operations_in_every_cycle(system: str, asked: str) -> None:
    """Of four rows the last is dead: it emits nothing."""
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8]]
    one = started(engine(system), requests(prompts, max_new_tokens=40, **ASKED[asked]), cycles=2)
    one.slots.retire(3)
    emitted, seen = [one.slots.count.tolist()], []
    for _ in range(2):
        seen.append(shapes(one, rows=4))
        emitted.append(one.slots.count.tolist())
    assert all(operators == seen[0] for operators in seen) and len(seen[0]) > 50
    steps = torch.tensor(emitted).diff(dim=0)
    assert (steps[:, :3] > 0).all() and (steps[:, 3] == 0).all()


@torch.inference_mode()
def shapes(one: TorchEngine, rows: int) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Run a body; return its operators and the shapes of what comes out of them.

    Raises:
        HostWait: It reads the device.
    """
    with watched() as seen:
        decoder_of(one).body(Plan(rows=rows, longest=40, drafts=3, static=True))
    return seen.shapes


def test_what_is_planted_in_a_body_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, shapes that depend on numbers, and what Python decides by a number of its own."""
    own, turns = Rows.verify_uniforms, iter(range(9))
    plants: dict[str, Callable[[Tensor], object]] = {
        "item": lambda x: x[0, 0].item(),
        "truth": lambda x: bool((x > 0).any()),
        "list": lambda x: x.tolist(),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0.5],
        "mask to write to": lambda x: x.clone().__setitem__(x > 0.5, 0.5),
        "of three": lambda x: torch.where(x > 0.5),
        "unique": lambda x: x.unique(),
    }
    for name, plant in plants.items():
        one = started(engine("bebop"), requests([[1, 2, 3]], max_new_tokens=40), cycles=1)
        monkeypatch.setattr(Rows, "verify_uniforms", lambda rows, n, p=plant: (p(own(rows, n)), own(rows, n))[1])
        with pytest.raises(HostWait):
            shapes(one, rows=2)
            pytest.fail(f"{name} was not seen")
    monkeypatch.setattr(Rows, "verify_uniforms", lambda rows, n: own(rows, n).abs() if next(turns) else own(rows, n))
    assert shapes(one, rows=2) != shapes(one, rows=2)


def test_a_system_that_is_not_static_is_seen() -> None:
    """Or its mark is missing."""
    for system in ("ngram", "blockpilot", "pad"):
        one = started(engine(system), requests([[1, 2, 1, 2]], max_new_tokens=20), cycles=1)
        with pytest.raises(HostWait):
            shapes(one, rows=1)
            pytest.fail(f"{system} reads nothing")

"""What a decode cycle launches on an accelerator, without one, and that its host waits for nothing before its end.

Model and slots lie on torch's meta device, whose tensors have shapes and no numbers. What reads a number, or makes a
shape of one, fails there by itself; what crosses between host and device is seen by ``Launches``. Questions whether a
tensor is on a CUDA device are answered with yes, so that the branches for one are taken.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import KernelInterface

from bebop.config.job import DecodingConfig
from bebop.model import attention, ragged_attention
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.graphs import EagerRecorder, Graphs
from bebop.rollout.decoding.verify_trace import Tracer
from bebop.rollout.slots import Slots, SlotSizes
from bebop.systems import SYSTEMS as REGISTRY
from bebop.trajectory import SamplingParams
from tests.builders import bare_policy, needs_more, tiny_policy
from tests.cases import slow_but
from tests.model.families import made

DEVICE = torch.device("meta")
CONTEXT = 8  # tokens of each request
# Operators that make a tensor of what is there, or of nothing: they launch no kernel.
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"}
ALWAYS = {torch.from_numpy, torch.Tensor.new_tensor, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.tolist}
COPIES = {torch.tensor, torch.as_tensor, torch.asarray}  # of what is no tensor
INDEXED = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class HostWait(AssertionError):
    """The host waits for the device."""


class Launches(TorchDispatchMode):
    """Count kernels, one an operator that is not a view; raise ``HostWait`` for copies between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; in inference mode even those arrive that are made of others."""
        with self:
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        if any(x.device != DEVICE for x in tensors):
            raise HostWait(f"{name} has a tensor of the host: {[(str(x.device), list(x.shape)) for x in tensors]}")
        if not func.is_view and name not in FREE:
            self.kernels[name] += 1
        return out

    def launch(self, kernel: KernelInterface[Any], grid: object) -> Callable[..., None]:
        """Stand in for the launch of a Triton kernel."""
        return lambda *_, **__: self.kernels.update([kernel.__name__])

    def attend(self, query: Tensor, *_: object, **__: object) -> Tensor:
        """Stand in for fused attention, of which there is one kernel: it gives heads innermost."""
        self.kernels["attention"] += 1
        return torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


class NoCopies(TorchFunctionMode):
    """Raises ``HostWait`` where numbers of Python become a tensor."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call one function of torch."""
        if func in ALWAYS or (func in COPIES and not isinstance(next(iter(args), None), Tensor)):
            raise HostWait(f"{func.__name__}{args} copies between host and device")
        if func in INDEXED and any(isinstance(one, list | np.ndarray) for one in (args[1], *_parts(args[1]))):
            raise HostWait(f"an index of {args[1]!r} is copied to the device")
        return func(*args, **(kwargs or {}))


class OnCuda(NoCopies):
    """Says of every tensor that it is on a CUDA device, beside that."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call one function of torch."""
        return True if func == IS_CUDA else super().__torch_function__(func, types, args, kwargs)


def _parts(index: object) -> tuple[object, ...]:
    return index if isinstance(index, tuple) else ()


@contextmanager
def counted() -> Iterator[Launches]:
    """Within this block, kernels are counted and none is run."""
    launches = Launches()
    with ExitStack() as stack:
        for module in (attention, ragged_attention):
            stack.enter_context(mock.patch.object(module, "scaled_dot_product_attention", launches.attend))
        launch = lambda kernel, grid: launches.launch(kernel, grid)  # noqa: E731
        stack.enter_context(mock.patch.object(KernelInterface, "__getitem__", launch))
        stack.enter_context(OnCuda())
        stack.enter_context(launches)
        yield launches


def cycle(
    policy: Policy,
    *configs: DecodingConfig,
    batch: int = 4,
    traced: Sequence[int] = (),
    graphs: bool = False,
    paged: bool = False,
    **params: Any,
) -> Counter[str]:
    """The kernels of a cycle of ``batch`` new requests; ``params`` of each.

    ``configs``: of the decoder, one after the other, the last of which is in charge; ``traced``: slots; ``graphs``: the
    cycle is one that could be captured; ``paged``: the caches are in pages.

    Raises:
        HostWait: The host would wait for the device.
    """
    draft = [] if policy.draft is None else policy.draft.modules()
    for module in (*policy.modules(), *policy.parts.values(), *draft):
        module.to(DEVICE)
    sizes = SlotSizes(
        slots=batch, length=64, drafts=max(config.limit for config in configs), vocab=policy.vocab_size,
        cache_tokens=None if paged else 0,
    )  # fmt: skip
    slots = Slots(sizes, DEVICE)
    decoder = DraftVerify(policy, slots, configs[0])
    decoder.graphs = Graphs(EagerRecorder(), batch) if graphs else None
    for config in configs[1:]:
        decoder.configure(config)
    tracer = Tracer("mtp")
    decoder.observers.append(tracer)
    for slot in traced:
        tracer.follow(slot)
    asked = [SamplingParams(max_new_tokens=32, seed=row, **params) for row in range(batch)]
    slots.start(0, asked, [[1] * CONTEXT] * batch)
    with counted() as launches:
        try:
            decoder.cycle(batch, CONTEXT - 1, 0)
        except (NotImplementedError, RuntimeError) as error:
            raise HostWait(str(error)) from error
    return launches.kernels


SYSTEMS = ("autoregressive", "target_only", "bebop", "bebop_adaptive", "bebop_block", "block")
OTHERS = ("block_target_only", "bebop_tree", "firp", "draft_model")
ASKED: dict[str, dict[str, Any]] = {
    "neutral": {},
    "tempered": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.2, "stop_token_ids": (3,)},
}
# Kernels of a decoder layer, whatever the family, and of all else in a cycle; before norms, rotary embeddings and gates
# were a kernel each, 49 in a layer of Qwen3 and 33 in one of Llama, and 125 and 481 beside them. Of a layer four are
# products, two are norms with their sums, and one each turns and stores, attends and gates; over slots one more copies
# what attention gives. A pass over slots makes a mask beside that.
LAYER = {True: 9, False: 10}
REST = {("autoregressive", True): 61, ("bebop", True): 202, ("autoregressive", False): 64, ("bebop", False): 225}


def policy_of(system: str) -> Policy:
    return tiny_policy(dtype=torch.bfloat16, with_parts=needs_more(system))


@pytest.mark.parametrize(
    ("system", "asked"),
    slow_but(
        [*((system, "neutral") for system in SYSTEMS), ("bebop", "truncated"), ("target_only", "penalised")],
        [(system, asked) for system in (*SYSTEMS, *OTHERS) for asked in ASKED],
        several=True,
    ),
)
def test_no_cycle_waits_for_the_device(system: str, asked: str) -> None:
    """As a graph would hold it, where the system allows that: drafts that end early with all rows then do not."""
    config = DecodingConfig(system=system, draft_tokens=3)
    assert cycle(policy_of(system), config, graphs=REGISTRY[system].static, **ASKED[asked])


def test_nor_for_traces_temperatures_of_drafts_and_a_drafter_that_was_in_charge_before() -> None:
    chain, block, plain = (DecodingConfig(system=name, draft_tokens=3) for name in ("bebop", "block", "autoregressive"))
    policy = policy_of("block")
    assert cycle(policy, chain, block, plain, traced=(0, 2), batch=3)
    assert cycle(policy, DecodingConfig(system="bebop", draft_tokens=2, draft_temperature=0.8), batch=1, traced=(0,))


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool((x > 0).any()),
    "whole number": lambda x: int(x.max()),
    "list": lambda x: x.tolist(),
    "nonzero": lambda x: x.nonzero(),
    "masked": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeats": lambda x: x.repeat_interleave(x),
    "of three": lambda x: torch.where(x > 0),
    "to the host": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "from the host": lambda x: torch.arange(len(x)).to(x.device),
    "into the host": lambda x: torch.empty(len(x), dtype=x.dtype).copy_(x),
    "into the device": lambda x: x.copy_(torch.arange(len(x))),
    "a list": lambda x: torch.tensor([1] * len(x), device=x.device),
    "a number": lambda x: torch.as_tensor(0.5, device=x.device),
    "like another": lambda x: x.new_tensor([1, 2]),
    "an index": lambda x: x[[0, 1]],
    "one index of two": lambda x: x[:, None][[0, 1], 0],
    "an index to write to": lambda x: x.__setitem__([0, 1], 0),
}


@pytest.mark.parametrize("read", READS)
def test_every_read_and_copy_is_seen(read: str) -> None:
    x = torch.ones(4, dtype=torch.long, device=DEVICE)
    with torch.inference_mode(), counted(), pytest.raises((HostWait, NotImplementedError, RuntimeError)):
        READS[read](x)


def test_a_read_in_a_cycle_is_seen_and_work_on_the_device_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    own, config = Rows.verify_uniforms, DecodingConfig(system="bebop", draft_tokens=3)
    for change, waits in ((lambda x: x[(x < 1).all(-1)], True), (lambda x: x.where(x < 1, 0.5), False)):
        monkeypatch.setattr(Rows, "verify_uniforms", lambda rows, drafts, change=change: change(own(rows, drafts)))
        if waits:
            with pytest.raises(HostWait):
                cycle(bare_policy(), config)
        else:
            cycle(bare_policy(), config)


@pytest.mark.parametrize("system", ["autoregressive", "bebop"])
@pytest.mark.parametrize(("kind", "paged"), [("qwen3", True), ("qwen3", False), ("llama", True)])
def test_a_cycle_launches_few_kernels(kind: str, paged: bool, system: str) -> None:
    """By models of one layer and of two: what a layer costs is what the second adds."""
    found: list[Counter[str]] = []
    for layers in (1, 2):
        policy = made(kind, torch.bfloat16, num_hidden_layers=layers)
        policy.mtp = MTPHead(policy.backbone).eval()
        found.append(cycle(policy, DecodingConfig(system=system, draft_tokens=3), paged=paged))
    layer = found[1] - found[0]
    assert layer.total() == LAYER[paged], layer
    assert (found[0] - layer).total() <= REST[system, paged], found[0] - layer

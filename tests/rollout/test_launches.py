"""What a decode cycle launches on an accelerator, and that its host waits for nothing before the cycle's end."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.base import Rows
from tests.builders import bare_policy, tiny_policy
from tests.cases import slow_but
from tests.model.families import made
from tests.rollout.launches import DEVICE, HostWait, counted, cycle

SYSTEMS = ("autoregressive", "target_only", "bebop", "bebop_block", "block")
OTHERS = ("block_target_only", "bebop_tree", "firp")
ASKED: dict[str, dict[str, Any]] = {
    "neutral": {},
    "tempered": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.2, "stop_token_ids": (3,)},
}
# Kernels of a decoder layer, whatever the family, and of all else in a cycle; before norms, rotary embeddings and gates
# were a kernel each, 49 in a layer of Qwen3 and 33 in one of Llama, and 125 and 481 beside them.
LAYER = 12
REST = {"autoregressive": 63, "bebop": 224}


def policy_of(system: str) -> Policy:
    needed = system.startswith(("block", "firp"))
    return (tiny_policy if needed else bare_policy)(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("system", "asked"),
    slow_but(
        [*((system, "neutral") for system in SYSTEMS), ("bebop", "truncated"), ("target_only", "penalised")],
        [(system, asked) for system in (*SYSTEMS, *OTHERS) for asked in ASKED],
        several=True,
    ),
)
def test_no_cycle_waits_for_the_device(system: str, asked: str) -> None:
    assert cycle(policy_of(system), DecodingConfig(system=system, draft_tokens=3), **ASKED[asked])


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


@pytest.mark.parametrize("system", REST)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_a_cycle_launches_few_kernels(kind: str, system: str) -> None:
    """By models of one layer and of two: what a layer costs is what the second adds."""
    found: list[Counter[str]] = []
    for layers in (1, 2):
        policy = made(kind, torch.bfloat16, num_hidden_layers=layers)
        policy.mtp = MTPHead(policy.backbone).eval()
        found.append(cycle(policy, DecodingConfig(system=system, draft_tokens=3)))
    layer = found[1] - found[0]
    assert layer.total() <= LAYER, layer
    assert (found[0] - layer).total() <= REST[system], found[0] - layer

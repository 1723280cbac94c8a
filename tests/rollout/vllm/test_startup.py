"""A slow start, and the verdicts of the self-test on answers whose temperature is known.

Real ones are in tests/integration/vllm.
"""

import asyncio
import threading
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bebop.errors import UserError
from bebop.rollout.vllm.engine import PROMPT, TOP, VllmServer, self_test, slope
from bebop.rollout.vllm.steps import StepRecord, Verified
from bebop.runtime.watchdog import Deadline
from bebop.trajectory import SamplingParams

V = 11


def row(logits: torch.Tensor) -> Mapping[int, Any]:
    """The most likely tokens of a place, as vLLM gives them."""
    found = logits.log_softmax(-1).topk(TOP)
    return {
        token: SimpleNamespace(logprob=value)
        for token, value in zip(found.indices.tolist(), found.values.tolist(), strict=True)
    }


class Answers:
    """In the place of ``Core``: fixed logits by place, at the temperatures that are asked for times ``factor``."""

    def __init__(self, factor: float = 1.0, drafts: int = 3, sampled: bool = True, seen: bool = True) -> None:
        self.factor, self.drafts, self.sampled, self.seen = factor, drafts, sampled, seen
        self.arguments, self.past = {"max_model_len": 64}, None
        self.logits = torch.randn(64, V, generator=torch.Generator().manual_seed(0)) * 3
        self.open: dict[str, Any] = {}

    def add(self, ids: list[int], params: SamplingParams, fresh: int, **more: Any) -> str:
        key = str(len(self.open))
        if "prompt_logprobs" in more:
            rows = [row(self.logits[place]) for place in range(len(ids))]
            self.open[key] = SimpleNamespace(request_id=key, prompt_logprobs=rows)
            return key
        places = range(len(PROMPT), len(PROMPT) + fresh)
        rows = [row(self.logits[place] / (params.temperature * self.factor)) for place in places]
        given = SimpleNamespace(token_ids=[1] * fresh, logprobs=rows)
        self.open[key] = SimpleNamespace(request_id=key, outputs=[given], finished=True)
        return key

    def outputs(self) -> tuple[list[Any], StepRecord]:
        found, self.open = [*self.open.values()], {}
        one = Verified(drafted=self.drafts, accepted=0, sampled=self.sampled)
        return found, StepRecord(_found={"a": one} if self.seen else {})

    def abort(self, key: str) -> None: ...


def test_a_start_may_take_however_long() -> None:
    begun, gate = threading.Event(), threading.Event()
    core: Any = SimpleNamespace(start=lambda: begun.set() or gate.wait(), close=lambda: None)
    server = VllmServer(
        core, SimpleNamespace(), {}, sampled=True, recompute=False, to_update=SimpleNamespace(), dtype=torch.float32,
        threads=1, hang_after=0.01,
    )  # type: ignore[arg-type] # fmt: skip
    server._deadline = Deadline(0.01, first=0.01)

    async def main() -> str | None:
        start = asyncio.create_task(server.start())
        await asyncio.to_thread(begun.wait)
        await asyncio.sleep(0.05)
        why = server.dead()
        gate.set()
        await start
        await server.close()
        return why

    assert asyncio.run(main()) is None and server._deadline.limit("step") == 0.01


def test_a_sound_engine_passes() -> None:
    self_test(Answers(), sampled=True)  # type: ignore[arg-type]
    self_test(Answers(sampled=False), sampled=False)  # type: ignore[arg-type]
    self_test(Answers(drafts=0, seen=False), sampled=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("core", "word"),
    [
        (Answers(factor=1.2), r"as if temperature=0\.5 were 0\.6"),
        (Answers(factor=0.8), r"as if temperature=0\.5 were 0\.4"),
        (Answers(factor=float("nan")), r"as if temperature=0\.5 were nan"),
        (Answers(factor=float("inf")), r"as if temperature=0\.5 were inf"),
        (Answers(seen=False), "verified no draft"),
        (Answers(sampled=False), "without the distributions"),
    ],
)
def test_what_does_not_work_is_said(core: Answers, word: str) -> None:
    with pytest.raises(UserError, match=word):
        self_test(core, sampled=True)  # type: ignore[arg-type]


def test_half_precision_is_no_fault() -> None:
    core = Answers()
    core.logits = core.logits.bfloat16().float()
    self_test(core, sampled=True)  # type: ignore[arg-type]


def test_the_slope_is_the_inverse_temperature() -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(1))
    for temperature in (0.3, 1.0, 4.0):
        products, squares = slope([row(logits / temperature)], [row(logits)])
        assert products / squares == pytest.approx(1 / temperature, rel=1e-4)

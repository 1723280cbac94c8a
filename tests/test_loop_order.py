"""Of the loop: how often it saves, how soon a lost message is noticed, and that messages do not overtake."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bebop.config import DecodingConfig, JobConfig
from bebop.loop import Loop
from bebop.parsing import from_dict
from bebop.protocols import WorkerReport
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from tests import fakes, test_loop_watch
from tests.builders import tiny_policy
from tests.fakes import FakeSink, FakeTrainer, FakeWorker, prompt
from tests.test_loop_watch import Drafting, go, lines, make


@dataclass(kw_only=True)
class Saving(FakeTrainer):
    """Remembers every time it was told to save."""

    steps: list[int] = field(default_factory=list)

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        await super().save(step, loop_state)
        self.steps.append(step)


@pytest.mark.parametrize(("every", "expected"), [(0, [6]), (3, [3, 6]), (4, [4, 6])])
def test_a_step_is_saved_once(every: int, expected: list[int]) -> None:
    trainer = Saving()
    assert go(Loop(fakes.job(steps=6, save_every=every), prompt, [FakeWorker()], trainer, [FakeSink()]))
    assert trainer.steps == expected


def test_a_lost_sync_is_noticed_with_the_first_answers_that_show_it(tmp_path: Path) -> None:
    """Version 2 does not arrive; the batch that is trained on at version 2 is the first which should have it."""

    class Deaf(Drafting):
        async def set_weights(self, weights: Any, version: int) -> None:
            if version < 2:
                await super().set_weights(weights, version)

    loop, _, sink = make(test_loop_watch.job(steps=6, staleness=0), tmp_path, Deaf())
    assert go(loop)
    assert [row["drift/state"] for _, row in sink.rows][:3] == [0.0, 0.0, 3.0]


def test_a_wrong_head_is_noticed_on_a_worker_that_is_a_version_behind(tmp_path: Path) -> None:
    """What it says is held against the head that belongs to its version, not to the newest."""

    @dataclass(kw_only=True)
    class Behind(Drafting):
        """Takes weights in after its next report; that of version 3, when version 4 is there, names a wrong head."""

        coming: list[tuple[Any, int]] = field(default_factory=list)

        async def set_weights(self, weights: Any, version: int) -> None:
            await asyncio.sleep(0)
            self.coming.append((weights, version))

        async def collect(self, seen: int) -> WorkerReport:
            wrong = None
            if self.coming and self.version == 3:
                self.reports += 1
                wrong = replace(self._report((), 0.0), head="zeroed")
            while self.coming:
                await super().set_weights(*self.coming.pop(0))
            return wrong or await super().collect(seen)

    loop, _, _ = make(test_loop_watch.job(steps=8, staleness=1), tmp_path, Behind())
    assert go(loop)
    told = [line["evidence"] for line in lines(tmp_path / "controller.jsonl")]
    assert any("checksum of the head is zeroed, not head 0" in evidence for evidence in told)


def test_of_two_sets_of_weights_the_later_one_stays() -> None:
    """Both arrive before the worker gets round to them."""
    config = from_dict(JobConfig, {"trainer": {"group_size": 2}})
    policy = tiny_policy()
    engine = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=2, max_length=256)
    one = RolloutWorker(engine, lambda text, asked: 0.0, config, eos=(11,))
    sent = {}
    for version in (1, 2):
        sent[version] = {n: w.detach() + version for n, w in policy.weights().items()}
        one.set_weights(sent[version], version)
    one.turn()
    assert engine.version == 2
    assert all(torch.equal(w.detach(), sent[2][n]) for n, w in policy.weights().items())

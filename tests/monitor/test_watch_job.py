"""The monitor in a real job, spoiled on purpose: engine, trainer and loop in one process, the built-in model.

What went wrong has to be named within three steps, and co-training on the monitor's word has to repair the head.
"""

import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bebop.config.compose import job_config
from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import Assignment, WorkerReport
from bebop.metrics.metrics import Metrics
from bebop.model.checkpoint import load_policy
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.monitor.watch import JobMonitor
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer.rank import TrainerRank
from bebop.trajectory import Batch, Group
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog, piece_of
from tests.fakes import FakeSink, go

pytestmark = pytest.mark.slow
SPOILED = 7  # the update after which something goes wrong; five steps are the reference
SMALL = (
    "model.device=cpu", "rollout.staleness=0", "trainer.groups_per_step=8", "trainer.group_size=4", "rollout.slots=32",
    "trainer.save_every=0", "monitor.probe_every=10", "monitor.probe_completions=16",
)  # fmt: skip


class Rollouts:
    """A rollout worker that decodes when it is asked for its groups."""

    def __init__(self, config: JobConfig) -> None:
        policy = load_policy(config.model)
        self.engine = TorchEngine(policy, config.decoding, slots=config.rollout.slots)
        reward = make_reward(config.task)
        self.worker = RolloutWorker(
            self.engine, lambda text, prompt: checked(reward, text, prompt), config, policy.eos_token_ids
        )
        self.skip: set[int] = set()  # versions whose weights get lost

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        self.worker.submit(assignments)

    async def collect(self, seen: int) -> WorkerReport:
        await asyncio.sleep(0)
        self.worker.turn()
        return self.worker.collect(0, seen)

    async def set_weights(self, weights: Any, version: int) -> None:
        if version not in self.skip:
            self.worker.set_weights(weights, version)
            self.worker.turn()

    async def configure(self, decoding: DecodingConfig) -> None:
        self.worker.configure(decoding)

    async def restart(self) -> None:
        raise AssertionError("nothing dies here")


class Learner:
    """A trainer in this process; ``after[n]`` is done to it after update n."""

    def __init__(self, config: JobConfig) -> None:
        self.worker = TrainerRank(config)
        self.after: dict[int, Callable[[], None]] = {}

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        learned = self.worker.update(batch, cotrain)
        self.after.get(learned[1], lambda: None)()
        return learned

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        return self.worker.logprobs()

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        return self.worker.read_probe_set(texts, sweep, decoding)

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        return self.worker.certify(groups, since)

    async def weights(self, head: bool) -> Any:
        return self.worker.weights(head)

    async def head_fingerprint(self) -> str:
        return self.worker.head_fingerprint()

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        pass


class Job:
    """A whole job in one process."""

    def __init__(self, folder: Path, steps: int, *overrides: str) -> None:
        torch.set_num_threads(1)
        self.config = job_config([*SMALL, f"trainer.steps={steps}", *overrides])
        self.rollouts, self.learner, self.sink = Rollouts(self.config), Learner(self.config), FakeSink()
        source = PromptSource(self.config.task, chat_encoder(self.rollouts.engine.policy.tokenizer), 300)
        self.folder = folder
        watch, trace = JobMonitor(self.config, folder), self.config.monitor.trace
        piece = piece_of(self.rollouts.engine.policy.tokenizer)
        kept = TrajectoryLog(folder / NAME, trace, piece, self.config.trainer.group_size)
        self.loop = Loop(self.config, source.prompt, [self.rollouts], self.learner, [self.sink], watch, kept)

    def run(self) -> list[dict[str, float]]:
        assert go(self.loop, 1000)
        return [dict(row) for _, row in self.sink.rows]

    def concluded(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "controller.jsonl").read_text().splitlines()]

    @torch.no_grad()
    def spoil(self, *, engine: bool, trainer: bool, noise: float = 0.6) -> None:
        """Noise on every matrix of the head, in proportion to its spread."""
        policies = [self.rollouts.engine.policy] * engine + [self.learner.worker.trainer.policy] * trainer
        for policy in policies:
            generator = torch.Generator().manual_seed(0)
            assert policy.mtp is not None
            for parameter in policy.mtp.parameters():
                if parameter.dim() > 1:
                    parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)


STATES = ("steady", "entropy-driven", "mismatch-driven", "broken")


def states(rows: Sequence[dict[str, float]]) -> list[str]:
    return [STATES[int(row["drift/state"])] for row in rows]


def test_a_head_that_is_spoiled_on_the_engine_is_noticed_and_replaced(tmp_path: Path) -> None:
    job = Job(tmp_path, SPOILED + 4)
    job.learner.after[SPOILED] = lambda: job.spoil(engine=True, trainer=False)
    rows = job.run()
    assert set(states(rows[:SPOILED])) == {"steady"}
    assert "broken" in states(rows[SPOILED : SPOILED + 3])
    assert job.concluded()[0]["action"]["kind"] == "resync" and "checksum" in job.concluded()[0]["evidence"]
    assert states(rows)[-1] == "steady"
    assert rows[-1]["rollout/accept_length"] > np.mean([r["rollout/accept_length"] for r in rows[:SPOILED]]) - 0.15


@pytest.mark.exhaustive("a whole job of half a minute; the first test of this file is one of the kind")
def test_a_zeroed_head_and_a_skipped_sync_are_broken(tmp_path: Path) -> None:
    job = Job(tmp_path / "zeroed", SPOILED + 3)

    def zero() -> None:
        for parameter in job.learner.worker.trainer.policy.mtp.parameters():  # type: ignore[union-attr]
            parameter.data.zero_()
        job.rollouts.engine.policy.mtp.load_state_dict(  # type: ignore[union-attr]
            job.learner.worker.trainer.policy.mtp.state_dict()  # type: ignore[union-attr]
        )

    job.learner.after[SPOILED] = zero  # on both sides: the checksums agree, the drafts are worth nothing
    rows = job.run()
    assert states(rows)[SPOILED] == "broken" and "hardly a draft" in job.concluded()[0]["evidence"]
    skipped = Job(tmp_path / "skipped", 5)
    skipped.rollouts.skip = {2}
    assert states(skipped.run())[2] == "broken"
    assert "weight version is 1, not 2" in skipped.concluded()[0]["evidence"]


@pytest.mark.exhaustive("a whole job of half a minute; the first test of this file is one of the kind")
def test_a_higher_temperature_is_entropy(tmp_path: Path) -> None:
    job = Job(tmp_path, SPOILED + 4)

    def temperature() -> None:
        """As a resume with another temperature has it: engine and trainer alike."""
        sampling = dataclasses.replace(job.config.rollout.sampling, temperature=1.6)
        config = dataclasses.replace(job.config, rollout=dataclasses.replace(job.config.rollout, sampling=sampling))
        job.rollouts.worker.config = job.learner.worker.trainer.config = config
        job.learner.worker.trainer.scorer.temperature = 1.6

    job.learner.after[SPOILED] = temperature
    rows = job.run()
    assert set(states(rows[:SPOILED])) == {"steady"}
    assert "entropy-driven" in states(rows[SPOILED : SPOILED + 3]) and "broken" not in states(rows)
    assert not any(row["action"]["kind"].startswith("cotrain") for row in job.concluded())


@pytest.mark.exhaustive("a whole job of half a minute; the first test of this file is one of the kind")
def test_co_training_on_the_monitor_s_word_repairs_a_spoiled_head(tmp_path: Path) -> None:
    """The head is spoiled everywhere: sending it again would not help."""
    runs = {}
    for mode, more in (("off", 5), ("auto", 18)):
        job = Job(tmp_path / mode, SPOILED + more, f"cotrain={mode}", "cotrain.head.lr=1e-3")
        job.learner.after[SPOILED] = lambda job=job: job.spoil(engine=True, trainer=True)  # type: ignore[misc]
        runs[mode] = job.run(), job.concluded()
    (spoiled, _), (rows, concluded) = runs["off"], runs["auto"]
    assert {"mismatch-driven", "broken"} & set(states(rows[SPOILED : SPOILED + 3]))
    assert any(row["action"]["kind"] == "cotrain_start" for row in concluded)
    lengths = [row["rollout/accept_length"] for row in rows]
    healthy = np.mean(lengths[:SPOILED])
    lost = healthy - np.mean([row["rollout/accept_length"] for row in spoiled[SPOILED:]])
    assert lost > 0.3
    assert np.mean(lengths[-4:]) > healthy - 0.2 * lost
    # Decoding is exact and the policy's update does not see the head, so rewards differ by chance alone.
    gap = np.array([a["reward/mean"] - b["reward/mean"] for a, b in zip(rows, spoiled, strict=False)])
    assert abs(gap.mean()) < 3 * gap.std() / np.sqrt(len(gap)) + 1e-9

"""The loop with the monitor in it: rows, readings, co-training, weights sent again, decoding changed, and resumes."""

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import WorkerReport
from bebop.metrics.metrics import Metrics
from bebop.monitor.controller import Action
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.monitor.watch import JobMonitor, NullMonitor, Observation
from bebop.trajectory import Batch
from tests import fakes
from tests.fakes import SIZE, FakeSink, FakeTrainer, FakeWorker, answer, go, prompt


@dataclass(kw_only=True)
class Drafting(FakeWorker):
    """Says which head it runs, and what it was told about decoding."""

    head: str = "head 0"
    sticky: bool = False  # heads that are sent are lost on the way
    decodings: list[DecodingConfig] = field(default_factory=list)

    async def collect(self, seen: int) -> WorkerReport:
        return dataclasses.replace(await super().collect(seen), head=self.head)

    async def set_weights(self, weights: Any, version: int) -> None:
        await super().set_weights(weights, version)
        if weights[1] is not None and not self.sticky:
            self.head = weights[1]

    async def configure(self, decoding: DecodingConfig) -> None:
        self._call("configure")
        self.decodings.append(decoding)

    async def restart(self) -> None:
        await super().restart()
        self.head = "head 0"
        self.decodings.append(DecodingConfig())


@dataclass(kw_only=True)
class Teaching(FakeTrainer):
    """Its head changes with every co-trained update, and is sent from then on."""

    heads: int = 0
    cotrained: list[bool] = field(default_factory=list)
    read: list[tuple[int, tuple[ProbeText, ...], bool, str]] = field(default_factory=list)

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        self.cotrained.append(cotrain)
        self.heads += cotrain
        return await super().update(batch, cotrain)

    async def weights(self, head: bool) -> Any:
        name = await super().weights(head)
        return name, f"head {self.heads}" if head or self.heads else None

    async def head_fingerprint(self) -> str:
        return f"head {self.heads}"

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        self.read.append((self.version, tuple(texts), sweep, decoding.system))
        reading = ProbeReading(overlap=np.full(8, 0.7), entropy=np.linspace(0, 1, 8), chance=0.1)
        return reading, Sweep(readings=(reading, reading)) if sweep else None


def job(steps: int = 6, staleness: int = 0, mode: str = "off", **monitor: Any) -> JobConfig:
    return fakes.job(steps, staleness, save_every=2, cotrain={"mode": mode}, monitor=monitor)


def make(
    config: JobConfig, folder: Path, *workers: Drafting, resume_from: int = 0, **trainer: Any
) -> tuple[Loop, Teaching, FakeSink]:
    taught, sink = Teaching(**trainer), FakeSink()
    watch = JobMonitor(config, folder, resume_from)
    return Loop(config, prompt, workers or (Drafting(),), taught, [sink], watch), taught, sink


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_have_drift_and_the_time_it_took(tmp_path: Path) -> None:
    loop, trainer, sink = make(job(probe_every=3), tmp_path)
    assert go(loop)
    assert [row["drift/state"] for _, row in sink.rows] == [0.0] * 6
    assert "drift/length/change" in sink.rows[5][1] and "drift/length/change" not in sink.rows[3][1]
    for _, row in sink.rows:
        assert 0 < row["time/monitor"] < row["time/step"]
        parts = sum(row[f"time/{name}"] for name in ("idle", "update", "monitor"))
        assert parts < row["time/step"]
    assert [row["step"] for row in lines(tmp_path / "drift.jsonl")] == list(range(1, 7))
    assert [(version, sweep) for version, _, sweep, _ in trainer.read] == [(0, True), (2, False), (5, False)]
    assert [text.prompt for text in trainer.read[0][1]] == [(0,), (1,), (2,)] * SIZE
    assert len({texts for _, texts, _, _ in trainer.read}) == 1
    assert "bank" in lines(tmp_path / "drift.jsonl")[0] and "sweep" in lines(tmp_path / "drift.jsonl")[0]


def test_without_the_monitor_nothing_is_read(tmp_path: Path) -> None:
    trainer, sink = Teaching(), FakeSink()
    assert go(Loop(job(), prompt, [Drafting()], trainer, [sink]))
    assert not trainer.read and not any("drift" in name for _, row in sink.rows for name in row)
    assert all(row["time/monitor"] < 1e-3 for _, row in sink.rows)
    assert all(state.keys() == {"buffer", "restarts", "disturbed"} for state in trainer.saved.values())


@pytest.mark.parametrize("watched", [True, False])
def test_the_head_learns_always_and_is_sent_once_it_changed(watched: bool, tmp_path: Path) -> None:
    config, worker = job(mode="always"), Drafting()
    loop, trainer, sink = make(config, tmp_path, worker)
    loop.monitor = loop.monitor if watched else NullMonitor(config)
    assert go(loop)
    assert trainer.cotrained == [True] * 6
    assert [weights[1] for weights, _ in worker.weights] == [None, *(f"head {n}" for n in range(1, 7))]
    assert not watched or {row["drift/state"] for _, row in sink.rows} == {0.0}


def test_a_frozen_head_is_never_sent(tmp_path: Path) -> None:
    worker = Drafting()
    loop, trainer, _ = make(job(), tmp_path, worker)
    assert go(loop)
    assert trainer.cotrained == [False] * 6 and {weights[1] for weights, _ in worker.weights} == {None}


class Scripted(JobMonitor):
    """Proposes what it is told, step by step."""

    script: dict[int, Action]

    def observe(self, step: int, *arguments: Any, **named: Any) -> Observation:
        seen = super().observe(step, *arguments, **named)
        action = self.script.get(step, seen.action)
        if action.kind == "set_system":
            self.decoding = dataclasses.replace(self.decoding, system=str(action.value))
        self.monitor.controller.cotraining = 2 <= step < 4
        return dataclasses.replace(seen, action=action)


def scripted(config: JobConfig, folder: Path, script: dict[int, Action], *workers: Drafting) -> tuple[Loop, Teaching]:
    loop, trainer, _ = make(config, folder, *workers)
    loop.monitor = Scripted(config, folder)
    loop.monitor.script = script
    return loop, trainer


def test_in_auto_mode_the_head_learns_from_start_to_stop(tmp_path: Path) -> None:
    loop, trainer = scripted(job(mode="auto"), tmp_path, {})  # it starts at step 2 and stops at step 4
    assert go(loop)
    assert trainer.cotrained == [False, False, True, True, False, False]


def test_decoding_changes_between_cycles_and_a_replacement_is_told_too(tmp_path: Path) -> None:
    victim, other = Drafting(deaths={("collect", 9)}), Drafting()
    script = {1: Action(kind="set_system", value="target_only")}
    loop, trainer = scripted(job(actions=True, probe_every=1), tmp_path, script, victim, other)
    assert go(loop)
    assert [d.system for d in other.decodings] == ["target_only"]
    assert [d.system for d in victim.decodings] == ["target_only", "bebop", "target_only"]
    assert [system for *_, system in trainer.read] == ["bebop"] + ["target_only"] * 5


def test_a_stale_head_is_noticed_named_and_sent_again(tmp_path: Path) -> None:
    """The second worker starts with another head than the trainer's, and the frozen head is not sent.

    Getting at the weights takes so long that it complains once more meanwhile.
    """
    good, bad = Drafting(), Drafting(head="zeroed")
    loop, _, sink = make(job(), tmp_path, good, bad, fetch=50)
    assert go(loop)
    assert [row["drift/state"] for _, row in sink.rows][:1] == [3.0] and sink.rows[-1][1]["drift/state"] == 0.0
    first = lines(tmp_path / "controller.jsonl")[0]
    assert first["action"]["kind"] == "resync" and first["action"]["carried_out"]
    assert "rollout worker 1's checksum of the head is zeroed, not head 0" in first["evidence"]
    assert bad.head == "head 0" and [weights[1] for weights, _ in bad.weights].count("head 0") == 1


def test_what_a_worker_says_while_weights_are_on_their_way_is_not_held_against_it(tmp_path: Path) -> None:
    """The head takes long to arrive, and meanwhile the worker goes on to report the other one."""

    class Slow(Drafting):
        async def set_weights(self, weights: Any, version: int) -> None:
            for _ in range(60 if weights[1] is not None else 0):
                await asyncio.sleep(0)
            await super().set_weights(weights, version)

    slow = Slow(head="zeroed")
    loop, _, sink = make(job(steps=8, staleness=1), tmp_path, Drafting(), slow)
    assert go(loop)
    assert [row["drift/state"] for _, row in sink.rows] == [3.0] * 2 + [0.0] * 6 and slow.head == "head 0"


def test_a_worker_that_loses_the_trained_head_stays_broken(tmp_path: Path) -> None:
    lossy = Drafting(sticky=True)
    loop, _, sink = make(job(mode="always"), tmp_path, lossy)
    assert go(loop)
    assert [row["drift/state"] for _, row in sink.rows][2:] == [3.0] * 4
    assert "not head" in lines(tmp_path / "controller.jsonl")[0]["evidence"]


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_skipped_sync_is_noticed(staleness: int, tmp_path: Path) -> None:
    """Weights from version 2 on get lost; the first batch that should have them is the one trained on at version 2."""

    class Deaf(Drafting):
        async def set_weights(self, weights: Any, version: int) -> None:
            if version < 2:
                await super().set_weights(weights, version)

    loop, _, sink = make(job(steps=8, staleness=staleness), tmp_path, Deaf())
    assert go(loop)
    told = [row["drift/state"] for _, row in sink.rows]
    assert 3.0 in (told[2 : 5 + staleness] if staleness else told[2:3]) and told[:2] == [0.0, 0.0]
    assert "weight version is 1, not" in lines(tmp_path / "controller.jsonl")[0]["evidence"]


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
                wrong = dataclasses.replace(self._report((), 0.0), head="zeroed")
            while self.coming:
                await super().set_weights(*self.coming.pop(0))
            return wrong or await super().collect(seen)

    loop, _, _ = make(job(steps=8, staleness=1), tmp_path, Behind())
    assert go(loop)
    evidence = [line["evidence"] for line in lines(tmp_path / "controller.jsonl")]
    assert any("checksum of the head is zeroed, not head 0" in one for one in evidence)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("deaths", [set(), {("collect", 6)}, {("set_weights", 4)}])
def test_no_false_alarm_with_replacements_and_in_flight_swaps(
    staleness: int, deaths: set[tuple[str, int]], tmp_path: Path
) -> None:
    config = job(steps=9, staleness=staleness, mode="always")
    loop, _, sink = make(config, tmp_path, Drafting(deaths=deaths), Drafting(), slow=30)
    assert go(loop)
    assert {row["drift/state"] for _, row in sink.rows} == {0.0}


def test_a_resumed_job_reads_the_same_texts_and_continues_its_log(tmp_path: Path) -> None:
    config = job(probe_every=2)
    whole = make(config, tmp_path / "whole")
    assert go(whole[0])
    first, before, _ = make(job(steps=4, probe_every=2), tmp_path / "parts")
    assert go(first)
    second, after, sink = make(config, tmp_path / "parts", resume_from=2, version=2)
    second.restore(before.saved[2])
    assert go(second)
    assert [row["step"] for row in lines(tmp_path / "parts" / "drift.jsonl")] == list(range(1, 7))
    assert after.read == [r for r in whole[1].read if r[0] >= 2]
    drift = [{k: v for k, v in row.items() if k.startswith("drift/")} for _, row in sink.rows]
    wanted = [{k: v for k, v in row.items() if k.startswith("drift/")} for _, row in whole[2].rows]
    assert drift == wanted[2:]
    assert answer(prompt(0), 0).prompt == prompt(0)

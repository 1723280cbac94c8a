"""Weights are broadcast over three Ray nodes of this machine: real ranks, real workers, and deaths in between."""

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.protocols import DamagedWeights, TrainerDied, WorkerDied
from bebop.driver.weights import SharedWeights
from bebop.errors import UserError
from bebop.runtime.actor_group import ActorGroup, Options
from bebop.runtime.actors import RayTrainer, RayWorker
from bebop.runtime.broadcast import MAX_FAILURES, Publication, _machine, _process, choose_backend
from bebop.runtime.events import EventLog

SECONDS = 60.0  # for an engine to come to a call, on a busy machine


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Options]]:
    """Options of an actor for each of three nodes."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # short enough for the sockets in it
    (folder / "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        ray.init(address=cluster.address, log_to_driver=False)
        yield [
            {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)} for node in ray.nodes()
        ]
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def parts(run: Path, nodes: list[Options], workers: list[Options]) -> tuple[RayTrainer, list[RayWorker]]:
    config = from_dict(
        JobConfig,
        {
            "rollout": {"workers": len(workers), "slots": 4},
            "trainer": {"broadcast": {"bucket": 1}},
            "runtime": {"hang_after": 10.0},
        },
    )
    made = [RayWorker(config, options, number) for number, options in enumerate(workers)]
    return RayTrainer(config, run, [nodes[0]], workers=made), made


async def loaded(worker: RayWorker, publication: Publication, version: int) -> None:
    """Bring a worker its weights as the pool does, and wait until its engine has them."""
    for tries in range(3):
        try:
            await worker.set_weights(publication, version)
            break
        except DamagedWeights:
            assert tries < 2
    deadline, seen = time.monotonic() + SECONDS, 0
    while True:
        report = await worker.collect(seen)
        if report.version == version:
            return
        seen = report.number
        assert time.monotonic() < deadline, f"{report.version} instead of {version}"


@pytest.mark.slow
def test_machines_get_weights_once_each_whoever_dies_meanwhile(nodes: list[Options], tmp_path: Path) -> None:
    """Worker 0 decodes beside the trainer, 1 and 2 share a machine, and 3 has one to itself."""
    trainer, workers = parts(tmp_path, nodes, [nodes[0], nodes[1], nodes[1], nodes[2]])
    of_trainer, first, second, alone = workers

    async def places(publication: Publication) -> list[object]:
        publication.asked.clear()  # as if no worker had asked yet
        given = [await publication.handle(worker.group) for worker in workers]
        publication.asked.clear()
        return [one.process if isinstance(one, SharedWeights) else "store" for one in given]

    async def run() -> None:
        await asyncio.gather(trainer.restart(), *(worker.restart() for worker in workers))
        publication = await trainer.weights(True)
        assert await places(publication) == [trainer.pids[0], first.pid, first.pid, alone.pid]
        await asyncio.gather(*(loaded(worker, publication, 1) for worker in workers))
        assert trainer.broadcast.reached == 1

        # A worker dies in the middle: the broadcast ends, and its replacement gets the same weights.
        os.kill(alone.pid, signal.SIGSTOP)
        publication = await trainer.weights(False)
        await asyncio.sleep(0.5)
        assert not publication.arrival.done()
        os.kill(alone.pid, signal.SIGKILL)
        began = time.monotonic()
        await loaded(first, publication, 2)
        assert trainer.broadcast.failures == 1 and time.monotonic() - began < SECONDS
        with pytest.raises(WorkerDied):
            await alone.set_weights(publication, 2)
        await alone.restart()
        _, *others, last = await places(publication)
        # Of the others' buckets all or none were in flight when the connection broke.
        assert others in ([first.pid] * 2, ["store"] * 2) and last == "store"
        await asyncio.gather(*(loaded(worker, publication, 2) for worker in (of_trainer, second, alone)))

        # The next broadcast has a group of its own. A receiver that dies afterwards takes its memory along.
        publication = await trainer.weights(False)
        assert await places(publication) == [trainer.pids[0], first.pid, first.pid, alone.pid]
        assert trainer.broadcast.reached == 2 and trainer.broadcast.failures == 0
        os.kill(first.pid, signal.SIGKILL)
        while True:  # until it is gone, and with it what it mapped
            try:
                await first.collect(0)
            except WorkerDied:
                break
        with pytest.raises(DamagedWeights, match="cannot be opened"):
            await second.set_weights(publication, 3)
        await loaded(second, publication, 3)
        await first.restart()
        await asyncio.gather(*(loaded(worker, publication, 3) for worker in (of_trainer, first, alone)))

        trainer.broadcast.failures = MAX_FAILURES
        assert isinstance(await trainer.weights(False), ray.ObjectRef), "machines that cannot connect"

    try:
        asyncio.run(run())
    finally:
        for worker in workers:
            worker.close()
        trainer.close()


def test_who_could_not_read_what_it_was_told_gets_the_same_from_elsewhere() -> None:
    """On its own machine; a worker beside the trainer reads the trainer's memory, and so does one of a broken group."""
    sent = SharedWeights(machine="m", process=1, descriptor=2, inode=3, size=64, starts={}, manifest={})
    trainer, beside, apart = (ActorGroup(name, WorkerDied, [{}], 10.0, EventLog(None)) for name in ("t", "b", "a"))
    trainer.actors, trainer.nodes, beside.nodes, apart.nodes = ["rank 0"], ["one"], ["one"], ["two"]
    trainer._mark, beside._mark, apart._mark = "t", "b", "a"

    async def run() -> None:
        async def arrive() -> dict[str, SharedWeights]:
            await asyncio.sleep(0)
            return {"two": replace(sent, process=2), "b": replace(sent, process=3)}

        made = {
            place: Publication(
                sent=sent, trainer=trainer, arrival=asyncio.create_task(arrive()), place=place, stored="reference"
            )
            for place in (_machine, _process)
        }
        given = [await made[_machine].handle(group) for group in (apart, apart, beside, beside)]
        assert given == [replace(sent, process=2), "reference", sent, sent]
        given = [await made[_process].handle(group) for group in (beside, beside, apart)]
        assert given == [replace(sent, process=3), sent, "reference"]
        trainer.actors = []
        with pytest.raises(TrainerDied):
            await made[_machine].handle(apart)

    asyncio.run(run())


def test_nccl_is_chosen_where_every_member_has_a_gpu_and_never_for_two_on_one() -> None:
    config = JobConfig()
    assert choose_backend(config, [1.0, 1.0, 2.0]) == "nccl"
    assert (
        choose_backend(config, [1.0, 0.5]) == choose_backend(config, [1.0, 0.0]) == choose_backend(config, []) == "gloo"
    )
    gloo = from_dict(JobConfig, {"trainer": {"broadcast": {"backend": "gloo"}}})
    assert choose_backend(gloo, [1.0, 1.0]) == "gloo"
    nccl = from_dict(JobConfig, {"trainer": {"broadcast": {"backend": "nccl"}}})
    assert choose_backend(nccl, [1.0, 1.0]) == "nccl"
    with pytest.raises(UserError, match=r"each member needs a GPU to itself, and one has 0\.5 of one"):
        choose_backend(nccl, [1.0, 0.5])

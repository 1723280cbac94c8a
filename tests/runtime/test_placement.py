"""Who gets which share of how many GPUs; how a run begins; the driver answers while a loop is made; gauges last."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.config.engines import SglangConfig, VllmConfig
from bebop.config.job import JobConfig, ModelConfig, RolloutConfig, TrainerConfig
from bebop.errors import UserError
from bebop.runtime import gauges
from bebop.runtime import job as placement
from bebop.runtime.job import pools, share_memory


def job(workers: int = 1, ranks: int = 1, engine: Any = "torch", device: str = "auto", **own: Any) -> JobConfig:
    return JobConfig(
        model=ModelConfig(device=device),
        rollout=RolloutConfig(workers=workers, engine=engine, sglang=SglangConfig(**own)),
        trainer=TrainerConfig(ranks=ranks),
    )


SERVERS: dict[str, Any] = {"engine": "sglang", "urls": ("http://a:1",), "transfer": "disk", "folder": "x"}
CASES = [  # job, GPUs, of a rank, of a worker
    (job(), 0, 0, 0),
    (job(device="cpu"), 4, 0, 0),
    (job(), 1, 1 / 2, 1 / 2),
    (job(workers=2), 2, 1 / 2, 1 / 2),  # 2/3 each would leave one without a place
    (job(workers=3), 8, 1, 1),
    (job(engine="sglang"), 1, 1 / 2, 1 / 2),
    (job(engine="sglang"), 2, 1, 1),
    (job(engine="sglang", workers=2, ranks=4, tensor_parallel=2), 8, 1, 2),
    (job(engine="sglang", workers=3, ranks=2, tensor_parallel=2), 8, 1, 2),
    (job(workers=2, ranks=6), 8, 1, 1),
    (job(workers=8, ranks=4), 8, 1, 1 / 2),  # equal shares would put two ranks on one GPU
    (job(workers=8, ranks=7), 8, 1, 1 / 8),
    (job(engine="vllm", workers=4, ranks=4), 8, 1, 1),
    (job(workers=8, ranks=8, device="cpu"), 8, 0, 0),
    (job(workers=8, ranks=8), 0, 0, 0),
    (job(ranks=4, **SERVERS), 4, 1, 0),
    (job(ranks=3, **SERVERS | {"transfer": "distributed"}), 4, 1, 1),
]


@pytest.mark.parametrize(("config", "gpus", "rank", "worker"), CASES)
def test_shares(config: JobConfig, gpus: int, rank: float, worker: float) -> None:
    trainer, rollout = pools(config, gpus)
    assert (trainer.gpus, rollout.gpus) == (rank, worker)
    assert (trainer.count, rollout.count) == (config.trainer.ranks, config.rollout.workers)
    assert trainer.strategy == "STRICT_PACK"  # ranks meet on one machine
    assert sum(pool.count * pool.gpus for pool in (trainer, rollout)) <= gpus


def test_engines_that_do_not_fit() -> None:
    with pytest.raises(UserError, match="tensor_parallel=4 is not possible"):
        pools(job(engine="sglang", workers=2, tensor_parallel=4), 8)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_beside_the_trainer_gets_a_part_of_the_gpu(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "memory_beside_trainer", lambda config: (0.4, "so much"))
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: True)

    def given(config: JobConfig, gpus: float) -> float | None:
        fraction: float | None = getattr(share_memory(config, gpus).rollout, engine).memory_fraction
        return fraction

    assert given(job(engine=engine), 1) == 0.4 and job(engine=engine).rollout.vllm.memory_fraction is None
    assert given(job(engine=engine), 2) is None and given(job(engine=engine), 0) is None  # apart; no GPU
    assert given(job(engine=engine, device="cpu"), 1) is None
    own = {"vllm": VllmConfig(memory_fraction=0.3), "sglang": SglangConfig(memory_fraction=0.3)}
    theirs = {
        "vllm": VllmConfig(extra={"gpu_memory_utilization": 0.3}),
        "sglang": SglangConfig(extra={"mem_fraction_static": 0.3}),
    }
    for settings, wanted in ((own, 0.3), (theirs, None)):
        rollout = RolloutConfig(engine=engine, **{engine: settings[engine]})  # type: ignore[arg-type]
        assert given(JobConfig(rollout=rollout), 1) == wanted
    several = job(engine=engine, workers=2)
    with pytest.raises(UserError, match=rf"rollout.{engine}.memory_fraction=null .* share 2 GPUs; give") as caught:
        share_memory(several, 2)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(placement.torch.cuda, "is_available", lambda: False)  # the GPU is elsewhere
    with pytest.raises(UserError, match="memory_fraction=null"):
        share_memory(job(engine=engine), 1)


def test_servers_elsewhere_keep_their_memory() -> None:
    assert share_memory(job(**SERVERS), 1) == job(**SERVERS)
    assert share_memory(job(), 1) == job()


@pytest.mark.parametrize(
    ("config", "gpus", "allowed"),
    [
        (job(workers=8, ranks=8), 8, "1 to 7 ranks"),
        (job(ranks=2), 2, "1 rank,"),
        (job(ranks=2), 1, "1 rank,"),
        (job(engine="sglang", workers=3, ranks=4, tensor_parallel=2), 8, "1 to 2 ranks"),
        (job(engine="vllm", workers=4, ranks=6), 8, "1 to 4 ranks"),
        (job(ranks=5, **SERVERS), 4, "1 to 4 ranks"),
    ],
)
def test_two_ranks_on_one_gpu_are_refused(config: JobConfig, gpus: int, allowed: str) -> None:
    """NCCL refuses them, minutes later."""
    with pytest.raises(UserError, match=rf"trainer.ranks=\d is not possible: .* give {allowed}"):
        pools(config, gpus)


@pytest.mark.parametrize("early", [True, False])
def test_a_run_begins_once_also_if_ray_dies(early: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray dies in the first session, before or after all parts have started."""
    begun, sessions = list[object](), iter((True, False))

    async def run_in(_session: object, _job: object, _newest: object, started: Callable[[], None]) -> bool:
        dies = next(sessions)
        if not (dies and early):
            started()
        if dies:
            raise placement.SessionDied("Ray's raylet ended")
        return True

    session = SimpleNamespace(close_to_others=lambda: None, dashboard=None)
    monkeypatch.setattr(placement, "ray_session", lambda *_: contextlib.nullcontext(session))
    monkeypatch.setattr(placement, "ray", SimpleNamespace(cluster_resources=dict))
    monkeypatch.setattr(placement, "reserve", lambda pool: [{}] * pool.count)
    for part in ("RayWorker", "RayTrainer", "Job"):
        monkeypatch.setattr(placement, part, lambda *_: SimpleNamespace(stop=threading.Event()))
    monkeypatch.setattr(placement, "_run_in", run_in)
    assert placement.run_job(job(device="cpu"), tmp_path / "run", lambda _: None, begun.append)  # type: ignore[arg-type,return-value]
    assert begun == [None] and next(sessions, None) is None


def test_the_driver_answers_while_the_monitor_replays_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answered = threading.Event()

    def replay(*_: object) -> str:
        assert answered.wait(5), "the event loop did not go on"
        return "monitor"

    async def answer() -> None:
        answered.set()

    async def both() -> None:
        await asyncio.gather(placement.Job._loop(running, None), answer())  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "_monitor", replay)
    monkeypatch.setattr(placement, "Loop", lambda *_, **__: SimpleNamespace())
    monkeypatch.setattr(placement, "_write_pids", lambda *_: None)
    running = SimpleNamespace(
        config=JobConfig(), run_dir=tmp_path, loop=SimpleNamespace(), held_out=None, prompt=None, workers=[],
        trainer=None, sinks=[], trajectories=None, stop=threading.Event(),
    )  # fmt: skip
    asyncio.run(both())
    assert running.monitor == "monitor"


def test_gauges_of_the_last_step_are_set_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray exports a gauge once after it was set, and forgets it during a long step."""
    written: list[tuple[str, float]] = []

    def gauge(name: str, description: str) -> SimpleNamespace:
        return SimpleNamespace(set=lambda value: written.append((name, value)))

    monkeypatch.setattr(gauges, "Gauge", gauge)
    monkeypatch.setattr(gauges, "REPEAT", 0.01)
    sink = gauges.RaySink()
    sink.write(1, {"drift/state": 1.0})
    sink.write(2, {})
    end = time.monotonic() + 5
    while written.count(("bebop_step", 2.0)) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    sink.close()
    seen = list(written)
    assert seen.count(("bebop_step", 2.0)) >= 3 and ("bebop_drift_state", 1.0) in seen
    assert {name for name, _ in seen[seen.index(("bebop_step", 2.0)) :]} == {"bebop_step"}
    time.sleep(0.05)
    assert written == seen

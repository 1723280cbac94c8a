"""The benchmark of SGLang: its arms, and how it keeps a batch full. The engine itself is measured by hand."""

from bebop.bench.served import ServedBench, arms, job, side_by_side
from bebop.config import ModelConfig, TaskConfig
from bebop.config_sglang import SglangConfig
from bebop.rollout.engine import Finished, Request, nothing
from bebop.trajectory import SamplingParams


class Slow:
    """Ends one request a step, the last one first."""

    def __init__(self) -> None:
        self.open: list[int] = []
        self.most = 0

    @property
    def unfinished(self) -> int:
        return len(self.open)

    def add(self, request: Request) -> None:
        self.open.append(request.id)
        self.most = max(self.most, len(self.open))

    def step(self) -> list[Finished]:
        return [Finished(id=self.open.pop(), completion=nothing())]


def test_a_batch_is_kept_full() -> None:
    requests = [Request(id=i, token_ids=(1,), params=SamplingParams()) for i in range(10)]
    for batch in (1, 3, 20):
        engine = Slow()
        assert len(side_by_side(engine, requests, batch)) == 10  # type: ignore[arg-type]
        assert engine.most == min(batch, 10)


def test_every_arm_with_drafts_runs_with_and_without_the_plugin() -> None:
    bench = ServedBench(
        model=ModelConfig(), task=TaskConfig(), systems=("autoregressive", "bebop"), batches=(1, 4), draft_tokens=2,
        rounds=1, waves=1, max_new_tokens=8, every=4, sglang=SglangConfig(cache_tokens=99),
    )  # fmt: skip
    assert list(arms(bench)) == [("autoregressive", 0), ("bebop", 0), ("bebop", 4)]
    made = job(bench, "bebop", 4, 30)
    assert made.rollout.sglang.monitor_every == 4 and made.rollout.sglang.cache_tokens == 99
    assert made.monitor.decode_stats and made.rollout.slots == 4 and made.decoding.draft_tokens == 2
    assert made.rollout.max_length == 38
    assert not job(bench, "bebop", 0, 30).monitor.decode_stats

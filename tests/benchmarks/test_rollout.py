"""The bench of decoding speed takes every kind of decoder, and no more drafts than a system can hold."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bebop.bench import engines, pages, rollout
from bebop.bench.__main__ import main
from bebop.bench.first_token import AdmissionBench, FirstTokenBench, admit
from bebop.bench.first_token import measure as measure_first_token
from bebop.bench.pages import PagesBench
from bebop.bench.rollout import RolloutBench, measure, products
from bebop.bench.served import ServedBench, arms, job, side_by_side
from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.engine import Finished, Request, nothing
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import DecodeStats, SamplingParams
from tests.builders import bare_policy, requests, tiny_policy
from tests.cases import slow_but


@pytest.mark.parametrize("system", slow_but(["bebop", "pipo"], ["autoregressive", "bebop", "firp_chain", "pipo"]))
def test_an_arm_is_measured(system: str) -> None:
    bench = RolloutBench(
        model=ModelConfig(), task=TaskConfig(), systems=(system,), batches=(3,), draft_tokens=3, rounds=1, waves=1
    )
    row = measure(bench, tiny_policy(), requests([[1, 2, 3], [4], [5, 6]], max_new_tokens=20), 3, system)
    shares = {name for name in row if name.endswith(" %")}
    assert shares >= {"prefill %", "verify %", "other %"} and ("draft %" in shares) == SYSTEMS[system].drafts
    assert sum(row[name] for name in shares) == pytest.approx(100) and min(row[name] for name in shares) > 0
    assert row["accept length"] * row["passes/token"] == pytest.approx(1) and row["mean answer"] == 20
    assert ("confidence/draft" in row) == SYSTEMS[system].custom_cycle
    assert (row["accept length"] > 1) == SYSTEMS[system].drafts


def test_the_speed_on_a_gpu_is_that_of_a_run_that_waits_for_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []  # of each run
    clock = 0.0

    def wait(*_: object) -> None:
        nonlocal clock
        clock += 0.1
        waits[-1] += 1

    def watched(*given: Any) -> Any:
        nonlocal clock
        clock += 1
        waits.append(0)
        return generate(*given)

    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    monkeypatch.setattr(rollout, "generate", watched)
    bench = RolloutBench(
        model=ModelConfig(), task=TaskConfig(), systems=(), batches=(1,), draft_tokens=0, rounds=1, waves=1
    )
    monkeypatch.setattr(
        RolloutBench, "arms", lambda _: {"plain": DecodingConfig(system="autoregressive", draft_tokens=0)}
    )
    row = measure(bench, bare_policy(), requests([[1, 2, 3]], max_new_tokens=4), 1, "plain")
    assert waits == [0, 5], "of the second run: for the prefill, and for each of four passes"
    assert row["tokens/s"] == pytest.approx(4 / 1.0)
    shares = {name: row[name] for name in row if name.endswith(" %")}
    assert shares == pytest.approx({"prefill %": 10 / 1.5, "verify %": 40 / 1.5, "other %": 100 / 1.5})


# ---- What the benchmark of decoding counts: floating-point operations of cycles, against parameters and positions


def linear_parameters(module: torch.nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, torch.nn.Linear))


def counted(policy: Policy, decoding: DecodingConfig) -> tuple[float, DecodeStats]:
    engine = TorchEngine(policy, decoding, slots=1, max_length=64)
    with products(policy, engine) as spent:
        [answer] = generate(engine, requests([[1, 2, 3]], max_new_tokens=20))
    assert not any(module._forward_pre_hooks for module in policy.backbone.modules())
    return spent[0], answer.stats


def test_an_admission_in_several_passes_computes_less_padding() -> None:
    bench = AdmissionBench(model=ModelConfig(), prompts=5, longest=400, budgets=(400,), rounds=1)
    one, several = admit(tiny_policy(with_parts=False), bench)
    assert one["arm"] == "one pass" and one["passes"] == 1 and one["x one pass"] == 1
    assert several["arm"] == "at most 400" and several["passes"] > 2
    assert one["tokens"] == several["tokens"] <= several["computed"] < one["computed"]
    assert 0 <= several["padding %"] < one["padding %"] and several["ms"] > 0


@pytest.mark.parametrize("drafts", slow_but([3], [1, 3]))
def test_operations_are_parameters_times_positions(drafts: int) -> None:
    policy = tiny_policy(5, seed=11, layers=3)
    assert policy.mtp is not None
    whole, head = linear_parameters(policy.backbone), linear_parameters(policy.backbone.get_output_embeddings())
    layer = linear_parameters(policy.backbone.get_decoder().layers[0])
    spent, stats = counted(policy, DecodingConfig(system="autoregressive", draft_tokens=0))
    assert spent == 2 * whole * stats.cycles == 2 * whole * 20
    spent, stats = counted(policy, DecodingConfig(system="firp_chain", draft_tokens=drafts))
    # Of five steps three enter after the first layer of three, and two after the last, so that two layers see three.
    beside = 3 * 2 * layer + 5 * 32 * 32
    verified = (1 + drafts) * (whole + beside)
    assert stats.extra_positions == 5 * (1 + drafts) * stats.cycles
    assert spent == 2 * stats.cycles * (verified + drafts * head)
    assert spent != 2 * stats.cycles * ((1 + drafts) * whole + drafts * head)


# ---- The time to a first token is told for every arm and length, with what a cache then holds


def test_every_arm_reads_every_prompt() -> None:
    bench = FirstTokenBench(model=ModelConfig(), systems=("bebop", "autoregressive", "pipo"), lengths=(8, 33), rounds=3)
    rows = measure_first_token(tiny_policy(), bench)
    entries = {(row["arm"], row["prompt tokens"]): row["entries"] for row in rows}
    assert entries["autoregressive", 8] == 8 and entries["autoregressive", 33] == 33, "a token an entry"
    assert entries["pipo", 8] == 4 and entries["pipo", 33] == 17, "a pair an entry"
    assert entries["bebop", 33] >= 33, "accepted drafts, too"
    for row in rows:
        assert 0 < row["ms, 5 %"] <= row["ms"] <= row["ms, 95 %"]
        assert 0 < row["x plain, 5 %"] <= row["x plain"] <= row["x plain, 95 %"]
        assert row["arm"] != "autoregressive" or row["x plain"] == 1


# ---- Pages are compared with slots in speed, turn by turn, and in the requests that the same bytes hold


def test_pages_and_slots_are_compared_in_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "load_with_parts", lambda model, systems: bare_policy())
    for name, value in {"SLOTS": 2, "LONGEST": 60, "PROMPT": 4, "MEDIAN": 8}.items():
        monkeypatch.setattr(pages, name, value)
    rows = pages.run(PagesBench(model=ModelConfig(), systems=("bebop",), batches=(2,), rounds=2, tokens=8, requests=24))
    assert [(row.get("batch"), row["arm"]) for row in rows] == [
        (2, "slots"), (2, "pages"), (None, "slots"), (None, "pages")
    ]  # fmt: skip
    assert rows[0]["x slots"] == 1 and 0 < rows[1]["least"] <= rows[1]["x slots"] <= rows[1]["most"]
    assert rows[3]["cache MiB"] <= rows[2]["cache MiB"]
    assert rows[2]["requests in flight"] <= 2 and rows[3]["requests in flight"] > 4


# ---- The benchmark of SGLang: its arms, and how it keeps a batch full. The engine itself is measured by hand


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
    asked = [Request(id=i, token_ids=(1,), params=SamplingParams()) for i in range(10)]
    for batch in (1, 3, 20):
        engine = Slow()
        assert len(side_by_side(engine, asked, batch)) == 10  # type: ignore[arg-type]
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


# ---- Engines side by side; with real vLLM in tests/integration/vllm


def test_engines_needs_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="bench engines needs vLLM"):
        main(["--out", str(tmp_path / "out"), "engines", "--batches", "1"])
    assert not (tmp_path / "out").exists()


def test_a_row_counts_tokens_and_passes() -> None:
    stats = DecodeStats(tokens=6, prefilled=1, cycles=2, target_forwards=2, reached=np.ones(3))
    found = engines.timed(lambda: [SimpleNamespace(stats=stats), SimpleNamespace(stats=stats)])
    assert found["mean answer"] == 6 and found["accept length"] == 2.5
    assert found["passes/token"] == pytest.approx(4 / 12) and found["tokens/s"] > 0


def test_every_arm_has_an_engine_whose_version_is_told() -> None:
    assert set(engines.arms(engines.CHOICE)) >= {"hf_generate", engines.PLAIN, "vllm, bebop"}
    assert list(engines.arms(["autoregressive"])) == ["hf_generate", engines.PLAIN, "vllm, autoregressive"]
    assert engines.version_of("transformers").startswith("transformers ")
    assert engines.version_of("nobody-has-it") == "unknown"

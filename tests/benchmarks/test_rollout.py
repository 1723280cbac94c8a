"""The bench of decoding speed takes every kind of decoder, and no more drafts than a system can hold."""

import pytest

from bebop.bench.rollout import RolloutBench, measure
from bebop.config import ModelConfig, TaskConfig
from bebop.systems import SYSTEMS
from tests.builders import requests, tiny_policy
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

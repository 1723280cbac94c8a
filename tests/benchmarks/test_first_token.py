"""The time to a first token is told for every arm and length, with what a cache then holds."""

from bebop.bench.first_token import FirstTokenBench, measure
from bebop.config import ModelConfig
from tests.builders import tiny_policy


def test_every_arm_reads_every_prompt() -> None:
    bench = FirstTokenBench(model=ModelConfig(), systems=("bebop", "autoregressive", "pipo"), lengths=(8, 33), rounds=3)
    rows = measure(tiny_policy(), bench)
    entries = {(row["arm"], row["prompt tokens"]): row["entries"] for row in rows}
    assert entries["autoregressive", 8] == 8 and entries["autoregressive", 33] == 33, "a token an entry"
    assert entries["pipo", 8] == 4 and entries["pipo", 33] == 17, "a pair an entry"
    assert entries["bebop", 33] >= 33, "accepted drafts, too"
    for row in rows:
        assert 0 < row["ms, 5 %"] <= row["ms"] <= row["ms, 95 %"]
        assert 0 < row["x plain, 5 %"] <= row["x plain"] <= row["x plain, 95 %"]
        assert row["arm"] != "autoregressive" or row["x plain"] == 1

"""The bench of drafts from history: what lookups cost, and every arm with what came from where."""

import pytest

from bebop.bench.history import decoded, lookups, remembered
from bebop.config import DecodingConfig
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from tests.builders import requests, tiny_policy


def test_lookups_and_arms_are_measured() -> None:
    policy, asked = tiny_policy(), requests([[1, 2, 3], [4, 5]], max_new_tokens=16)

    def make(arm: str) -> TorchEngine:
        drafts = 3 if SYSTEMS[arm].drafts else 0
        return TorchEngine(policy, DecodingConfig(system=arm, draft_tokens=drafts), slots=2, max_length=64)

    past = remembered(make("bebop"), asked, 3)
    assert {prompt: len(answers) for prompt, answers in past.items()} == {(1, 2, 3): 3, (4, 5): 3}
    assert len({tuple(answer) for answers in past.values() for answer in answers}) == 6, "drawn with other seeds"
    row = lookups(past)
    assert row["tokens kept"] == 6 * 17 and 0 < row["found %"] <= 100
    assert min(row["us/token kept"], row["us/lookup"]) > 0 and row["bytes/token kept"] > 100
    plain, mixed, alone = (decoded(make, asked, past, arm) for arm in ("autoregressive", "bebop_history", "history"))
    assert plain["accept length"] == 1 < mixed["accept length"] and "lookup %" not in plain
    assert 0 < mixed["history/draft"] < 1 == pytest.approx(alone["history/draft"])
    for row in (mixed, alone):
        assert (
            0 < row["history accepted"] < 1
            and min(row[f"{part} %"] for part in ("lookup", "bookkeeping", "remember")) > 0
        )
    assert 0 < mixed["head accepted"] < 1 and "head accepted" not in alone

"""The bench of drafts from history: what lookups cost, and every arm with what came from where."""

from pathlib import Path

import numpy as np
import pytest

from bebop.bench import history_priming, record
from bebop.bench.__main__ import main
from bebop.bench.history import decoded, lookups, remembered
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams
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


# ---- What is told before what is asked, and the rows that come of it; with real vLLM in tests/integration/vllm

ASKED = [Request(id=i, token_ids=(i,), params=SamplingParams()) for i in range(5)]
PAST = {(i,): [[10 + i]] for i in range(5)}


def test_vllm_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(history_priming, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="bench told needs vLLM"):
        main(["--out", str(tmp_path / "out"), "told", "--prompts", "4"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("known", history_priming.KNOWN)
def test_each_prompt_is_asked_once_with_what_is_to_be_known(known: str) -> None:
    turns = history_priming.turns(ASKED, PAST, known)
    assert sorted(one.id for chosen, _ in turns for one in chosen) == [0, 1, 2, 3, 4]
    for chosen, past in turns:
        prompts = {one.token_ids for one in chosen}
        assert all(past[prompt] == PAST[prompt] for prompt in past)
        if known == history_priming.OTHERS:
            assert past and not prompts & set(past)
        else:
            assert set(past) == (prompts if known == history_priming.OWN else set())


def test_a_gain_is_that_of_the_same_prompts() -> None:
    """Of prompts that differ a hundred times more than what is known makes."""
    plain = np.array([[100.0, 200, 300, 400], [100, 100, 100, 100], [90, 90, 90, 90], [9, 18, 27, 36]])
    counts = {
        history_priming.NOTHING: plain,
        history_priming.OWN: plain + np.array([[10.0, 11, 9, 10], [0] * 4, [0] * 4, [0] * 4]),
    }
    row = history_priming.row(counts, history_priming.OWN)
    assert row["accept length"]["value"] == 2.6 and row["drafts/cycle"]["value"] == 0.9
    assert row["gain"]["value"] == pytest.approx(0.1) and 0.05 < row["gain"]["low"] < row["gain"]["high"] < 0.15
    assert "gain" not in history_priming.row(counts, history_priming.NOTHING)
    assert f"| {0.1:.3g} [" in record.table([{"gain": row["gain"]}])

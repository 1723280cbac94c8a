"""Engines side by side; with real vLLM in tests/integration/vllm."""

from types import SimpleNamespace

import numpy as np
import pytest

from bebop.bench import engines
from bebop.bench.__main__ import main
from bebop.trajectory import DecodeStats


def test_vllm_has_to_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    from bebop.errors import UserError

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

"""The recipe that holds a job with vLLM against the embedded engine: its rule, its turns, its table."""

import json
from pathlib import Path

import numpy as np
import pytest

from bebop.errors import UserError
from recipes.vllm import rule
from recipes.vllm.__main__ import CURVES, ENGINES, carry_out, in_turns, job_folder, keep, main, page, result
from tests.tree import ROOT

SEEDS, STEPS = rule.SEEDS, rule.STEPS


def curves(start: float, slope: float, seed: int, noise: float = 0.005) -> list[list[float]]:
    draws = np.random.default_rng(seed).normal(0, noise, (SEEDS, STEPS))
    return (start + slope * np.arange(STEPS) + draws).tolist()


def verdict(reward: float = 0.0, slope: float = 0.02, length: float = 0.0, logprob: float = 1e-6, steps: int = STEPS):
    rewards = {"torch": curves(0.4, 0.02, 0), "vllm": curves(0.4 + reward, slope, 1)}
    rewards["vllm"] = [curve[:steps] for curve in rewards["vllm"]]
    lengths = {"torch": curves(2.8, 0, 2), "vllm": curves(2.8 + length, 0, 3)}
    logprobs = {engine: [[logprob] * STEPS] * SEEDS for engine in ENGINES}
    return rule.judge(rewards, lengths, logprobs)


def test_equal_engines_are_confirmed() -> None:
    assert all(verdict().values())


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"reward": 0.04}, "difference of rewards within 0.03"),
        ({"reward": -0.04}, "difference of rewards within 0.03"),
        ({"slope": 0.0, "reward": 0.09}, "vLLM: gain of reward, its interval above 0"),
        ({"length": -0.11}, "difference of accept lengths within 0.1"),
        ({"logprob": 2e-4}, "vLLM's log-probs within 1e-04"),
        ({"steps": 9}, "12 pairs of 10 steps"),
    ],
)
def test_what_differs_is_not(change: dict[str, float], failing: str) -> None:
    found = verdict(**change)  # type: ignore[arg-type]
    assert [name for name, met in found.items() if not met] == [failing, "confirmed"]


def test_engines_take_turns() -> None:
    assert [in_turns(seed)[0] for seed in range(4)] == ["torch", "vllm", "torch", "vllm"]


def stored(out: Path) -> None:
    """Metrics of jobs that never ran."""
    for engine in ENGINES:
        for seed in range(SEEDS):
            folder = job_folder(out, engine, seed)
            folder.mkdir(parents=True)
            rows = [{"step": step + 1, **dict.fromkeys(CURVES.values(), 0.5)} for step in range(STEPS)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_whole_jobs_are_not_run_again_and_results_are_kept(tmp_path: Path) -> None:
    stored(tmp_path)
    for engine in ENGINES:
        carry_out(job_folder(tmp_path, engine, 0), engine, 0, STEPS)
    content = result(tmp_path, range(SEEDS), STEPS, {"command": "x"})
    keep(tmp_path / "kept", content)
    assert json.loads((tmp_path / "kept" / "vllm_job.json").read_text()) == content
    assert (tmp_path / "kept" / "vllm_job.md").read_text() == page(content)
    assert "- confirmed: no" in page(content)  # nothing was gained


def test_vllm_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recipes.vllm.__main__.find_spec", lambda name: None)
    with pytest.raises(UserError, match="needs vLLM"):
        main(["--out", str(tmp_path)])


def test_the_stored_result_is_of_this_rule() -> None:
    content = json.loads((ROOT / "benchmarks" / "cpu" / "vllm_job.json").read_text())
    assert content["rule"]["hash"] == rule.hash_of_rule()
    curves = content["curves"]
    judged = rule.judge(curves["reward"], curves["accept length"], curves["log-prob difference"])
    assert content["rule"]["findings"] == judged

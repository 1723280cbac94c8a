"""Every generation of SGLang's names, the plugin's list, and vLLM's counters, by hand."""

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.monitor.adapters import VllmCounters, sglang_stats, sglang_stretches

GENERATIONS = [
    {"spec_accept_token_num": 20, "spec_draft_token_num": 30},
    {"spec_accepted_drafts": 20, "spec_proposed_drafts": 30},
    {"spec_num_correct_drafts": 20, "spec_num_proposed_drafts": 30},
    {"spec_accept_rate": 20 / 30, "spec_draft_token_num": 30},
    {},  # tokens over verifications
]


@pytest.mark.parametrize("names", GENERATIONS)
def test_every_generation_of_names(names: dict[str, float]) -> None:
    stats = sglang_stats({"completion_tokens": 30, "spec_verify_ct": 10, **names})
    assert stats is not None and (stats.cycles, stats.tokens, len(stats.reached)) == (10, 30, 0)


def test_accept_length_alone() -> None:
    stats = sglang_stats({"completion_tokens": 30, "spec_accept_length": 3.0})
    assert stats is not None and (stats.cycles, stats.tokens) == (10, 30)


@pytest.mark.parametrize("name", ["spec_correct_drafts_histogram", "spec_accept_histogram"])
def test_the_histogram_gives_positions(name: str) -> None:
    meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 11, "spec_num_proposed_drafts": 30, name: [3, 3, 4]}
    stats = sglang_stats({"completion_tokens": 21, **meta})
    assert stats is not None and stats.cycles == 10 and stats.tokens == 21
    assert stats.reached.tolist() == [10, 7, 4]  # three were proposed, though none of the third was ever accepted
    assert stats.accepted.tolist() == [7, 4, 0]


def test_nothing_verified_and_nothing_readable() -> None:
    assert sglang_stats({"completion_tokens": 1, "spec_verify_ct": 0, "spec_num_correct_drafts": 0}) is None
    with pytest.raises(UserError, match="spec_accept_rate"):
        sglang_stats({"completion_tokens": 5, "spec_accept_rate": 0.4})


def entry(accepted: int) -> dict[str, object]:
    """One verification of three drafts; the target's entropies have one more, the bonus position's."""
    rates = {"overlap": [0.9, 0.8, 0.7], "target_only": [0.6, 0.5, 0.4]}
    return {"accepted": accepted, **rates, "draft_entropy": [0.1, 0.2, 0.3], "target_entropy": [0.4, 0.5, 0.6, 9.9]}


def test_the_plugins_list() -> None:
    stats = sglang_stats({"bebop_verify": [entry(3), entry(1), entry(0)]})
    assert stats is not None and (stats.cycles, stats.tokens) == (3, 7)
    assert stats.reached.tolist() == [3, 2, 1] and stats.accepted.tolist() == [2, 1, 1]
    assert stats.overlap == pytest.approx([2.7, 1.6, 0.7])  # only where it was reached
    assert stats.target_entropy == pytest.approx([1.2, 1.0, 0.6])
    counted = {"completion_tokens": 30, "spec_verify_ct": 10}
    unmeasured = sglang_stats({**counted, "bebop_verify": [None, None]})
    assert unmeasured is not None and (unmeasured.cycles, unmeasured.tokens) == (10, 30)
    with pytest.raises(UserError, match="accepted and overlap"):
        sglang_stats({"bebop_verify": [{"overlap": [0.5]}]})


def test_stretches_of_an_answer_add_up() -> None:
    verified = [entry(3)] * 20 + [entry(0)] * 100
    stretches = sglang_stretches(verified)
    assert [token for token, _ in stretches] == [0, 64, 128]
    assert [s.cycles for _, s in stretches] == [16, 4 + 48, 52]
    whole = sglang_stats({"bebop_verify": verified})
    assert whole is not None
    np.testing.assert_allclose(sum(s.overlap for _, s in stretches), whole.overlap)


def test_vllm_counters() -> None:
    """Positions may be single keys; an engine that does not draft has none of these counters."""
    prefix = "vllm:spec_decode_num_"
    found = {"drafts_total": 120.0, "draft_tokens_total": 240.0, "accepted_tokens_total": 120.0}
    found |= {"accepted_tokens_per_pos_total:0": 78.0, "accepted_tokens_per_pos_total:1": 42.0}
    counters = VllmCounters.of({prefix + name: value for name, value in found.items()})
    assert counters == VllmCounters(drafts=120, draft_tokens=240, accepted=120, per_position=(78.0, 42.0))
    stats = counters.since(None)
    assert stats is not None and stats.accept_length == pytest.approx(2.0)
    assert stats.reached.tolist() == [120, 78] and stats.accepted.tolist() == [78, 42]
    with pytest.raises(UserError, match="speculative decoding on"):
        VllmCounters.of({"vllm:num_requests_running": 3.0})


def test_vllm_differences_restarts_and_short_drafts() -> None:
    before = VllmCounters(drafts=100, draft_tokens=200, accepted=100, per_position=(70, 30))
    after = VllmCounters(drafts=150, draft_tokens=300, accepted=140, per_position=(95, 45))
    stats = after.since(before)
    assert stats is not None and stats.cycles == 50 and stats.accepted.tolist() == [25, 15]
    assert before.since(before) is None
    restarted = before.since(after)
    assert restarted is not None and restarted.cycles == 100
    adaptive = VllmCounters(drafts=150, draft_tokens=250, accepted=140, per_position=(95, 45)).since(before)
    assert adaptive is not None and adaptive.tokens == 90 and len(adaptive.reached) == 0

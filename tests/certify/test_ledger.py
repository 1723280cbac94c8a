"""The ledger: order, checkpoints, bounds, and that the strongest direction names the fault."""

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from bebop.certify.directions import FLOOR
from bebop.certify.evidence import log_sum_exp
from bebop.certify.ledger import FAMILY, GROUPS, Ledger
from tests.certify.blocks import block, coarse

M = 24


def filled(count: int = 3, ledger: Ledger | None = None, start: int = 0, **kind) -> Ledger:
    ledger = ledger or Ledger(M)
    for i in range(start, start + count):
        ledger.update(block(200, M, seed=i, first=10 * i, **kind))
    return ledger


def test_weights_add_up_to_one_at_most() -> None:
    assert sum(weight for _, weight in FAMILY.values()) <= 1 + 1e-9
    assert {group for group, _ in FAMILY.values()} == set(GROUPS)


def test_evidence_is_what_was_merged() -> None:
    ledger = filled()
    evidence = ledger.evidence()
    rest = 1 - sum(one.weight for one in evidence)  # not tested: e = 1
    logs = [one.merged for one in evidence] + ([math.log(rest)] if rest > 1e-9 else [])
    assert ledger.log_e == pytest.approx(float(log_sum_exp(np.asarray(logs))), abs=1e-9)
    assert [one.merged for one in evidence] == sorted((one.merged for one in evidence), reverse=True)
    assert ledger.tokens == 600 and [tokens for tokens, _ in ledger.history] == [200, 400, 600]
    assert ledger.highest == max([0.0, *(log_e for _, log_e in ledger.history)])


@pytest.mark.parametrize("order", [[0, 0], [1, 0], [0, 2, 1]])
def test_requests_out_of_order_are_refused(order: list[int]) -> None:
    ledger = Ledger(M)
    with pytest.raises(ValueError, match="order of submission"):
        for first in order:
            ledger.update(block(40, M, first=10 * first))


def test_requests_out_of_order_within_a_cohort_are_refused() -> None:
    given = block(40, M)
    for wrong in (replace(given, request=given.request.flip(0)), replace(given, position=given.position.flip(0))):
        with pytest.raises(ValueError, match="order of submission"):
            Ledger(M).update(wrong)


def test_an_empty_cohort_and_parts_of_answers() -> None:
    ledger = Ledger(M)
    ledger.update(block(40, M).part(0, 0))
    assert ledger.tokens == 0 and ledger.log_e == pytest.approx(0) and ledger.evidence() == []
    given = block(40, M)
    ledger.update(replace(given, position=given.position * 3 + 7))
    assert ledger.tokens == 40


@pytest.mark.slow
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = filled(2)
    monkeypatch.setattr("bebop.certify.ledger.ELEMENTS", 64 * M)
    parts = filled(2)
    assert parts.log_e == pytest.approx(whole.log_e, abs=1e-9)
    for one, other in zip(whole.evidence(), parts.evidence(), strict=True):
        assert (one.name, one.share, one.tv) == pytest.approx((other.name, other.share, other.tv))


@pytest.mark.slow
def test_a_checkpoint_goes_on_bit_by_bit() -> None:
    kept = io.BytesIO()
    torch.save(filled(2).state_dict(), kept)
    kept.seek(0)
    resumed = Ledger(M)
    resumed.load_state_dict(torch.load(kept, weights_only=True))
    whole, resumed = filled(4), filled(2, resumed, start=2)
    assert resumed.evidence() == whole.evidence() and resumed.history == whole.history
    assert resumed.visible() == whole.visible() and resumed.positions(5) == whole.positions(5)
    with pytest.raises(ValueError, match="order of submission"):
        resumed.update(block(200, M))


def test_a_checkpoint_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Ledger(M + 1).load_state_dict(filled(1).state_dict())


def test_a_checkpoint_of_a_large_vocabulary_is_small() -> None:
    ledger = Ledger(150_000)
    ledger.update(coarse(block(2000, 20), 150_000))
    kept = io.BytesIO()
    torch.save(ledger.state_dict(), kept)
    assert len(kept.getvalue()) < 3e6


def test_what_was_not_tested_is_told() -> None:
    bare = replace(block(200, M), before=None, raw=None, draft=None, seen=None, cycle=None, twin=None, reported=None,
                   stops=())  # fmt: skip
    ledger = Ledger(M)
    ledger.update(bare)
    tested = {one.name for one in ledger.evidence()}
    assert tested | set(ledger.untested) == set(FAMILY) and not tested & set(ledger.untested)
    assert {"row_before", "draft", "draft@0", "unprocessed", "seen", "stop", "reported", "copies", "hotter@2",
            "bigram"} <= set(ledger.untested)  # fmt: skip
    assert all(ledger.untested.values()) and ledger.untested["hotter@2"] == "places in the decoding cycle are not known"
    ledger.update(block(200, M, first=100))
    assert ledger.untested == {}


def test_coarse_columns_are_tested_too() -> None:
    ledger = Ledger(150)
    for i in range(3):
        ledger.update(coarse(block(200, M, seed=i, first=10 * i), 150, seed=i))
    assert set(ledger.untested) == {"neighbour"}
    assert ledger.log_e < 4


def test_an_impossible_token_is_proof_and_finite() -> None:
    given = block(200, M)
    p = given.probs * (torch.arange(M) < 12)
    p = p / p.sum(-1, keepdim=True)
    drawn = torch.multinomial(p, 1, generator=torch.Generator().manual_seed(0))[:, 0]
    tokens = torch.where(torch.arange(200) == 50, 20, drawn)
    chosen = p.gather(1, tokens[:, None])[:, 0].log()
    ledger = Ledger(M)
    ledger.update(replace(given, probs=p, tokens=tokens, cells=tokens, logprobs=chosen, reported=None))
    assert 9.3 < ledger.log_e < -1000 * math.log(FLOOR)
    assert ledger.positions(1)[0][:2] == (2, 10)


def test_certain_rows_tell_nothing() -> None:
    p = torch.eye(M, dtype=torch.float64)[torch.arange(200) % M]
    tokens = p.argmax(-1)
    given = replace(block(200, M), probs=p, before=p, draft=p, raw=None, tokens=tokens, cells=tokens,
                    logprobs=torch.zeros(200), reported=None)  # fmt: skip
    ledger = Ledger(M)
    ledger.update(given)
    assert abs(ledger.log_e) < 1 and all(one.tv == pytest.approx(one.tv) for one in ledger.evidence() if one.tv)

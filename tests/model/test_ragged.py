"""Rows end to end: where they lie, and passes of the target and the head over them, against passes over padded rows."""

from contextlib import nullcontext

import pytest
import torch

from bebop.config import DecodingConfig
from bebop.model.lean import as_modules
from bebop.model.ragged import Ragged
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 1], [9, 3]]
LENGTHS = torch.tensor([2, 5, 1])


def test_rows_go_end_to_end_and_back() -> None:
    ragged, values = Ragged.of(LENGTHS, 5), torch.arange(15).reshape(3, 5)
    assert ragged.packed(values).tolist() == [[0, 1, 5, 6, 7, 8, 9, 10]] and ragged.rows.tolist() == [0, 0, *[1] * 5, 2]
    back = [[0, 1, 0, 0, 0], [5, 6, 7, 8, 9], [10] * 5]
    assert ragged.padded(ragged.packed(values)).tolist() == back, "padding is its row's first"


def engine(system: str = "bebop") -> TorchEngine:
    """One whose rows have run some cycles."""
    config = DecodingConfig(system=system, draft_tokens=5)
    one = TorchEngine(tiny_policy(seed=3, dtype=torch.float64), config, slots=3, max_length=64)
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(3):
        one.step()
    assert len(one.active) == 3
    return one


@pytest.mark.parametrize("lean", [True, False])
def test_verification_end_to_end_is_that_of_padded_rows(lean: bool) -> None:
    """Its states, and what it leaves in the cache; through the lean pass and through the modules."""
    one = engine()
    assert isinstance(one.decoder, DraftVerify)
    target, tokens, ragged = one.decoder.target, torch.arange(15).reshape(3, 5) % 11, Ragged.of(LENGTHS, 5)
    with torch.inference_mode():
        rows, before = Rows(one.slots, 3, max(one.fed)), target.cache.keys.clone()
        wanted = target.verify(rows, tokens)[0]
        keys, values = target.cache.keys.clone(), target.cache.values.clone()
        target.cache.keys.copy_(before)
        with nullcontext() if lean else as_modules():
            states = target.verify(rows, tokens, ragged=ragged)[0]
    assert states.shape == (1, 8, wanted.shape[-1]) and torch.allclose(states, ragged.packed(wanted))
    for row, (fed, length) in enumerate(zip(one.fed, LENGTHS.tolist(), strict=True)):
        assert torch.allclose(target.cache.keys[:, row, :, : fed + length], keys[:, row, :, : fed + length])
        assert torch.allclose(target.cache.values[:, row, :, : fed + length], values[:, row, :, : fed + length])


@pytest.mark.slow
def test_each_row_keeps_its_own_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end to end are sampled as they would be side by side, with a temperature and a penalty each."""
    asked = [
        *requests(PROMPTS, max_new_tokens=30, temperature=0.6),
        *requests(PROMPTS, max_new_tokens=30, top_k=3, repetition_penalty=1.3),
    ]
    answers = []
    for share in (0.0, 1.0):  # never, and whenever anything is saved
        monkeypatch.setattr("bebop.rollout.decoding.draft_verify.WORTH_PACKING", share)
        config = DecodingConfig(system="history", draft_tokens=5, verify_ratio=0.0)
        one = TorchEngine(tiny_policy(seed=3, dtype=torch.float64), config, slots=6, max_length=64)
        answers.append([(a.token_ids.tolist(), a.stats.cycles) for a in generate(one, asked)])
    assert answers[0] == answers[1]

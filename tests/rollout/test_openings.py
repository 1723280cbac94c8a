"""The first cycle of a turn is told apart from the others, and nothing else changes."""

import dataclasses

import numpy as np

from bebop.config import DecodingConfig
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import OPENING, Completion, DecodeStats
from tests.builders import bare_policy, requests


def answers(park: bool) -> list[Completion]:
    engine = TorchEngine(bare_policy(seed=1), DecodingConfig(system="bebop", draft_tokens=3), slots=2, max_length=128)
    asked = requests([[1, 2, 3], [4, 5], [6, 7, 8, 9]], max_new_tokens=70)  # more than there are slots: rows move
    return generate(engine, [dataclasses.replace(request, park=park) for request in asked])


def test_the_first_cycle_is_a_stretch_of_its_own() -> None:
    plain, told = answers(False), answers(True)
    for one, other in zip(plain, told, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert [start for start, _ in one.stretches] == [0, 64]
        assert [start for start, _ in other.stretches] == [OPENING, 0, 64]
        first, rest = other.stretches[0][1], dict(other.stretches)[0]
        assert first.cycles == 1 and 1 <= first.tokens <= 4
        whole = sum((stats for _, stats in other.stretches), DecodeStats())
        assert (whole.cycles, whole.tokens) == (one.stats.cycles, one.stats.tokens) == (other.stats.cycles, 70)
        joined = first + rest
        for name in ("reached", "accepted", "overlap", "target_entropy"):
            np.testing.assert_allclose(getattr(joined, name), getattr(one.stretches[0][1], name), rtol=1e-12)
            np.testing.assert_allclose(getattr(other.stats, name), getattr(one.stats, name), rtol=1e-12)
        assert first.reached[0] == 1 and first.tokens == 1 + int(first.accepted.sum())


def test_what_went_on_after_an_interruption_has_one_first_cycle() -> None:
    engine = TorchEngine(bare_policy(seed=1), DecodingConfig(system="bebop", draft_tokens=3), slots=1, max_length=128)
    [asked] = [dataclasses.replace(one, park=True) for one in requests([[1, 2, 3]], max_new_tokens=40)]
    [whole] = generate(engine, [asked])
    engine.add(asked)
    while int(engine.slots.count[0]) < 10:
        engine.step()
    [cut] = engine.abort()
    [resumed] = generate(engine, [dataclasses.replace(asked, partial=cut.completion)])
    assert [(start, stats.cycles) for start, stats in resumed.stretches] == [
        (start, stats.cycles) for start, stats in whole.stretches
    ]
    assert resumed.stretches[0][1].cycles == 1


def test_an_answer_cut_off_in_its_first_cycle_counts_what_is_left_of_it() -> None:
    engine = TorchEngine(bare_policy(seed=1), DecodingConfig(system="bebop", draft_tokens=3), slots=1, max_length=128)
    for seed in range(8):
        [one] = generate(
            engine, [dataclasses.replace(r, park=True) for r in requests([[1, 2, 3]], max_new_tokens=1, seed=seed)]
        )
        assert [(start, stats.cycles, stats.tokens) for start, stats in one.stretches] == [(OPENING, 1, 1)]
        assert one.stretches[0][1].reached.tolist() == one.stats.reached.tolist()

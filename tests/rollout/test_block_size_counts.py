"""The block sizes that ``blockpilot`` chooses are statistics of its answers, by draft position as all others."""

from collections.abc import Mapping

import numpy as np
import pytest
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.metrics import values
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Draft, Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.decoding import BlockLength
from bebop.trajectory import DecodeStats
from tests.builders import requests, tiny_policy

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [4, 4], [1, 3, 2, 2], [3, 2]]


class Watched(BlockLength):
    """Writes down the sizes of all blocks that it asks for."""

    sizes: list[int]

    def start(self, rows: Rows) -> Tensor | None:
        wanted = super().start(rows)
        assert wanted is not None
        self.sizes += (wanted + 1).tolist()
        return wanted


class Default(Watched):
    """Says the most that there may be, whatever was chosen."""

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        return {"block_size": draft.tokens.new_full(draft.tokens.shape, self.limit + 1)}


def decoded(length: type[Watched]) -> tuple[DecodeStats, list[int]]:
    """The statistics of some answers, and the sizes of their blocks, but for those of one token: nothing is drafted."""
    config = DecodingConfig(system="blockpilot", draft_tokens=4)
    engine = TorchEngine(tiny_policy(5, seed=11, sharp=16.0), config, slots=3, max_length=64)
    assert isinstance(engine.decoder, DraftVerify)
    watched = engine.decoder.length
    watched.__class__ = length
    assert isinstance(watched, Watched)
    watched.sizes = []
    answers = generate(engine, requests(PROMPTS, max_new_tokens=24))
    return sum((answer.stats for answer in answers), DecodeStats()), [size for size in watched.sizes if size > 1]


def test_block_sizes_are_counted_and_become_metrics() -> None:
    stats, sizes = decoded(Watched)
    assert len(set(sizes)) > 1
    assert stats.reached[0] == len(sizes)
    assert stats.counts["block_size"][0] == sum(sizes)
    numbers = values(decode_metrics(stats))
    assert numbers["rollout/block_size/1"] == pytest.approx(np.mean(sizes))
    assert numbers["rollout/block_size/4"] == 5, "only the largest blocks reach the last position"


def test_a_count_of_what_was_not_chosen_is_noticed() -> None:
    stats, sizes = decoded(Default)
    assert stats.counts["block_size"][0] > sum(sizes)

"""What a drafter proposes at the two ends: greedy drafts have a distribution without entropy, sampled ones the target's
heat."""

import numpy as np
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.rollout.decoding.drafters import MTPDrafter
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.decoding.systems import make_system
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import requests, tiny_policy


def drafted(system: str, **settings: float) -> DecodeStats:
    """Statistics of some answers at temperature 1."""
    config = DecodingConfig(system=system, draft_tokens=3, **settings)  # type: ignore[arg-type]
    engine = TorchEngine(tiny_policy(seed=1), make_system(config), slots=8, max_length=64)
    answers = generate(engine, requests([[1, 2, 3]] * 8, max_new_tokens=30))
    return sum((answer.stats for answer in answers), DecodeStats())


def test_greedy_drafts_are_the_most_likely_tokens_whatever_the_temperature() -> None:
    greedy, sampled = drafted("target_only"), drafted("bebop")
    assert not greedy.draft_entropy.any() and (sampled.draft_entropy / sampled.reached > 0.1).all()
    np.testing.assert_allclose(greedy.overlap, greedy.target_only)  # a one-hot distribution has nothing else
    assert (sampled.overlap > 1.02 * sampled.target_only).any()


def test_a_draft_temperature_is_the_drafts_own() -> None:
    cold, hot = (drafted("bebop", draft_temperature=temperature) for temperature in (0.3, 2.0))
    assert (cold.draft_entropy / cold.reached < 0.7 * hot.draft_entropy / hot.reached).all()


class Constant:
    """A draft model whose logits never change."""

    logits = torch.tensor([[2.0, 1.5, 1.0, 0.5]])

    def draft_hidden(self) -> Tensor:
        return torch.zeros(1, 1)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        return self.logits

    def draft_step(self, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return hidden

    def seen(self) -> Tensor | None:
        return torch.zeros(1, 4, dtype=torch.bool)


def test_a_penalty_sees_the_drafts_before() -> None:
    """Each drafted token is penalised from the next step on, as it will be when it is verified."""
    distributions = BatchSampling(penalty=torch.tensor([4.0]))
    draft = MTPDrafter().propose(Constant(), distributions, FixedLength(3), torch.tensor([[0.1, 0.5, 0.5]]))
    seen = torch.zeros(1, 4, dtype=torch.bool)
    for step in range(3):
        torch.testing.assert_close(
            draft.probs[:, step], distributions.probs(Constant.logits[:, None], seen[:, None])[:, 0]
        )
        seen[0, draft.tokens[0, step]] = True

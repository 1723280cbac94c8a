"""What a drafter proposes at the two ends: greedy drafts have a distribution without entropy, sampled ones the target's
temperature."""

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.base import Draft, Rows
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.slots import Slots, SlotSizes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats, SamplingParams
from tests.builders import bare_policy, requests


def drafted(system: str, **settings: float) -> DecodeStats:
    """Statistics of some completions at temperature 1."""
    config = DecodingConfig(system=system, draft_tokens=3, **settings)  # type: ignore[arg-type]
    engine = TorchEngine(bare_policy(seed=1), config, slots=8, max_length=64)
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


class Constant(MTPDrafter):
    """Its hidden states never change, so neither do its logits."""

    def step(self, rows: Rows, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        return hidden


def proposed(sampling: SamplingParams, **settings: object) -> tuple[Draft, Tensor, Rows, Slots]:
    """Three drafts from one constant hidden state after the prompt (1, 2), and the logits [1, 1, V] of all of them."""
    policy = bare_policy(seed=1)
    slots = Slots(SlotSizes(slots=1, length=8, drafts=3, vocab=policy.vocab_size), torch.device("cpu"))
    slots.start(0, [sampling], [[1, 2]])
    config = DecodingConfig(draft_tokens=3, **settings)  # type: ignore[arg-type]
    drafter, rows = Constant(policy, slots, config), Rows(slots, 1, 1)
    drafter.hidden[:] = torch.randn(drafter.hidden.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        draft = drafter.propose(rows, FixedLength(policy, slots, config))
        return draft, policy.logits(drafter.hidden)[:, None], rows, slots


def test_target_only_drafts_the_most_likely_token() -> None:
    """Whatever number is drawn, and though the target samples at temperature 1; no distribution is kept."""
    greedy, logits, *_ = proposed(SamplingParams(), system="target_only")
    assert greedy.probs is None and (greedy.tokens == logits.argmax(-1)).all()
    sampled, logits, *_ = proposed(SamplingParams(), system="bebop")
    assert sampled.probs is not None and (sampled.tokens != logits.argmax(-1)).any()


def test_a_penalty_sees_the_drafts_before() -> None:
    """Each drafted token is penalised from the next step on, as it will be when it is verified."""
    draft, logits, rows, slots = proposed(SamplingParams(repetition_penalty=4.0))
    assert draft.probs is not None and slots.seen is not None
    seen = slots.seen.clone()
    for step in range(3):
        torch.testing.assert_close(draft.probs[:, step], rows.probs(logits, seen[:, None])[:, 0])
        seen[0, draft.tokens[0, step]] = True
    assert not torch.allclose(draft.probs[:, 0], draft.probs[:, 2])

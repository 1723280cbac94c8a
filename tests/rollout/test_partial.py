"""An answer that is interrupted and taken up again keeps the log-probs and versions of what was written before."""

import dataclasses

import numpy as np
import torch

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import bare_policy, requests

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9]]


def engine(policy: Policy, slots: int = 4) -> TorchEngine:
    return TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=slots, max_length=96)


def interrupted(
    policy: Policy, asked: list[Request], cycles: int, version: int, slots: int = 4
) -> dict[int, Completion]:
    """Answers [T'] after some cycles under weights ``version``."""
    one = engine(policy, slots)
    one.load_weights({}, version)
    for request in asked:
        one.add(request)
    for _ in range(cycles):
        assert not one.step()
    return {finished.id: finished.completion for finished in one.abort()}


def resumed(asked: list[Request], parts: dict[int, Completion]) -> list[Request]:
    return [dataclasses.replace(request, partial=parts[request.id]) for request in asked]


def test_log_probs_and_versions_of_the_part_before_are_kept() -> None:
    before, after = bare_policy(seed=3, dtype=torch.float64), bare_policy(seed=4, dtype=torch.float64)
    asked = requests(PROMPTS, max_new_tokens=30, seed=9)
    parts = interrupted(before, asked, cycles=4, version=5)
    second = engine(after)
    second.load_weights({}, 7)
    answers = generate(second, resumed(asked, parts))
    alone = generate(engine(after), asked)
    for i, answer in enumerate(answers):
        part, done = parts[i], len(parts[i].token_ids)
        assert 0 < done < 30 == len(answer.token_ids)
        np.testing.assert_array_equal(answer.token_ids[:done], part.token_ids)
        np.testing.assert_array_equal(answer.logprobs[:done], part.logprobs)
        assert (part.logprobs < 0).all() and answer.versions.tolist() == [5] * done + [7] * (30 - done)
        # The other weights would have given the same tokens other log-probs: keeping is not computing again.
        assert np.abs(alone[i].logprobs[:done] - part.logprobs).max() > 1e-3


def test_what_waits_is_given_back_with_what_it_had() -> None:
    policy = bare_policy(seed=3)
    asked = requests(PROMPTS, max_new_tokens=30, seed=9)
    parts = interrupted(policy, asked, cycles=2, version=5)
    again = interrupted(policy, resumed(asked, parts), cycles=0, version=6)  # none has got a slot
    for i, part in parts.items():
        np.testing.assert_array_equal(again[i].token_ids, part.token_ids)
        np.testing.assert_array_equal(again[i].logprobs, part.logprobs)
        assert again[i].versions.tolist() == [5] * len(part.token_ids)


def test_statistics_are_those_of_both_parts() -> None:
    policy = bare_policy(seed=3, dtype=torch.float64)
    asked = requests(PROMPTS, max_new_tokens=30, seed=9)
    parts = interrupted(policy, asked, cycles=4, version=0)
    for i, answer in enumerate(generate(engine(policy), resumed(asked, parts))):
        assert parts[i].stats.cycles == 4 < answer.stats.cycles
        assert answer.stats.tokens == 30 and parts[i].stats.tokens == len(parts[i].token_ids)
        assert (answer.stats.reached >= parts[i].stats.reached).all()


def test_answers_do_not_depend_on_slots_of_others_in_mixed_company() -> None:
    """Prompts of one length side by side, under distributions of their own, rows that leave at different times."""
    policy = bare_policy(seed=2, dtype=torch.float64)
    prompts = [[1, 2, 3], [3, 2, 1], [5, 5, 5], [1, 2, 3], [2, 2, 2, 2, 2, 2, 2]]
    distributions = [{"temperature": 1.0}, {"temperature": 0.3}, {"top_k": 2}, {"temperature": 1.5}, {"top_p": 0.5}]
    asked = [
        dataclasses.replace(
            requests([prompt], seed=i, max_new_tokens=5 + 9 * (i % 3), **sampling)[0],  # type: ignore[arg-type]
            id=i,
        )
        for i, (prompt, sampling) in enumerate(zip(prompts, distributions, strict=True))
    ]
    together = generate(engine(policy, slots=3), asked)
    for request, answer in zip(asked, together, strict=True):
        [alone] = generate(engine(policy, slots=1), [request])
        assert answer.token_ids.tolist() == alone.token_ids.tolist()
        np.testing.assert_allclose(answer.logprobs, alone.logprobs, atol=1e-6)


def test_the_last_slot_may_leave_before_the_others() -> None:
    """Nobody moves into its place then; the distributions are those of the rows that are left."""
    policy = bare_policy(seed=2, dtype=torch.float64)
    asked = [
        dataclasses.replace(requests([[1, 2, 3]], seed=i, max_new_tokens=count, temperature=0.5 + i)[0], id=i)
        for i, count in enumerate((25, 12, 4))
    ]
    for request, answer in zip(asked, generate(engine(policy), asked), strict=True):
        assert answer.token_ids.tolist() == generate(engine(policy), [request])[0].token_ids.tolist()

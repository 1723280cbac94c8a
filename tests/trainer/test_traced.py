"""The trainer's log-probs of traced answers are those of the weights before the update, answer by answer."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bebop.trainer.packing import Row, pack
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.traced import TracedLogprobs
from bebop.trajectory import Batch
from tests.cases import slow_but
from tests.trainer.builders import batch, job, plain, plain_logprobs, policy, traced


@torch.no_grad()
def wanted(made: Batch, source: Any) -> dict[int, NDArray[np.float64]]:
    """Of every answer, by transformers' own forward in fp64, one row by itself."""
    model = plain(source).double()
    asked = [
        (group.prompt.token_ids, t.completion.token_ids.tolist()) for group in made.groups for t in group.trajectories
    ]
    return {place: plain_logprobs(model, *pair).numpy() for place, pair in enumerate(asked)}


def distance(ours: dict[int, NDArray[np.float32]], truth: dict[int, NDArray[np.float64]]) -> float:
    assert all(ours[place].shape == truth[place].shape and ours[place].dtype == np.float32 for place in ours)
    return float(np.max([np.abs(ours[place] - truth[place]).max() for place in ours]))  # NaN stays


UPDATES: list[tuple[dict[str, Any], int]] = [
    ({}, 64),
    ({}, 1000),
    ({"minibatches": 2}, 64),
    ({"minibatches": 4}, 20),
    ({"minibatches": 2, "rescore": True}, 64),
]


@pytest.mark.parametrize(("algorithm", "tokens"), slow_but([UPDATES[0], UPDATES[3], UPDATES[4]], UPDATES, several=True))
def test_they_are_those_before_the_update(algorithm: dict[str, Any], tokens: int) -> None:
    source, made = policy(), traced(batch())
    with torch.no_grad():
        source.backbone.lm_head.weight *= 1.2  # the engine had other weights
    truth = wanted(made, source)
    trainer = PolicyTrainer(source, job(algorithm=algorithm, trainer={"max_tokens": tokens, "lr_warmup_steps": 0}))
    trainer.update(made)
    found = trainer.traced.found
    assert sorted(found) == [place for place, t in enumerate(made.trajectories) if t.completion.trace is not None]
    assert distance(found, truth) < 1e-5
    # What could be taken for them is told apart: the engine's, those after the update, and those of another answer.
    assert min(np.abs(made.trajectories[place].completion.logprobs - found[place]).max() for place in found) > 1e-2
    assert distance(found, wanted(made, source)) > 1e-2
    same_length = [(a, b) for a in found for b in truth if a != b and len(found[a]) == len(truth[b])]
    assert same_length and min(np.abs(found[a] - truth[b]).max() for a, b in same_length) > 0.1


def test_they_are_of_the_latest_update_and_of_traced_answers_alone() -> None:
    trainer = PolicyTrainer(policy(), job())
    trainer.update(traced(batch(), every=3))
    assert sorted(trainer.traced.found) == [0, 3, 6, 9]
    trainer.update(traced(batch(seed=1), every=5))
    assert sorted(trainer.traced.found) == [0, 5, 10]
    trainer.update(batch(seed=2))
    assert trainer.traced.found == {}


def test_rows_that_were_not_given_are_nobodys() -> None:
    made = traced(batch())
    first = made.trajectories[0].completion
    rows = [Row(prompt=(1,), completion=first, advantage=0.0, weight=0.0)]
    kept = TracedLogprobs(made.trajectories)
    for part in pack(rows, 64, world=3):  # two of them are blank, their only row number -1
        kept.add(1, part, torch.zeros(len(part.targets)))
    assert kept.found == {}, "answer 1 is not traced"
    for part in pack(rows, 64, world=3):
        kept.add(2, part, torch.arange(float(len(part.targets))))
    assert list(kept.found) == [2] and kept.found[2].tolist() == list(range(len(first.token_ids)))

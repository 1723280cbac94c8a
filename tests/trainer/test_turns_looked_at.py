"""The certificate and the log-probs of traced answers, where trajectories have several turns."""

import dataclasses
from functools import cache

import numpy as np
import pytest
import torch

from bebop.certify.answers import Block
from bebop.config.job import DecodingConfig
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trainer.certify import Certifier, turn_looked_at
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Prompt, SamplingParams, Trajectory, Turn
from tests.stored_answers import trace
from tests.trainer.builders import TEMPERATURE, job, plain, plain_logprobs, policy

PROMPTS = ((1, 2, 3), (4, 5), (6,), (7, 8, 9))
READ = (20, 21, 22)
TURNS = 3


@cache
def played() -> tuple[Group, ...]:
    """Pairs of trajectories of three turns, by an engine with the trainer's weights; the second of a pair ends after
    two."""
    source = policy()
    engine = TorchEngine(source, DecodingConfig(system="bebop", draft_tokens=1), slots=16, max_length=96)
    histories = [list(prompt) for prompt in PROMPTS for _ in range(2)]
    turns: list[list[Turn]] = [[] for _ in histories]
    for number in range(TURNS):
        read = READ[:number]
        for history in histories:
            history += read
        sampling = [SamplingParams(temperature=TEMPERATURE, max_new_tokens=6, seed=i) for i in range(len(histories))]
        asked = [Request(id=i, token_ids=tuple(h), params=sampling[i]) for i, h in enumerate(histories)]
        for own, history, completion in zip(turns, histories, generate(engine, asked), strict=True):
            own.append(Turn(observation=np.array(read, dtype=np.int64), completion=completion))
            history += completion.token_ids.tolist()
    made = [
        Trajectory(turns=tuple(own[: TURNS - i % 2]), reward=float(i % 2), ended="done") for i, own in enumerate(turns)
    ]
    return tuple(
        Group(
            prompt=Prompt(index=i, task="test", text="", token_ids=prompt, item={}),
            trajectories=tuple(made[2 * i : 2 * i + 2]),
        )
        for i, prompt in enumerate(PROMPTS)
    )


def test_pairs_take_turns_and_windows_in_turn() -> None:
    assert [turn_looked_at(number, 1) for number in (0, 1, 7)] == [(0, 0), (0, 1), (0, 7)]
    assert [turn_looked_at(number, 9)[0] for number in range(6)] == [0, 1, 2, 4, 8, 0]
    assert [turn_looked_at(number, 8)[0] for number in range(5)] == [0, 1, 2, 4, 0]
    # Each turn is looked at in all windows, however many of either there are.
    assert {turn_looked_at(number, 3) for number in range(9)} == {(turn, own) for turn in range(3) for own in range(3)}


def test_a_turn_is_held_against_the_policy_after_all_that_came_before() -> None:
    environment = {"source": "environment", "name": "guess", "environment": {"max_turns": TURNS}}
    trainer = PolicyTrainer(policy(), job(monitor={"certify_every": 1}, task=environment))
    certifier, blocks = Certifier(trainer.scorer, trainer.old_policies, trainer.config), list[Block]()
    update = certifier.ledger.update
    certifier.ledger.update = lambda block: (blocks.append(block), update(block))[1]  # type: ignore[method-assign]
    assert certifier.read(played(), 0, 0) is not None
    [block] = blocks
    # Pairs look at turns 0, 1, 2 and 0 again; the second members have no turn 2.
    wanted = [(0, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1), (2, 0, 2), (3, 0, 0), (3, 1, 0)]
    tokens = [t for i, m, turn in wanted for t in played()[i].trajectories[m].turns[turn].completion.token_ids.tolist()]
    assert block.tokens.tolist() == tokens and len(tokens) == 7 * 6
    assert block.reported is not None and float((block.reported - block.logprobs).abs().max()) < 1e-4
    starts = [block.last[i * 6].item() for i in range(7)]
    assert starts == [3, 3, 20, 20, 21, 9, 9]  # the last token that was read, or the prompt's


@torch.no_grad()
def test_log_probs_of_traced_turns_are_those_of_what_was_written() -> None:
    def traced(t: Trajectory, member: int) -> Trajectory:
        def one(own: Completion) -> Completion:
            return dataclasses.replace(own, trace=None if member else trace(len(own.token_ids)))

        return dataclasses.replace(
            t, turns=tuple(dataclasses.replace(turn, completion=one(turn.completion)) for turn in t.turns)
        )

    groups = tuple(
        dataclasses.replace(g, trajectories=tuple(traced(t, m) for m, t in enumerate(g.trajectories))) for g in played()
    )
    trainer, model = PolicyTrainer(policy(), job()), plain(policy()).double()
    with torch.enable_grad():
        trainer.update(Batch(groups=groups))
    assert sorted(trainer.traced.found) == [0, 2, 4, 6]
    for place, found in trainer.traced.found.items():
        context, wanted = list(PROMPTS[place // 2]), []
        for turn in groups[place // 2].trajectories[0].turns:
            context += turn.observation.tolist()
            wanted += plain_logprobs(model, context, turn.completion.token_ids.tolist()).tolist()
            context += turn.completion.token_ids.tolist()
        assert found.tolist() == pytest.approx(wanted, abs=1e-5)

"""A block size a request: chosen from the prompt alone, once, and kept wherever the request goes."""

import dataclasses
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.metrics.metrics import values
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.decoding import BlockDrafter, BlockLength
from bebop.systems.block.network import FEATURES, BlockLengthNetwork, PromptEnd
from bebop.trajectory import Completion, DecodeStats
from tests.builders import requests, tiny_policy
from tests.rollout.driving import aborted, decoder_of, drafter_of, finished, resumed, started

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [4, 4], [1, 3, 2, 2], [3, 2]]
CONFIG = DecodingConfig(system="blockpilot", draft_tokens=4)


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Its random predictor does not give all prompts one size."""
    return tiny_policy(5, seed=11, sharp=16.0)


def engine(policy: Policy, slots: int = 3) -> TorchEngine:
    return TorchEngine(policy, CONFIG, slots=slots, max_length=64)


def choices(one: TorchEngine) -> dict[int, int]:
    """Drafts a cycle of each running request."""
    column = one.slots.columns["block_length/drafts"]
    return {request.id: int(column[slot]) for slot, request in enumerate(one.active)}


def chosen(policy: Policy, seed: int, length: type[BlockLength] = BlockLength, temperature: float = 1.0) -> list[int]:
    """Return what is chosen for each prompt, after three cycles in which different tokens were drawn."""
    one = engine(policy, len(PROMPTS))
    decoder_of(one).length.__class__ = length
    started(one, requests(PROMPTS, seed=seed, max_new_tokens=40, temperature=temperature), 3)
    return [choices(one)[i] for i in range(len(PROMPTS))]


class FromTheAnswer(BlockLength):
    """Looks at logits after what was sampled."""

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        self.chosen[: rows.batch] = False
        super().observe(rows, draft, out, accepted)


def test_a_choice_depends_on_the_prompt_alone(policy: Policy) -> None:
    wanted = chosen(policy, 0)
    assert len(set(wanted)) > 1 and set(wanted) <= {size - 1 for size in network(policy).candidates}
    assert all(chosen(policy, 100 * seed) == wanted for seed in range(1, 4))
    assert any(chosen(policy, 100 * seed, FromTheAnswer) != wanted for seed in range(4))


def network(policy: Policy) -> BlockLengthNetwork:
    part = policy.parts["block_length"]
    assert isinstance(part, BlockLengthNetwork)
    return part


def end_of(policy: Policy, prompt: list[int]) -> PromptEnd:
    with torch.no_grad():
        states = policy.hidden(torch.tensor([prompt]), torch.arange(len(prompt))[None], CausalContext())[:, -1]
        return PromptEnd(logits=policy.logits(states), hidden=states, lengths=torch.tensor([len(prompt)]))


def test_the_first_cycle_drafts_the_default_and_the_others_what_is_chosen(policy: Policy) -> None:
    one = started(engine(policy, 1), requests(PROMPTS[:1], max_new_tokens=30))
    wanted = int(network(policy).choose(end_of(policy, PROMPTS[0]))) - 1
    one._admit()
    assert choices(one) == {0: network(policy).default - 1}
    for _ in range(3):
        one.step()
        assert choices(one) == {0: wanted}


@pytest.mark.parametrize("features", [*FEATURES])
def test_decoding_looks_at_what_the_training_looked_at(policy: Policy, features: str) -> None:
    """Each kind of features, taken from a cycle of the engine, is that of the prompt read by itself."""
    ends = [end_of(policy, prompt) for prompt in PROMPTS]
    torch.manual_seed(5)
    inputs = FEATURES[features](ends[0]).shape[1]
    part = BlockLengthNetwork(inputs=inputs, candidates=(1, 2, 3, 5), default=3, features=features).eval()
    start = torch.cat([part(FEATURES[features](end)) for end in ends])
    part.last.bias.data -= start.mean(0)  # so that prompts decide, not how the network begins
    other = dataclasses.replace(policy, parts={**policy.parts, "block_length": part.requires_grad_(False)})
    wanted = [min(int(part.choose(end)), 5) - 1 for end in ends]
    assert chosen(other, 0) == wanted
    assert len(set(wanted)) > 1, "all alike would show nothing"


def test_a_choice_goes_where_its_request_goes(policy: Policy) -> None:
    """Rows move when others end, and an aborted completion keeps its size on another engine."""
    asked = requests(PROMPTS, max_new_tokens=16)
    alone = [generate(engine(policy, 1), [request])[0] for request in asked]
    assert all(same(a, b) for a, b in zip(generate(engine(policy), asked), alone, strict=True))
    first = started(engine(policy), asked, 3)
    before = choices(first)
    second = started(engine(policy), resumed(asked, aborted(first)))
    second._admit()
    assert before and {i: k for i, k in choices(second).items() if i in before} == before
    done = finished(second)
    assert all(done[i].token_ids.tolist() == alone[i].token_ids.tolist() for i in before)


def same(a: Completion, b: Completion) -> bool:
    return a.token_ids.tolist() == b.token_ids.tolist() and a.stats.cycles == b.stats.cycles


def test_no_block_is_larger_than_the_engine_has_room_for(policy: Policy) -> None:
    """Also where a larger one was chosen before ``draft_tokens`` fell."""
    one = started(engine(policy, len(PROMPTS)), requests(PROMPTS, max_new_tokens=40), 2)
    assert max(choices(one).values()) == 4
    one.configure(dataclasses.replace(CONFIG, draft_tokens=2))
    rows = Rows(one.slots, len(one.active), max(one.fed))
    wanted = decoder_of(one).length.start(rows)
    assert wanted is not None and int(wanted.max()) == 2
    with torch.inference_mode():
        assert drafter_of(one, BlockDrafter).propose(rows, decoder_of(one).length).tokens.shape[1] == 2


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


@pytest.mark.parametrize("length", [Watched, Default])
def test_block_sizes_are_counted_by_draft_position_and_become_metrics(policy: Policy, length: type[Watched]) -> None:
    one = engine(policy)
    watched = decoder_of(one).length
    watched.__class__ = length
    assert isinstance(watched, Watched)
    watched.sizes = []
    stats = sum((answer.stats for answer in generate(one, requests(PROMPTS, max_new_tokens=24))), DecodeStats())
    sizes = [size for size in watched.sizes if size > 1]  # for a block of one token nothing is drafted
    if length is Default:
        assert stats.counts["block_size"][0] > sum(sizes), "a count of what was not chosen is noticed"
        return
    assert len(set(sizes)) > 1 and stats.reached[0] == len(sizes) and stats.counts["block_size"][0] == sum(sizes)
    numbers = values(decode_metrics(stats))
    assert numbers["rollout/block_size/1"] == pytest.approx(sum(sizes) / len(sizes))
    assert numbers["rollout/block_size/4"] == 5, "only the largest blocks reach the last position"

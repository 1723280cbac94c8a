"""Draft temperatures that are chosen: what is measured, what is made of it, and whom it belongs to."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.checkpoint import load_policy
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.temperature import (
    ALWAYS,
    CHUNK,
    EVERY,
    GRID,
    START,
    DraftTemperature,
    Drawn,
    Overlaps,
    measured,
    overlaps,
)
from bebop.rollout.engine import Request
from bebop.rollout.slots import Slots, SlotSizes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import DecodeStats, SamplingParams
from tests.builders import bare_policy, requests
from tests.rollout.driving import aborted, resumed, started, tokens

pytestmark = pytest.mark.slow

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9]]
AUTO = DecodingConfig(draft_tokens=3, draft_temperature="auto")


def seen(curve: list[float], times: int, reached: list[bool], overlaps: Overlaps | None = None) -> Overlaps:
    """One request after so many cycles with these overlaps at every position."""
    now = overlaps or Overlaps(Overlaps.fresh(len(reached))[None])
    for _ in range(times):
        now = Overlaps(now.after(torch.tensor(curve).expand(1, len(reached), -1), torch.tensor([reached])))
    return now


def peak(index: int, height: float = 0.05) -> list[float]:
    """Overlaps whose largest is at one temperature of the grid."""
    return [0.8 - height * abs(i - index) for i in range(len(GRID))]


def test_a_request_begins_where_most_heads_draft_well() -> None:
    assert Overlaps(Overlaps.fresh(5)[None]).best().tolist() == [[START] * 5]


@pytest.mark.parametrize("index", range(len(GRID)))
def test_the_temperature_of_the_largest_overlap_is_found_in_a_few_cycles(index: int) -> None:
    assert seen(peak(index), 4, [True] * 3).best().tolist() == [[index] * 3]


def test_a_position_that_was_not_reached_follows_the_others_until_it_knows_better() -> None:
    first = seen(peak(0), 20, [True, False])
    assert first.best().tolist() == [[0, 0]] and first.kept[0, 1].tolist() == [0.0] * (len(GRID) + 1)
    assert seen(peak(5), 20, [False, True], first).best().tolist() == [[0, 5]]


def test_what_was_long_ago_fades() -> None:
    assert seen(peak(5), 200, [True], seen(peak(0), 200, [True])).best().tolist() == [[5]]


def state(params: list[SamplingParams]) -> tuple[Slots, Rows, DraftTemperature]:
    made = Slots(SlotSizes(slots=len(params) + 1, length=8, drafts=2, vocab=6), torch.device("cpu"))
    chosen = DraftTemperature(made)
    made.start(0, params, [[1, 2]] * len(params))
    return made, Rows(made, len(params), 1), chosen


def observe(rows: Rows, chosen: DraftTemperature, emitted: list[int], lengths: list[int] | None = None) -> Tensor:
    """A cycle of random logits; the target's distributions [B, 3, V], of which the drafter's logits are noisy ones."""
    torch.manual_seed(0)
    target, drawn = torch.randn(rows.batch, 3, 6), Drawn(lengths=None if lengths is None else torch.tensor(lengths))
    for step in range(2):
        drawn.add(target[:, step] + step, rows.seen)
    p = rows.probs(target, None if rows.seen is None else rows.seen[:, None].expand(-1, 3, -1))
    chosen.observe(rows, drawn, p, torch.tensor(emitted))
    return p


def test_overlaps_are_those_of_drafts_that_were_tested_under_each_request_s_own_sampling() -> None:
    """By hand: temperature, truncation and penalty of the row, as verification has them; a cycle a position."""
    params = [{}, {"temperature": 0.5}, {"top_k": 2, "temperature": 2.0}, {"repetition_penalty": 3.0}, {}]
    for some in (params, [one for one in params if "top_k" not in one]):
        _, rows, chosen = state([SamplingParams(**one) for one in some])  # type: ignore[arg-type]
        lengths = [2] * (len(some) - 1) + [1]
        emitted = [3, 1, 2, 3, 3][: len(some)]
        p = observe(rows, chosen, emitted, lengths)
        observe(rows, chosen, emitted, lengths)
        torch.manual_seed(0)
        logits = torch.randn(len(some), 3, 6)[:, :2] + torch.tensor([0.0, 1.0])[:, None]
        reached = [[1, int(tested > 1)] for tested in map(min, emitted, lengths)]
        assert chosen.kept[: len(some), :, -1].tolist() == [[*row, *[0] * 14] for row in reached]
        assert any(0 in row for row in reached)
        for row, one in enumerate(some):
            for step in range(sum(reached[row])):
                own = logits[row, step].clone()
                if "repetition_penalty" in one:
                    own[1:3] = torch.where(own[1:3] > 0, own[1:3] / 3, own[1:3] * 3)
                for i, factor in enumerate(GRID):
                    q = (own / (factor * one.get("temperature", 1.0))).softmax(-1)
                    if "top_k" in one:
                        q = q * (q >= q.sort().values[-2])
                    overlap = torch.minimum(p[row, step], q / q.sum()).sum()
                    assert float(chosen.kept[row, step, i]) == pytest.approx(float(overlap), abs=1e-6)


@pytest.mark.parametrize("vocabulary", [6, CHUNK // 20, CHUNK // 4, CHUNK + 5])
def test_overlaps_in_blocks_are_those_of_whole_distributions(vocabulary: int) -> None:
    """Several rows a block, some temperatures of one row, one; a token that is ruled out; logits that overflow."""
    torch.manual_seed(1)
    logits, temperatures = 3 * torch.randn(5, vocabulary), torch.rand(5, 6) + 0.2
    p = (logits + torch.randn(5, vocabulary)).softmax(-1)
    logits[:, 2], logits[3] = -torch.inf, logits[3] + 1e4
    q = (logits.double()[:, None] / temperatures.double()[..., None]).softmax(-1)
    assert torch.allclose(overlaps(p, logits, temperatures), torch.minimum(q, p[:, None]).sum(-1).float(), atol=2e-5)


def test_blocks_stay_small() -> None:
    """Of a large vocabulary no more is made at a time than a few temperatures of one row."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.extend([out.numel()] if isinstance(out, Tensor) else [])
            return out

    logits = torch.randn(20, CHUNK // 4)
    with Watch():
        overlaps(logits.softmax(-1), logits, torch.ones(20, 6))
    assert max(made[1:]) <= CHUNK  # the first is the softmax of this test


def test_a_row_is_measured_by_itself_while_others_are_not() -> None:
    """Under its own temperature, wherever it is among the rows."""
    _, rows, chosen = state([SamplingParams(temperature=t) for t in (0.5, 2.0)])
    chosen.cycles[0] = ALWAYS + 1
    p = observe(rows, chosen, [3, 3])
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6)[1, 0]
    wanted = [float(torch.minimum(p[1, 0], (logits / (2 * factor)).softmax(-1)).sum()) for factor in GRID]
    assert chosen.kept[1, 0, :-1].tolist() == pytest.approx(wanted, abs=1e-6)
    assert not chosen.kept[0].any() and chosen.cycles[:2].tolist() == [ALWAYS + 2, 1]


def test_what_was_measured_is_drawn_at_in_the_next_cycle() -> None:
    """Logits of half the target's draft best at half the temperature: the choice moves down, in that row alone."""
    _, rows, chosen = state([SamplingParams(), SamplingParams(temperature=0.0)])
    torch.manual_seed(0)
    target = 4 * torch.randn(2, 3, 6)
    for _ in range(40):
        drawn = Drawn()
        for step in range(2):
            drawn.add(target[:, step] / 3, None)
        chosen.observe(rows, drawn, rows.probs(target), torch.tensor([3, 3]))
    assert chosen.choose(rows, 2).tolist() == [[pytest.approx(GRID[0])] * 2, [0.0, 0.0]]
    assert not chosen.kept[1].any()  # greedy drafts are the same at every temperature
    assert torch.equal(chosen.factors[0], torch.tensor(GRID)[Overlaps(chosen.kept[:1]).best()[0]])


def test_temperatures_are_those_of_each_request_and_greedy_rows_draft_greedily() -> None:
    _, rows, chosen = state([SamplingParams(temperature=t) for t in (0.5, 0.0, 1.0)])
    chosen.factors[0] = GRID[3]
    assert chosen.choose(rows, 2).tolist() == [
        pytest.approx([0.5 * GRID[3]] * 2), [0.0, 0.0], pytest.approx([GRID[START]] * 2)
    ]  # fmt: skip
    neutral = state([SamplingParams()] * 2)
    assert neutral[2].choose(neutral[1], 1).tolist() == [[pytest.approx(GRID[START])]] * 2


def test_every_position_has_its_turn_in_the_first_cycles_and_in_one_of_so_many_after_that() -> None:
    for drafts in (1, 2, 3, 4, 5):
        places = [measured(cycle, drafts) for cycle in range(ALWAYS + 10 * EVERY)]
        assert places[:ALWAYS] == [cycle % drafts for cycle in range(ALWAYS)]
        later = places[ALWAYS::EVERY]
        assert later == [(ALWAYS + turn) % drafts for turn in range(10)]
        assert sum(place is not None for place in places) == ALWAYS + 10


def test_cycles_that_are_not_measured_change_nothing() -> None:
    _, rows, chosen = state([SamplingParams()])
    counts = []
    for _ in range(ALWAYS + 2 * EVERY):
        before = chosen.kept.clone()
        observe(rows, chosen, [3])
        counts.append(not torch.equal(before, chosen.kept))
    assert counts == [True] * ALWAYS + ([True] + [False] * (EVERY - 1)) * 2


# ---- within the engine


def engine(config: DecodingConfig = AUTO, slots: int = 4) -> TorchEngine:
    return TorchEngine(bare_policy(seed=3, dtype=torch.float64), config, slots=slots, max_length=96)


def asked(**params: object) -> list[Request]:
    return requests(PROMPTS, max_new_tokens=30, seed=9, **params)


@pytest.mark.slow
def test_a_completion_does_not_depend_on_those_beside_it() -> None:
    alone = generate(engine(slots=1), asked())
    assert tokens(generate(engine(slots=3), asked())) == tokens(alone)
    assert tokens(generate(engine(DecodingConfig(draft_tokens=3)), asked())) != tokens(alone)


def test_a_completion_that_is_taken_up_again_is_the_same_and_would_not_be_without_what_it_learned() -> None:
    """What it carries is numbers that a worker can send."""
    whole, parts = tokens(generate(engine(), asked())), aborted(started(engine(), asked(), 5))
    assert all(part.state["temperature/overlaps"].dtype == np.float64 for part in parts.values())
    assert all(int(part.state["temperature/cycles"]) == 5 for part in parts.values())
    assert tokens(generate(engine(), resumed(asked(), parts))) == whole
    bare = {i: dataclasses.replace(part, state={}) for i, part in parts.items()}
    assert tokens(generate(engine(), resumed(asked(), bare))) != whole


@pytest.mark.slow
def test_a_head_that_is_too_unsure_is_put_right() -> None:
    """The built-in model's, with logits half as large: in completions of 40 tokens, most of what a fixed one gains."""
    policy = load_policy(ModelConfig(device="cpu"))
    assert policy.mtp is not None
    with torch.no_grad():
        policy.mtp.final_norm.weight.mul_(0.5)
    prompt = PromptSource(TaskConfig(), chat_encoder(policy.tokenizer), 400).prompt
    wanted = requests([prompt(i).token_ids for i in range(16)], max_new_tokens=40, stop_token_ids=policy.eos_token_ids)

    def rate(temperature: float | str) -> float:
        config = DecodingConfig(draft_tokens=3, draft_temperature=temperature)  # type: ignore[arg-type]
        answers = generate(TorchEngine(policy, config, slots=16, max_length=256), wanted)
        stats = sum((answer.stats for answer in answers), DecodeStats())
        return float(stats.overlap.sum() / stats.reached.sum())

    fixed, own = rate(0.42), rate(1.0)
    assert fixed > own + 0.1 and rate("auto") > own + 0.9 * (fixed - own)


def test_temperatures_of_adaptive_drafts_do_not_depend_on_rows_beside() -> None:
    costs = {"cost_ratio": 0.1, "verify_ratio": 0.1}
    config = DecodingConfig(system="bebop_adaptive", draft_tokens=5, draft_temperature="auto", **costs)
    policy = bare_policy(dtype=torch.float64)
    asked = requests([[1, 2, 3], [4, 5], [6, 7, 8, 9], [3]], max_new_tokens=30)
    alone, beside = (
        generate(TorchEngine(policy, config, slots=n, max_length=40, keep_state=True), asked) for n in (1, 4)
    )
    assert tokens(beside) == tokens(alone)
    for a, b in zip(alone, beside, strict=True):
        np.testing.assert_array_equal(a.state["temperature/factors"], b.state["temperature/factors"])

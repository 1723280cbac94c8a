"""How every decoding system of the registry behaves, whatever it drafts with and whatever rule accepts.

- Greedy answers are those of plain decoding, which are Hugging Face's own.
- Log-probs are those of one pass over the whole text.
- Seeds decide the tokens: alone, beside others and in any order.
- An aborted answer goes on where it was, to the bit.
- Weights that change in flight reach the tokens after them; another system may take over between two cycles.
- Stop tokens, stop strings and limits cut an answer and change nothing before.

A system is a row of ``bebop.systems.SYSTEMS``, and a new one is tested here without a line of its own. ``QUICK`` has
one for each drafter that keeps a state and each cycle; the others are slow tests. What is a system's own is in the file
with its name; the distributions at other temperatures are in ``test_exactness.py``.
"""

import copy
import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion
from tests.builders import alone, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.broken import AcceptsOneMore, RowOfTheParent
from tests.rollout.trees import CHAIN, FIRP_TREES, FIVE, firp_tree, head_tree

LENGTH = 16  # tokens of an answer
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2]]
OF_THE_MODEL = [name for name, system in SYSTEMS.items() if not system.custom_cycle]  # answers are the policy's
DRAFTING = [name for name, system in SYSTEMS.items() if system.drafts]
QUICK = ["bebop", "bebop_history", "block", "firp", "pipo"]  # each drafter with a state of its own, and each cycle


def engine(
    policy: Policy, system: str = "bebop", slots: int = 4, drafts: int = 0, max_length: int = 96, **settings: object
) -> TorchEngine:
    # Drafts so cheap that an adaptive length is not always 1 with the untrained head of the tiny policy.
    drafts = drafts or min(5, SYSTEMS[system].draft_tokens)
    config = DecodingConfig(
        system=system, draft_tokens=drafts, cost_ratio=0.04, verify_ratio=0.02, options=alone(system)
    )
    return TorchEngine(policy, config, slots=slots, max_length=max_length, **settings)  # type: ignore[arg-type]


def policy_of(system: str, **settings: Any) -> Policy:
    """Return a tiny policy with the parts of a system, if it has any: they take more than half of the time."""
    return tiny_policy(with_parts=bool(SYSTEMS[system].needs), **settings)


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in completions]


def numbers(answers: Sequence[Completion]) -> list[tuple[list[int], int, list[float]]]:
    """Return the tokens of answers, and how they were drafted."""
    return [(a.token_ids.tolist(), a.stats.cycles, a.stats.reached.tolist()) for a in answers]


# ---- answers that several tests look at; nobody may change this policy


@cache
def shared_policy() -> Policy:
    return tiny_policy(seed=2, dtype=torch.float64)


def asked() -> list[Request]:
    return requests(PROMPTS, max_new_tokens=LENGTH, seed=5)


@cache
def drawn(system: str) -> list[Completion]:
    """Return sampled answers, each from an engine of its own."""
    return [generate(engine(shared_policy(), system, slots=1), [request])[0] for request in asked()]


# ---- temperature 0


@cache
def hugging_face(count: int) -> list[list[int]]:
    """Return Hugging Face's own greedy answers, with its own attention."""
    policy = tiny_policy()
    stock: Qwen2ForCausalLM = AutoModelForCausalLM.from_config(
        copy.deepcopy(policy.backbone.config), attn_implementation="eager"
    )
    stock.load_state_dict(policy.backbone.state_dict())
    stock.eval()
    outs = [
        stock.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
        for prompt in PROMPTS
    ]
    return [out[0, len(prompt) :].tolist() for prompt, out in zip(PROMPTS, outs, strict=True)]


@pytest.mark.parametrize("system", slow_but(["bebop", "bebop_tree", "ngram", "bebop_history"], OF_THE_MODEL))
def test_temperature_zero_equals_hugging_face_generate(system: str) -> None:
    asked = requests(PROMPTS, temperature=0.0, max_new_tokens=24, stop_token_ids=(11,))
    assert tokens(generate(engine(policy_of(system), system), asked)) == hugging_face(24)


SMALL_PROMPTS = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [2]]


def small_policy(zeroed: bool = False) -> Policy:
    """Return a policy of five tokens and three layers; ``zeroed``: with firp matrices of zeros."""
    policy = tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)
    if zeroed:
        for matrix in policy.parts["firp"].parameters():
            matrix.zero_()
    return policy


def greedy(decoding: DecodingConfig, penalty: float, policy: Policy, rule: Any = None) -> list[Completion]:
    one = TorchEngine(policy, decoding, slots=4, max_length=64)
    if rule is not None:
        assert isinstance(one.decoder, DraftVerify)
        one.decoder.rule = rule()
    params = {"temperature": 0.0, "repetition_penalty": penalty}
    return generate(one, requests(SMALL_PROMPTS, max_new_tokens=16, **params))


@cache
def plain(penalty: float) -> list[Completion]:
    return greedy(DecodingConfig(system="autoregressive", draft_tokens=0), penalty, small_policy())


def chain_of(system: str, drafts: int) -> DecodingConfig:
    return DecodingConfig(system=system, draft_tokens=drafts)


SETTINGS: dict[str, DecodingConfig] = {
    **{f"{name}-{n}": chain_of(name, n) for name in ("block", "block_target_only") for n in range(1, 17)},
    **{f"firp_chain-{n}": chain_of("firp_chain", n) for n in (1, 3, 5)},
    **{f"tree-{t}": head_tree(FIVE, draft_temperature=t) for t in (None, 0.0, 1.0)},
    **{f"firp-{name}": decoding for name, decoding in FIRP_TREES.items()},
}
# Of each drafter the setting in which most differs from a chain; penalties see the way down a tree.
QUICK_SETTINGS = [
    ("block-2", 1.0),
    ("block-16", 1.0),
    ("tree-None", 1.5),
    ("firp-likeliest", 1.5),
]


@pytest.mark.parametrize(
    ("name", "penalty"), slow_but(QUICK_SETTINGS, [(n, p) for n in SETTINGS for p in (1.0, 1.5)], several=True)
)
def test_greedy_answers_are_those_of_plain_decoding(name: str, penalty: float) -> None:
    """Blocks of every size, and trees of every shape, whatever the matrices of firp are worth."""
    answers = greedy(SETTINGS[name], penalty, small_policy())
    assert tokens(answers) == tokens(plain(penalty))
    for mine, wanted in zip(answers, plain(penalty), strict=True):
        np.testing.assert_allclose(mine.logprobs, wanted.logprobs, atol=1e-6)
    assert sum(a.stats.accepted.sum() for a in answers) > 5
    if SETTINGS[name].system.startswith("firp"):
        assert tokens(greedy(SETTINGS[name], penalty, small_policy(zeroed=True))) == tokens(plain(penalty))


@pytest.mark.parametrize(
    ("name", "rule"),
    [("block-3", AcceptsOneMore), ("firp_chain-3", AcceptsOneMore), ("firp-five", RowOfTheParent)],
)
def test_broken_rules_change_greedy_answers(name: str, rule: type) -> None:
    assert tokens(greedy(SETTINGS[name], 1.0, small_policy(), rule)) != tokens(plain(1.0))


# ---- log-probs


def full_logprobs(policy: Policy, prompt: list[int], answer: Completion, temperature: float) -> np.ndarray:
    """Return log-probs of the answer from one forward pass over the whole text."""
    ids = torch.tensor([*prompt, *answer.token_ids.tolist()])
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
        table = (policy.logits(hidden)[0] / temperature).log_softmax(-1)
    return table[torch.arange(len(prompt) - 1, len(ids) - 1), ids[len(prompt) :]].float().numpy()


@pytest.mark.parametrize(
    ("system", "temperature"),
    slow_but(
        [(name, 0.6) for name in ("bebop", "bebop_tree", "firp")],
        [(name, temperature) for name in OF_THE_MODEL for temperature in (1.0, 0.6)],
        several=True,
    ),
)
def test_logprobs_are_those_of_a_full_forward(system: str, temperature: float) -> None:
    policy = policy_of(system, seed=1)
    answers = generate(engine(policy, system), requests(PROMPTS, temperature=temperature, max_new_tokens=24))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ratio = np.exp(full_logprobs(policy, prompt, answer, temperature) - answer.logprobs)
        assert np.abs(ratio - 1).max() < 1e-5
    if system == "bebop":  # the check can fail: the draft's log q is far from it
        assert sum(a.stats.accepted.sum() for a in answers) > 10


# ---- seeds, batches, interruptions


@pytest.mark.parametrize("system", slow_but(QUICK, SYSTEMS))
def test_seeds_give_the_same_tokens_in_any_batch(system: str) -> None:
    used = engine(shared_policy(), system, slots=3)  # three at a time, so that rows move
    each = numbers(drawn(system))
    assert numbers(generate(used, asked()[::-1])) == each[::-1]
    assert numbers(generate(used, asked()[:3])) == each[:3], "now with a past"
    other = generate(used, requests(PROMPTS[:1], max_new_tokens=LENGTH, seed=50))
    assert tokens(other) != tokens(drawn(system)[:1])
    if system == "bebop_adaptive":  # lengths do differ from request to request, and from cycle to cycle
        assert len({reached[2] / reached[0] for _, _, reached in each}) > 1
        assert 0 < sum(reached[2] for *_, reached in each) < sum(reached[1] for *_, reached in each)


@pytest.mark.parametrize("system", slow_but(QUICK, SYSTEMS))
def test_abort_and_resume_give_the_whole_answer(system: str) -> None:
    policy, whole = shared_policy(), drawn(system)
    first = engine(policy, system)
    for request in asked():
        first.add(request)
    for _ in range(4):
        assert not first.step()
    parts = {f.id: f.completion for f in first.abort()}
    assert first.unfinished == 0 and {len(p.token_ids) for p in parts.values()} != {0}
    assert all(p.finish_reason == "abort" for p in parts.values())
    longer = engine(policy, system, max_length=160)  # an answer is not tied to the sizes of the engine it began in
    again = generate(longer, [dataclasses.replace(r, partial=parts[r.id]) for r in asked()])
    assert numbers(again) == numbers(whole)
    assert [a.stats.tokens for a in again] == [a.stats.tokens for a in whole]
    keeps = not SYSTEMS[system].fixed_length or SYSTEMS[system].custom_cycle or SYSTEMS[system].history
    assert all(bool(p.state) == (keeps and len(p.token_ids) > 0) for p in parts.values())
    assert not any(a.state for a in again), "nothing more is needed of a finished answer"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRP_TREES)
def test_an_answer_is_the_same_alone_in_a_group_and_after_an_abort(name: str) -> None:
    """Groups share a prompt, and the firp tree some of whose nodes have no pseudo states has most to forget."""
    group = requests([SMALL_PROMPTS[2]] * 3 + SMALL_PROMPTS, max_new_tokens=20, temperature=1.2)
    policy = small_policy()
    together = generate(TorchEngine(policy, FIRP_TREES[name], slots=9, max_length=64), group)
    other = TorchEngine(policy, FIRP_TREES[name], slots=2, max_length=64)
    for request in group[1:4]:
        other.add(request)
    done = {f.id: f.completion for _ in range(3) for f in other.step()}
    stopped = {f.id: f.completion for f in other.abort()}
    for request in group[1:4]:
        if request.id not in done:
            other.add(dataclasses.replace(request, partial=stopped[request.id]))
    while other.unfinished:
        done |= {f.id: f.completion for f in other.step()}
    assert [done[i].token_ids.tolist() for i in (1, 2, 3)] == tokens(together[1:4])
    assert len({tuple(ids) for ids in tokens(together)}) > 5


# ---- changes in flight


@pytest.mark.parametrize(
    ("system", "on_update"),
    slow_but(
        [("bebop", "keep"), *((name, "recompute") for name in ("bebop", "block", "firp"))],
        [(name, on_update) for name in OF_THE_MODEL for on_update in ("keep", "recompute")],
        several=True,
    ),
)
def test_weights_change_in_flight(system: str, on_update: str) -> None:
    """How pipo takes new weights is its own: see test_pipo.py."""
    policy, other = policy_of(system, seed=4), policy_of(system, seed=5)
    running = engine(policy, system, on_update=on_update)
    for request in requests(PROMPTS[:3], max_new_tokens=30):
        running.add(request)
    for _ in range(3):
        running.step()
    running.load_weights({n: p.detach().clone() for n, p in other.weights().items()}, version=1)
    done = {}
    while running.unfinished:
        done |= {f.id: f.completion for f in running.step()}
    for i, answer in done.items():
        switch = int((answer.versions == 0).sum())
        assert 0 < switch < len(answer.token_ids) and (np.diff(answer.versions) >= 0).all()
        exact = full_logprobs(other, PROMPTS[i], answer, 1.0)[switch:]
        same = np.abs(exact - answer.logprobs[switch:]).max() < 1e-4
        assert same == (on_update == "recompute")  # old keys and values are kept otherwise


@pytest.mark.parametrize("temperature", slow_but([1.0], [0.0, 1.0]))
def test_another_system_takes_over_between_two_cycles(temperature: float) -> None:
    """Answers in progress go on: greedy ones remain Hugging Face's, sampled ones have the model's log-probs."""
    policy = policy_of("bebop")
    one, done = engine(policy, drafts=2, room=4), {}
    for request in requests(PROMPTS, temperature=temperature, max_new_tokens=24, stop_token_ids=(11,)):
        one.add(request)
    others = [DecodingConfig(system="target_only", draft_tokens=4), DecodingConfig(system="bebop", draft_tokens=1)]
    for cycle in range(60):
        if cycle % 2 == 0:
            one.configure(others[cycle // 2 % 2])
        done |= {f.id: f.completion for f in one.step()}
    assert len(done) == len(PROMPTS)
    work = [(answer.stats.cycles, answer.stats.draft_forwards) for answer in done.values()]
    assert any(cycles < forwards < 4 * cycles for cycles, forwards in work), "both systems drafted"
    for i, prompt in enumerate(PROMPTS):
        if temperature == 0:
            assert done[i].token_ids.tolist() == hugging_face(24)[i]
        else:
            ratio = np.exp(full_logprobs(policy, prompt, done[i], temperature) - done[i].logprobs)
            assert np.abs(ratio - 1).max() < 1e-5
    with pytest.raises(UserError, match="room for 4"):
        one.configure(DecodingConfig(draft_tokens=5))
    with pytest.raises(UserError, match="room for 0"):
        engine(policy, "autoregressive").configure(DecodingConfig(draft_tokens=1))
    engine(policy, "autoregressive", room=2).configure(DecodingConfig(draft_tokens=2))
    part = next(iter(done.values()))
    adaptive = engine(policy, "bebop_adaptive", drafts=2)
    held = adaptive.slots.export(0)
    odd = dataclasses.replace(part, state={name: np.zeros((7, *row.shape)) for name, row in held.items()})
    with pytest.raises(UserError, match=r"cannot go on in this engine: its state .* has the shape \(7, "):
        adaptive.add(dataclasses.replace(asked()[0], partial=odd))
    assert not adaptive.unfinished


TURNS = {
    "trees": [head_tree(FIVE), DecodingConfig(draft_tokens=3), DecodingConfig(system="ngram"), head_tree(CHAIN)],
    # One pass of the target has room for one drafter: chain and tree of firp are the same one.
    "firp": [firp_tree(FIVE), chain_of("firp_chain", 3), firp_tree(FIVE, pseudo_paths=1), DecodingConfig()],
}


@pytest.mark.parametrize("name", TURNS)
def test_systems_take_turns_between_cycles(name: str) -> None:
    """Greedy answers remain those of plain decoding, and drafters that are not in charge read on."""
    turns = TURNS[name]
    one, done = TorchEngine(small_policy(), turns[0], slots=4, max_length=64, room=5), {}
    for request in requests(SMALL_PROMPTS, temperature=0.0, max_new_tokens=16):
        one.add(request)
    for cycle in range(60):
        one.configure(turns[cycle // 2 % 4])
        done |= {f.id: f.completion for f in one.step()}
    assert [done[i].token_ids.tolist() for i in range(len(SMALL_PROMPTS))] == tokens(plain(1.0))


# ---- ends and counts


@pytest.mark.parametrize("system", slow_but(QUICK, SYSTEMS))
def test_stop_strings_and_tokens_end_an_answer(system: str) -> None:
    policy, free, request = shared_policy(), drawn(system)[2], asked()[2]
    assert free.finish_reason == "length" and len(free.token_ids) == LENGTH

    text, ids = free.text[10:12], free.token_ids.tolist()
    token = ids[7]
    ends: list[dict[str, Any]] = [{"stop": (text,)}, {"stop_token_ids": (token,)}, {"max_new_tokens": 9}]
    same = [
        dataclasses.replace(request, id=i, params=dataclasses.replace(request.params, **own))
        for i, own in enumerate(ends)
    ]
    by_text, by_token, by_limit = generate(engine(policy, system), same)
    assert by_text.text == free.text[: free.text.index(text) + 2] and by_text.finish_reason == "stop"
    assert by_token.token_ids.tolist() == ids[: ids.index(token) + 1] and by_token.finish_reason == "stop"
    assert by_limit.token_ids.tolist() == ids[:9] and by_limit.finish_reason == "length"


@pytest.mark.parametrize("system", slow_but(["bebop", "bebop_tree", "pipo"], DRAFTING))
def test_counts_add_up(system: str) -> None:
    """Two slots serve five requests: what a slot counted before is not counted again."""
    for answer in generate(engine(shared_policy(), system, slots=2), asked()):
        stats = answer.stats
        assert stats.tokens == len(answer.token_ids) == LENGTH
        assert (stats.accepted <= stats.reached).all() and (stats.reached[1:] <= stats.accepted[:-1]).all()
        assert stats.tokens <= stats.cycles + stats.accepted.sum() <= stats.tokens + 1
        assert stats.accept_length == LENGTH / stats.cycles == sum(s.tokens for _, s in answer.stretches) / stats.cycles
        assert (stats.overlap <= stats.reached + 1e-9).all()

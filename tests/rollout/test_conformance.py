"""How every decoding system of the registry behaves, whatever it drafts with and whatever rule accepts.

- Greedy completions are those of plain decoding, which are Hugging Face's own, in other families of models, too.
- Log-probs are those of one pass over the whole text; in bfloat16 they differ by rounding alone.
- Seeds decide the tokens: alone, beside others and in any order.
- An aborted completion goes on where it was, to the bit.
- Weights that change in flight reach the tokens after them; another system may take over between two cycles.
- Stop tokens, stop strings and limits cut a completion and change nothing before.

A system is a row of ``bebop.systems.SYSTEMS``, and a new one is tested here without a line of its own. ``QUICK`` has
one for each drafter that keeps a state and each cycle; the others are slow tests. What is a system's own is in the file
with its name; the distributions at other temperatures are in ``test_exactness.py``.
"""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model import attention, ragged_attention
from bebop.model.attention import ATTENTION, PackedContext
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.model.parity import check_parity
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.systems.firp import network as firp_network
from bebop.trajectory import Completion
from tests.builders import alone, bare_policy, letters, needs_more, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.broken import AcceptsOneMore, RowOfTheParent
from tests.rollout.driving import aborted, decoder_of, finished, resumed, started, tokens
from tests.rollout.trees import CHAIN, FIRP_TREES, FIVE, firp_tree, head_tree

LENGTH = 16  # tokens of a completion
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
    return tiny_policy(with_parts=needs_more(system), **settings)


def numbers(answers: Sequence[Completion]) -> list[tuple[list[int], int, list[float]]]:
    """Return the tokens of completions, and how they were drafted."""
    return [(a.token_ids.tolist(), a.stats.cycles, a.stats.reached.tolist()) for a in answers]


# ---- completions that several tests look at; nobody may change this policy


@cache
def shared_policy() -> Policy:
    return tiny_policy(seed=2, dtype=torch.float64)


def asked() -> list[Request]:
    return requests(PROMPTS, max_new_tokens=LENGTH, seed=5)


@cache
def drawn(system: str) -> list[Completion]:
    """Return sampled completions, each from an engine of its own."""
    return [generate(engine(shared_policy(), system, slots=1), [request])[0] for request in asked()]


# ---- temperature 0


def generated(policy: Policy, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Return Hugging Face's own greedy completions, with its own attention."""
    stock: Any = AutoModelForCausalLM.from_config(
        copy.deepcopy(policy.backbone.config), attn_implementation="eager"
    ).eval()
    stock.load_state_dict(policy.backbone.state_dict())
    stock.generation_config.eos_token_id = None
    settings = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    outs = [stock.generate(torch.tensor([prompt]), **settings) for prompt in prompts]
    return [out[0, len(prompt) :].tolist() for prompt, out in zip(prompts, outs, strict=True)]


@cache
def hugging_face() -> list[list[int]]:
    """Return 24 greedy tokens for each prompt; the end of a text is the stop token 11."""
    found = generated(tiny_policy(), PROMPTS, 24)
    return [ids[: ids.index(11) + 1] if 11 in ids else ids for ids in found]


@pytest.mark.parametrize("system", slow_but(["bebop", "bebop_tree", "ngram", "bebop_history"], OF_THE_MODEL))
def test_temperature_zero_equals_hugging_face_generate(system: str) -> None:
    asked = requests(PROMPTS, temperature=0.0, max_new_tokens=24, stop_token_ids=(11,))
    assert tokens(generate(engine(policy_of(system), system), asked)) == hugging_face()


FAMILY = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None,
}  # fmt: skip


def family(name: str, **settings: object) -> Policy:
    """Return a policy of another family of dense causal models, with a fresh MTP head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**FAMILY, **settings})
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    head = MTPHead(backbone).eval()
    init_from_backbone(head, backbone)
    return Policy(backbone=backbone, tokenizer=letters(12), mtp=head, layout="mimo")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "olmo2", "granite"])
def test_other_families_of_models_equal_hugging_face_generate(name: str) -> None:
    policy, prompts = family(name, sliding_window=None), [[1, 2, 3, 4], [5, 6]]
    asked = requests(prompts, temperature=0.0, max_new_tokens=16)
    assert tokens(generate(engine(policy), asked)) == generated(policy, prompts, 16)


def test_a_sliding_window_is_refused() -> None:
    one = engine(family("mistral", sliding_window=8), "autoregressive")
    with pytest.raises(UserError, match="sliding_window=8"):
        generate(one, requests([[1, 2, 3]], max_new_tokens=4))


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
        decoder_of(one).rule = rule()
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
def test_greedy_completions_are_those_of_plain_decoding(name: str, penalty: float) -> None:
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
def test_broken_rules_change_greedy_completions(name: str, rule: type) -> None:
    assert tokens(greedy(SETTINGS[name], 1.0, small_policy(), rule)) != tokens(plain(1.0))


# ---- log-probs


def full_logprobs(policy: Policy, prompt: list[int], answer: Completion, temperature: float = 1.0) -> np.ndarray:
    """Return log-probs of the completion from one forward pass over the whole text."""
    ids = torch.tensor([*prompt, *answer.token_ids.tolist()])
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
        logits = policy.logits(hidden)[0]
        table = ((logits.float() if logits.dtype == torch.bfloat16 else logits) / temperature).log_softmax(-1)
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


def test_bfloat16_differs_by_its_rounding_and_nothing_else() -> None:
    """Against the same weights in fp32, the engine is no worse than one bfloat16 pass over the text.

    A limit on the largest difference would have to be wide; means over hundreds of tokens see a shift of a hundredth.
    """
    engine_error, forward_error, hot_error = [], [], []
    for seed in (8, 9):
        policy, single = bare_policy(seed=seed, dtype=torch.bfloat16), bare_policy(seed=seed)
        single.backbone.load_state_dict({name: w.float() for name, w in policy.backbone.state_dict().items()})
        one = TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=4, max_length=96)
        for prompt, answer in zip(PROMPTS, generate(one, requests(PROMPTS, max_new_tokens=30)), strict=True):
            right = full_logprobs(single, prompt, answer)
            engine_error.append(answer.logprobs - right)
            forward_error.append(full_logprobs(policy, prompt, answer) - right)
            hot_error.append(full_logprobs(policy, prompt, answer, 1.05) - right)
    mine, plain, hot = (np.concatenate(errors) for errors in (engine_error, forward_error, hot_error))
    assert 0.003 < np.abs(plain).mean() < 0.03  # what rounding is
    assert np.abs(mine).mean() < 1.15 * np.abs(plain).mean() < np.abs(hot).mean()
    assert np.abs(mine).max() < 2.5 * np.abs(plain).max()
    assert abs(mine.mean()) < 0.005  # it does not lean to one side


# ---- fused attention of a GPU, whose result has the heads of a token side by side, not the tokens of a head

CALLERS: tuple[ModuleType, ...] = (attention, firp_network, ragged_attention)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what gives attention's results the order in memory that a GPU gives them: [B, n, H, D].

    In double precision, and on a CPU, torch takes other kernels, and nobody notices who relies on the order.
    """
    plain = attention.scaled_dot_product_attention

    def as_on_a_gpu(*args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    def begin() -> None:
        for module in CALLERS:
            monkeypatch.setattr(module, "scaled_dot_product_attention", as_on_a_gpu)

    return begin


@pytest.mark.parametrize("system", slow_but(["bebop", "block", "firp", "pipo"], SYSTEMS))
def test_tokens_do_not_depend_on_the_order_in_memory(system: str, fused: Callable[[], None]) -> None:
    policy, asked = tiny_policy(seed=9, dtype=torch.float64), requests(PROMPTS, max_new_tokens=12)
    expected = tokens(generate(engine(policy, system), asked))
    fused()
    assert tokens(generate(engine(policy, system), asked)) == expected


def test_all_ways_through_a_model_are_its_own(fused: Callable[[], None]) -> None:
    fused()
    check_parity(tiny_policy(seed=2), "tiny")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ways_through_a_model_are_its_own_on_a_gpu(dtype: torch.dtype) -> None:
    policy = tiny_policy(seed=2, dtype=dtype)
    for module in policy.modules():
        module.to("cuda")
    check_parity(policy, "tiny")
    assert all(len(ids) for ids in tokens(generate(engine(policy), requests(PROMPTS, max_new_tokens=24))))


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
def test_abort_and_resume_give_the_whole_completion(system: str) -> None:
    policy, whole = shared_policy(), drawn(system)
    first = started(engine(policy, system), asked())
    for _ in range(4):
        assert not first.step()
    parts = aborted(first)
    assert first.unfinished == 0 and {len(p.token_ids) for p in parts.values()} != {0}
    assert all(p.finish_reason == "abort" for p in parts.values())
    longer = engine(policy, system, max_length=160)  # a completion is not tied to the sizes of the engine it began in
    again = generate(longer, resumed(asked(), parts))
    assert numbers(again) == numbers(whole)
    assert [a.stats.tokens for a in again] == [a.stats.tokens for a in whole]
    keeps = not SYSTEMS[system].fixed_length or SYSTEMS[system].custom_cycle or SYSTEMS[system].history
    assert all(bool(p.state) == (keeps and len(p.token_ids) > 0) for p in parts.values())
    assert not any(a.state for a in again), "nothing more is needed of a finished answer"


@pytest.mark.slow
@pytest.mark.parametrize("name", FIRP_TREES)
def test_a_completion_is_the_same_alone_in_a_group_and_after_an_abort(name: str) -> None:
    """Groups share a prompt, and the firp tree some of whose nodes have no pseudo states has most to forget."""
    group = requests([SMALL_PROMPTS[2]] * 3 + SMALL_PROMPTS, max_new_tokens=20, temperature=1.2)
    policy = small_policy()
    together = generate(TorchEngine(policy, FIRP_TREES[name], slots=9, max_length=64), group)
    other = started(TorchEngine(policy, FIRP_TREES[name], slots=2, max_length=64), group[1:4])
    done = {f.id: f.completion for _ in range(3) for f in other.step()}
    stopped = aborted(other)
    done |= finished(started(other, resumed([r for r in group[1:4] if r.id not in done], stopped)))
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
    running = started(engine(policy, system, on_update=on_update), requests(PROMPTS[:3], max_new_tokens=30), 3)
    running.load_weights({n: p.detach().clone() for n, p in other.weights().items()}, version=1)
    for i, answer in finished(running).items():
        switch = int((answer.versions == 0).sum())
        assert 0 < switch < len(answer.token_ids) and (np.diff(answer.versions) >= 0).all()
        exact = full_logprobs(other, PROMPTS[i], answer, 1.0)[switch:]
        same = np.abs(exact - answer.logprobs[switch:]).max() < 1e-4
        assert same == (on_update == "recompute")  # old keys and values are kept otherwise


@pytest.mark.parametrize("temperature", slow_but([1.0], [0.0, 1.0]))
def test_another_system_takes_over_between_two_cycles(temperature: float) -> None:
    """Completions in progress go on: greedy ones remain Hugging Face's, sampled ones have the model's log-probs."""
    policy = policy_of("bebop")
    asked_for = requests(PROMPTS, temperature=temperature, max_new_tokens=24, stop_token_ids=(11,))
    one, done = started(engine(policy, drafts=2, room=4), asked_for), {}
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
            assert done[i].token_ids.tolist() == hugging_face()[i]
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
    """Greedy completions remain those of plain decoding, and drafters that are not in charge read on."""
    turns = TURNS[name]
    asked_for = requests(SMALL_PROMPTS, temperature=0.0, max_new_tokens=16)
    one, done = started(TorchEngine(small_policy(), turns[0], slots=4, max_length=64, room=5), asked_for), {}
    for cycle in range(60):
        one.configure(turns[cycle // 2 % 4])
        done |= {f.id: f.completion for f in one.step()}
    assert [done[i].token_ids.tolist() for i in range(len(SMALL_PROMPTS))] == tokens(plain(1.0))


# ---- ends and counts


@pytest.mark.parametrize("system", slow_but(QUICK, SYSTEMS))
def test_stop_strings_and_tokens_end_a_completion(system: str) -> None:
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

"""Rejected drafts, their continuations, and labels that recover planted pivots (SPEC 4.3, 4.7 D6)."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from tqdm import tqdm

from bebop.adaptation.candidates import (
    Candidate,
    Continuations,
    Ending,
    Search,
    find_candidates,
    layer_states,
    seeds_of,
    unsound,
)
from bebop.adaptation.corpus import sampling_params
from bebop.config.adapt import DataConfig
from bebop.config.fields import MAX_SEED
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pad.labels import Definition, Rollouts, auc, loss_of_value, split_of, successes
from bebop.systems.pad.network import PivotNetwork
from bebop.systems.pad.training import Examples, PivotTrainer, scores
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from tests.builders import bare_policy
from tests.cases import slow_but

pytestmark = pytest.mark.slow

POISON = 10  # a text with "k" in it fails: the planted pivot
# At temperature 2 other tokens change little of what comes after them, so that what is planted is all there is.
DATA = DataConfig(slots=64, max_length=32, sampling=SamplingConfig(max_new_tokens=6, temperature=2.0))
PROMPTS = [Prompt(index=i, task="", text="", token_ids=(i % 11, 3, i // 11), item={}) for i in range(40)]

DEFINITIONS: tuple[Definition, ...] = ("paper", "residual")


def reward(text: str, prompt: Prompt) -> float:
    return float("k" not in text)


def answers(policy: Policy, prompts: Sequence[Prompt] = PROMPTS) -> list[TokenRow]:
    engine = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=64, max_length=32)
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=i, token_ids=prompt.token_ids, params=sampling_params(policy, DATA.sampling, i)))
    done = {}
    while engine.unfinished:
        done |= {f.id: tuple(f.completion.token_ids.tolist()) for f in engine.step()}
    return [TokenRow(prompt=prompt.token_ids, answer=done[i]) for i, prompt in enumerate(prompts)]


def search(rollouts: int = 4, **fields: float) -> Search:
    settings = {"depth": 2, "places": 3, "p_min": 1e-3, "seed": 5, **fields}
    return Search(sampling=DATA.sampling, rollouts=rollouts, **settings)  # type: ignore[arg-type]


def continued(
    policy: Policy,
    rows: Sequence[TokenRow],
    found: Sequence[Candidate],
    rollouts: int,
    prompts: Sequence[Prompt] = PROMPTS,
) -> list[Rollouts]:
    one = Continuations(policy, DATA, reward, seed=5, rollouts=rollouts, success=1.0, judge=False)
    parts = one.run(prompts, rows, found, tqdm(disable=True))
    return [row for part in parts for row in part]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return bare_policy(seed=4)


@pytest.fixture(scope="module")
def rows(policy: Policy) -> list[TokenRow]:
    return answers(policy)


def test_candidates_are_drafts_that_would_be_rejected(policy: Policy, rows: list[TokenRow]) -> None:
    found = find_candidates(policy, rows, search())
    assert len(found) > 50 and found == find_candidates(policy, rows, search())
    assert len({(c.row, c.place, c.token) for c in found}) == len(found)
    for one in found:
        row = rows[one.row]
        assert len(row.prompt) <= one.place < len(row.token_ids) and one.token not in policy.eos_token_ids
        assert one.p < one.q and one.p >= 1e-3, "only a draft that is too likely can be rejected"
        ids = torch.tensor([row.token_ids[: one.place]])
        p = _probs(policy, ids)
        assert p[one.token] == pytest.approx(one.p, abs=1e-5)
        assert one.entropy == pytest.approx(float(torch.special.entr(p).sum()), abs=1e-4)
        assert len(one.recovered) == 4 and one.token not in one.recovered, "the residual has no mass there"
    places = {(c.row, c.place) for c in found}
    assert max(sum(row == i for row, _ in places) for i in range(len(rows))) == 3
    assert all(c.p >= 0.2 for c in find_candidates(policy, rows, search(p_min=0.2)))
    hot = find_candidates(policy, rows, search(draft_temperature=3.0))
    assert np.mean([c.q for c in hot]) < np.mean([c.q for c in found])


def _probs(policy: Policy, ids: torch.Tensor) -> torch.Tensor:
    from bebop.model.attention import CausalContext

    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
        return (policy.logits(hidden)[0, -1] / 2).softmax(-1)


def test_states_are_those_before_and_at_the_candidate(policy: Policy, rows: list[TokenRow]) -> None:
    texts = [row.token_ids for row in rows[:9]]
    both = layer_states(policy, texts, (1, 0), batch=4)
    states, single = both[:, 1], torch.cat([layer_states(policy, [text], (0,)) for text in texts])[:, 0]
    assert both.shape == (9, 2, 2, 32) and torch.allclose(states, single, atol=1e-5)
    assert not torch.allclose(both[:, 0], states)
    shorter = layer_states(policy, [text[:-1] for text in texts], (0,))[:, 0]
    assert torch.allclose(shorter[:, 1], states[:, 0], atol=1e-5) and not torch.allclose(states[:, 0], states[:, 1])


def alone(policy: Policy, prefix: tuple[int, ...], seeds: Sequence[int]) -> tuple[int, ...]:
    """The token that plain decoding draws after a prefix, for each seed."""
    plain = DecodingConfig(system="autoregressive", draft_tokens=0)
    engine = TorchEngine(policy, plain, slots=4, max_length=32)
    sampling = SamplingConfig(max_new_tokens=5, temperature=2.0)
    asked = [Request(id=i, token_ids=prefix, params=sampling_params(policy, sampling, s)) for i, s in enumerate(seeds)]
    return tuple(int(one.token_ids[0]) for one in generate(engine, asked))


def test_continuations_share_their_numbers_and_their_prefix(policy: Policy, rows: list[TokenRow]) -> None:
    """What is continued with the token that the target drew itself is what the prefix alone became."""
    one = Continuations(policy, DATA, reward, seed=5, rollouts=3, success=1.0, judge=False)
    prefix = rows[0].token_ids[:4]
    seeds = seeds_of(5, 0, 4, 3)
    drawn = alone(policy, prefix, seeds)
    wanted = [(0, prefix, s) for s in seeds] + [(0, (*prefix, token), s) for token, s in zip(drawn, seeds, strict=True)]
    endings = one._finish(PROMPTS, rows, wanted)
    assert endings[:3] == endings[3:] and len({e.text for e in endings}) > 1
    found = find_candidates(policy, rows, search())
    assert all(
        alone(policy, rows[c.row].token_ids[: c.place], seeds_of(5, c.row, c.place, 4)) == c.drawn for c in found[:20]
    )
    assert any(c.drawn != c.recovered for c in found[:20])
    labelled = continued(policy, rows, found, 4)
    assert [(r.prompt, len(r.prefix), r.token) for r in labelled] == [(c.row, c.place, c.token) for c in found]
    by_place: dict[tuple[int, int], set[str]] = {}
    for r in labelled:
        by_place.setdefault((r.prompt, len(r.prefix)), set()).add(r.reference)
    assert all(len(references) == 1 for references in by_place.values())


def test_a_question_that_is_asked_again_has_one_number(policy: Policy, rows: list[TokenRow]) -> None:
    """Splits go by it: under two numbers it would be trained on and tested on."""
    again = [rows[0], rows[1], rows[0]]
    found = find_candidates(policy, again, search(1, places=1))
    labelled = continued(policy, again, found, 1, [PROMPTS[0], PROMPTS[1], PROMPTS[0]])
    assert {c.row for c in found} == {0, 1, 2} and {r.prompt for r in labelled} == {0, 1}


def test_what_begins_alike_runs_once(policy: Policy, rows: list[TokenRow]) -> None:
    """Each distinct text and seed is continued once, and all who want it get it."""
    one = Continuations(policy, DATA, reward, seed=5, rollouts=3, success=1.0, judge=False)
    asked: list[Request] = []
    add = one.engine.add
    one.engine.add = lambda request: (asked.append(request), add(request))[1]  # type: ignore[method-assign]
    prefix = rows[0].token_ids[:4]
    wanted = [(0, (*prefix, token), seed) for token in (5, 7, 5) for seed in (1, 2)]
    endings = one._finish(PROMPTS, rows, wanted)
    assert len(asked) == 4 and endings[:2] == endings[4:] and endings[:2] != endings[2:4]


@pytest.mark.parametrize("rollouts", slow_but([16], [16, 64]))
def test_labels_recover_planted_pivots(policy: Policy, rows: list[TokenRow], rollouts: int) -> None:
    """D6: AUC > .95 with K = 64, and with 16 here; the noise of fewer continuations costs some of it."""
    clean = [row for row in rows if POISON not in row.answer]
    kept = [i for i, row in enumerate(rows) if row in clean]
    found = [c for c in find_candidates(policy, rows, search(rollouts, places=2)) if c.row in kept]
    labelled = continued(policy, rows, found, rollouts)
    planted = np.array([r.token == POISON for r in labelled])
    assert 10 < planted.sum() < 0.5 * len(planted)
    assert not successes([r.value for r in labelled])[planted].any()
    for definition in DEFINITIONS:
        found_at = {k: auc(loss_of_value(labelled, definition, 0, k), planted) for k in (1, 4, rollouts)}
        assert found_at[rollouts] > 0.95 > found_at[1] and found_at[1] < found_at[4] <= found_at[rollouts], found_at
    shuffled = np.random.default_rng(0).permutation(planted)
    assert auc(loss_of_value(labelled, "paper"), shuffled) < 0.7, "the test can fail"


@pytest.mark.slow
def test_a_classifier_of_these_labels_finds_planted_pivots_on_other_prompts(policy: Policy) -> None:
    """The whole path: answers, rejected drafts, continuations, labels, states, training; held out by prompt."""
    prompts = [Prompt(index=i, task="", text="", token_ids=(i % 11, 3, i // 11), item={}) for i in range(121)]
    rows = answers(policy, prompts)
    found = [c for c in find_candidates(policy, rows, search(16)) if POISON not in rows[c.row].token_ids[3 : c.place]]
    labelled = continued(policy, rows, found, 16, prompts)
    states = layer_states(policy, [(*row.prefix, row.token) for row in labelled], (0,))[:, 0]
    labels = loss_of_value(labelled, "residual") > 0.3
    planted = np.array([row.token == POISON for row in labelled])
    split = np.array([split_of(row.prompt, 0) for row in labelled])
    areas = {}
    for position, place in (("pred", 0), ("cand", 1)):
        examples = Examples(
            hidden=states[:, place],
            p=torch.tensor([row.p for row in labelled]),
            entropy=torch.tensor([row.entropy for row in labelled]),
            pivots=torch.from_numpy(labels).long(),
        )
        torch.manual_seed(0)
        network = PivotNetwork(size=32, layer=0, inner=16, middle=16, features="hidden")
        train, validation = (examples.of(split == name) for name in ("train", "validation"))
        trainer = PivotTrainer(network, train, validation, lr=3e-3, weight_decay=1e-2, seed=0)
        for _ in range(200):
            trainer.update(64)
        trainer.evaluate()
        test = split == "test"
        areas[position] = auc(scores(trainer.network, examples.of(test)), planted[test])
    assert areas["cand"] > 0.9, areas
    assert areas["pred"] < 0.8, "the state that predicts a candidate does not say which one it is: the test can fail"


def test_a_judge_looks_at_the_success_of_median_length() -> None:
    right, wrong = Ending(text="1+1=2; 2+2=4", success=True), Ending(text="1+1=2; 2+2=5", success=True)
    long, failed = Ending(text=right.text + ", then 4+1=5", success=True), Ending(text="1+1=3", success=False)
    assert unsound("1+1=2", [wrong]) and not unsound("1+1=2", [right, failed]) and not unsound("1+1=2", [])
    assert not unsound("1+1=3", [Ending(text="1+1=3; 3+1=4", success=True)]), "what was wrong before is not its fault"
    assert unsound("12+4=1", [Ending(text="12+4=17, then 7", success=True)]), "a digit that makes a step wrong"
    assert not unsound("12+4=1", [Ending(text="12+4=16", success=True)])
    assert unsound("least 3 left 2", [Ending(text="least 3 left 21; 8-4=5", success=True)])
    assert not unsound("least 9 left 3", [Ending(text="least 9 left 3 4", success=True)])
    unfinished = Ending(text="1+1=2; 12+4=1", success=True)
    assert unsound("1+1=2", [unfinished])
    assert not unsound("1+1=2", [dataclasses.replace(unfinished, cut=True)]), "16 may come"
    shorter = Ending(text="1+1=2", success=True)
    assert unsound("", [long, wrong, shorter]) and not unsound("", [long, right, shorter])


def test_seeds_of_the_second_labels_fit_where_the_first_are_the_largest() -> None:
    assert torch.tensor(seeds_of(MAX_SEED, 0, 10, 2)).tolist() == seeds_of(0, 0, 10, 2)


def test_a_continuation_ends_where_a_stop_string_does(policy: Policy, rows: list[TokenRow]) -> None:
    """Whether the text begins it, a candidate completes it, or it comes later."""
    read: list[str] = []

    def seen(text: str, prompt: Prompt) -> float:
        read.append(text)
        return 1.0

    row = next(i for i, row in enumerate(rows) if len(row.answer) > 2)
    text, at = rows[row], len(rows[row].prompt) + 1
    begun = policy.tokenizer.decode(text.token_ids[at - 1])
    others = [t for t in range(11) if t not in policy.eos_token_ids and t != POISON]
    stops = tuple(begun + policy.tokenizer.decode(token) for token in others)
    data = dataclasses.replace(DATA, sampling=dataclasses.replace(DATA.sampling, stop=stops))
    one = Continuations(policy, data, seen, seed=5, rollouts=4, success=1.0, judge=False)
    candidates = [
        Candidate(row=row, place=at, token=token, p=0.1, q=0.2, entropy=1.0, drawn=(others[0],) * 4,
                  recovered=(others[1],) * 4)
        for token in others[:3]
    ]  # fmt: skip
    list(one.run(PROMPTS, rows, candidates, tqdm(disable=True)))
    assert read and all(min(t.find(s) + len(s) for s in stops if s in t) == len(t) for t in read)

"""Prompts, completions and states of the study on a real model, on the built-in one."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bebop.adaptation.corpus import backbone_states
from bebop.errors import UserError
from recipes.reproduce.real import corpus, states
from recipes.reproduce.real.open_prompts import KINDS, open_questions
from recipes.reproduce.real.plan import Kind, Plan, load
from recipes.reproduce.real.prompts import make_prompts, split_of
from tests.recipes.reproduce.real_builders import PLAN, small_study


def files(folder: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / name).iterdir())}


# ---- prompts


def test_the_plan_keeps_what_the_study_promises() -> None:
    plan = Plan()
    assert sum(kind.count for kind in plan.kinds) >= 1500 and {kind.open for kind in plan.kinds} == {True, False}
    assert {kind.open for kind in plan.kinds if not kind.seen} == {True, False}, "unseen kinds of both sorts"
    every = (*plan.kinds, *plan.later)
    assert all(kind.open == (kind.name in KINDS) for kind in every) and len({kind.name for kind in every}) == len(every)


def test_splits_are_exact_and_whole_kinds_are_unseen() -> None:
    kind = Kind(name="story", count=200)
    splits = [split_of(kind, place, seed=0) for place in range(200)]
    assert {name: splits.count(name) for name in splits} == {"train": 160, "validation": 10, "test": 30}
    assert splits[:160].count("train") < 140, "not in the order in which questions are made"
    assert {split_of(dataclasses.replace(kind, seen=False), place, seed=0) for place in range(200)} == {"unseen"}


@pytest.mark.slow
def test_prompts_are_distinct_short_enough_and_the_same_for_a_seed() -> None:
    model = load(PLAN)
    prompts = make_prompts(PLAN, model)
    assert [prompt.number for prompt in prompts] == list(range(28)) and len({p.text for p in prompts}) == 28
    assert max(len(prompt.token_ids) for prompt in prompts) <= PLAN.max_prompt_tokens
    assert {p.kind for p in prompts if p.split == "unseen"} == {"lcm"}
    assert {p.kind for p in prompts[:10]} == {"chain_sum", "list", "lcm"}, "kinds are mixed"
    assert make_prompts(PLAN, model) == prompts != make_prompts(dataclasses.replace(PLAN, seed=1), model)
    short = dataclasses.replace(PLAN, max_prompt_tokens=10)
    with pytest.raises(UserError, match=r"chain_sum: only \d+ of 12 different questions take at most 10 tokens"):
        make_prompts(short, model)


@pytest.mark.slow
def test_a_corpus_grows_without_a_change_to_what_was_there() -> None:
    model = load(PLAN)
    grown = dataclasses.replace(PLAN, later=(Kind(name="diary", count=20, open=True),))
    prompts = make_prompts(grown, model)
    assert prompts[:28] == make_prompts(PLAN, model) and {p.kind for p in prompts[28:]} == {"diary"}
    assert [p.number for p in prompts] == list(range(48)) and grown.prompts == 48
    splits = [p.split for p in prompts[28:]]
    assert splits.count("train") == 16 and splits.count("validation") == 1 and splits != sorted(splits)
    mixed = dataclasses.replace(PLAN, kinds=(*PLAN.kinds, *grown.later))
    assert make_prompts(mixed, model)[:28] != prompts[:28], "kinds that are added to the others mix with them"


@pytest.mark.parametrize("kind", KINDS)
def test_open_questions_do_not_repeat_and_leave_no_place_empty(kind: str) -> None:
    some = open_questions(kind, 40, seed=0)
    assert len(set(some)) == 40 and open_questions(kind, 50, seed=0)[:40] == some != open_questions(kind, 40, seed=1)
    assert not any("{" in question for question in some)
    with pytest.raises(UserError, match=f"{kind}: 5000 questions are not possible, its templates and topics give"):
        open_questions(kind, 5000, seed=0)


# ---- completions


@pytest.mark.slow
def test_a_stopped_corpus_goes_on_and_comes_out_the_same(tmp_path: Path) -> None:
    model = load(PLAN)
    corpus.make_corpus(tmp_path, PLAN, model)
    whole = files(tmp_path, "corpus")
    assert sorted(whole) == ["plan.json", *(f"shard-000{i}.jsonl" for i in range(4))]
    kept = (tmp_path / "corpus" / "shard-0000.jsonl").stat().st_mtime_ns
    (tmp_path / "corpus" / "shard-0002.jsonl").unlink()
    (tmp_path / "corpus" / "shard-0002.new").write_text("half a sh")  # what a killed writer leaves
    with pytest.raises(UserError, match=r"shard-0002.jsonl is not there \(1 of 4 .* --stage corpus"):
        corpus.read_corpus(tmp_path, PLAN)
    corpus.make_corpus(tmp_path, PLAN, model)
    assert files(tmp_path, "corpus") == whole
    assert (tmp_path / "corpus" / "shard-0000.jsonl").stat().st_mtime_ns == kept, "what was there is not made again"
    tokens = sum(len(answer.answer) for answer in corpus.read_corpus(tmp_path, PLAN))
    assert corpus.corpus_size(tmp_path, PLAN) == {"answers": 28, "tokens": tokens}
    shares = tmp_path / "shares"  # of two processes
    corpus.make_corpus(shares, PLAN, model, share=(2, 2))
    assert sorted(files(shares, "corpus")) == ["plan.json", "shard-0001.jsonl", "shard-0003.jsonl"]
    assert corpus.corpus_size(shares, PLAN)["answers"] == 12
    corpus.make_corpus(shares, PLAN, model, share=(1, 2))
    assert files(shares, "corpus") == whole


@pytest.mark.slow
def test_completions_have_seeds_of_their_own_and_depend_on_them(tmp_path: Path) -> None:
    model = load(PLAN)
    prompts = make_prompts(PLAN, model)[:4]
    bar = corpus.tqdm(disable=True)
    first, again = (corpus.sample_shard(PLAN, model, prompts, bar) for _ in range(2))
    other = corpus.sample_shard(dataclasses.replace(PLAN, seed=3), model, prompts, bar)
    assert first == again and [a.answer for a in first] != [a.answer for a in other]
    assert [a.seed for a in first] == [0, 1, 2, 3] and [a.seed - (3 << 40) for a in other] == [0, 1, 2, 3]
    assert all(len(a.answer) == len(a.logprobs) <= 12 for a in first)
    same = [dataclasses.replace(prompts[0], number=n) for n in range(4)]
    assert len({a.answer for a in corpus.sample_shard(PLAN, model, same, bar)}) > 1
    path = tmp_path / "shard.jsonl"
    corpus.write_shard(path, first)
    assert [dataclasses.replace(a, logprobs=()) for a in corpus.read_shard(path)] == [
        dataclasses.replace(a, logprobs=()) for a in first
    ]


@pytest.mark.slow
def test_a_corpus_of_another_plan_is_refused(tmp_path: Path) -> None:
    corpus.make_corpus(tmp_path, PLAN)
    with pytest.raises(UserError, match=r"a corpus made with another max_new_tokens \(12, now 16\): remove it, or set"):
        corpus.make_corpus(tmp_path, dataclasses.replace(PLAN, max_new_tokens=16))


# ---- states


@pytest.mark.slow
def test_states_are_those_of_the_backbone_and_are_made_once(tmp_path: Path) -> None:
    model, text = small_study(tmp_path)
    some = [i for i in range(len(text.answers)) if i % 5 == 0]
    fresh = backbone_states(model, [text.answers[i].row for i in some])
    assert all(torch.allclose(text.states[i], one, atol=1e-4) for i, one in zip(some, fresh, strict=True))
    assert not torch.allclose(text.states[some[0]][1:], fresh[0][:-1], atol=1e-2), "the comparison can fail"
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "states").iterdir()}
    gone = tmp_path / "states" / "shard-0001.npy"
    gone.unlink()
    with pytest.raises(UserError, match=r"shard-0001.npy is not there \(1 of 4 .* --stage states"):
        states.read_text(tmp_path, PLAN)
    states.make_states(tmp_path, PLAN, model)
    assert gone.is_file()
    assert all(path.stat().st_mtime_ns == stamp for path, stamp in stamps.items() if path != gone)
    unseen = text.only("unseen")
    assert {a.kind for a in unseen.answers} == {"lcm"} and len(unseen.states) == 4
    assert all(len(s) == len(a.prompt) + len(a.answer) for a, s in zip(unseen.answers, unseen.states, strict=True))


@pytest.mark.slow
def test_states_are_not_read_into_memory(tmp_path: Path) -> None:
    _, text = small_study(tmp_path)
    mapped = Path("/proc/self/maps").read_text()
    assert text.states and all(f"{tmp_path}/states/shard-000{i}.npy" in mapped for i in range(4))


@pytest.mark.slow
def test_completions_of_another_model_are_noticed(tmp_path: Path) -> None:
    model, _ = small_study(tmp_path)
    path = tmp_path / "corpus" / "shard-0001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["logprobs"] = [value - 0.1 for value in row["logprobs"]]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "states" / "shard-0001.npy").unlink()
    with pytest.raises(UserError, match=r"shard-0001.jsonl: log p of answer \d+ differs by 0.100 nats"):
        states.make_states(tmp_path, PLAN, model)


@pytest.mark.slow
def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    small_study(tmp_path)
    path = tmp_path / "states" / "shard-0003.npy"
    np.save(path, np.load(path)[:-1])
    with pytest.raises(UserError, match=r"shard-0003.npy holds \d+ states, its answers \d+ tokens: remove it"):
        states.read_text(tmp_path, PLAN)

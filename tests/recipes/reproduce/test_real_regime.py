"""The study at the paper's entropies: what it computes, that a stopped one goes on, and its form for a GPU."""

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.bench.record import ROOT
from bebop.errors import UserError
from bebop.model.backbone import Policy
from recipes.reproduce import record
from recipes.reproduce.real.prompts import RealPrompt
from recipes.reproduce.real_regime import __main__ as study
from recipes.reproduce.real_regime import analysis, evaluation, gpu, plan, rollouts
from recipes.reproduce.real_regime.evaluation import Archive, Look
from recipes.reproduce.real_regime.findings import FORMS, RULES
from recipes.reproduce.real_regime.sitting import (
    PROGRESS,
    carried_out,
    looks_path,
    newest_looks,
    sample_ahead,
    train_share,
)
from recipes.reproduce.real_regime.training import head_path
from recipes.reproduce.verdicts import judge
from tests.recipes.reproduce.synthetic import check_names

KINDS = ("story", "code", "list")
LACKING = (  # on a machine that is lent for its GPU
    "hydra", "omegaconf", "ray", "datasets", "math_verify", "reasoning_gym", "plotly", "grimp", "psutil",
    "tenacity", "peft",
)  # fmt: skip


def columns(prompts: int = 30, lift: float = 0.0, seed: int = 0, entropy: float = 0.3) -> dict[str, np.ndarray]:
    """A look whose acceptance falls by .4 per nat of the target's entropy, greedy drafts .05 lower."""
    world, own = np.random.default_rng(3), np.random.default_rng([4, seed])
    row = np.repeat(np.arange(prompts), 4)
    nats = np.clip(entropy + 0.1 * world.normal(size=(len(row), 5)) + 0.05 * (row % 7)[:, None] / 7, 0.01, None)
    overlap = np.clip(0.85 - 0.4 * nats + lift + 0.002 * own.normal(size=nats.shape), 0.01, 0.99)
    before = np.concatenate([np.ones((len(row), 1)), overlap[:, :-1]], 1).cumprod(1)
    return {
        "row": row, "place": np.zeros(len(row), int), "task": np.array(KINDS)[row % len(KINDS)],
        "overlap": overlap, "target_only": overlap - 0.05, "target_entropy": nats, "draft_entropy": nats,
        "reached": before, "reached_greedy": before,
    }  # fmt: skip


def written(folder: Path, tokens: int = 1000, lift: float = 0.03, entropy: float = 0.0) -> Path:
    """The files of a whole run, with end-to-end TV ahead by ``lift`` of overlap."""
    looks = Archive(looks_path(folder, 7))
    for one in evaluation.wanted():
        name, _, seed = one.head.partition("-")
        gain = {"e2e_tv": lift, "tv": lift / 2, "rkl": lift / 4}.get(name, 0.0)
        nats = (entropy or one.temperature * 0.9) - 0.05
        looks.add(one.name, columns(lift=gain, seed=int(seed or 9), entropy=nats))
    (folder / PROGRESS).write_text(json.dumps({"planned tokens": 1000, "place": {}, "rows": [{"tokens": tokens}]}))
    return looks.path


def test_the_accept_length_is_that_of_three_drafts_whatever_the_depth() -> None:
    found = {
        "row": np.zeros(1, int), "place": np.zeros(1, int), "task": np.array(["story"]),
        "overlap": np.array([[0.5, 0.25, 0.5, 1, 1]]), "target_only": np.array([[0.5, 0.5, 0.25, 1, 1]]),
        "reached": np.array([[1, 0.5, 0.25, 1, 1]]), "reached_greedy": np.array([[1.0, 1, 0, 1, 1]]),
        "target_entropy": np.array([[0.1, 0.2, 0.6, 9, 9]]), "draft_entropy": np.zeros((1, 5)),
    }  # fmt: skip
    chain = evaluation.chains(found)
    assert chain.accept[0] == 1 + 0.5 + 0.125 + 0.125 and chain.accept_greedy[0] == 2.0
    assert chain.numbers["target_entropy"].tolist() == [[pytest.approx(0.3)]]


def test_an_archive_goes_on_where_it_was(tmp_path: Path) -> None:
    Archive(tmp_path / "looks.zip").add("a", columns())
    again = Archive(tmp_path / "looks.zip")
    again.add("b", columns(seed=1))
    found = Archive(tmp_path / "looks.zip")
    assert "a" in found and "b" in found
    assert np.array_equal(found.columns("a")["overlap"], columns()["overlap"])


@pytest.mark.slow
def test_planted_numbers_are_found_and_the_rules_ask_for_nothing_else(tmp_path: Path) -> None:
    found = analysis.read(written(tmp_path))
    told = [analysis.measure(form, found) for form in FORMS]
    numbers, facts = told[0].numbers | told[1].numbers, told[0].facts | told[1].facts
    check_names("real_regime", [*numbers, *facts])
    assert numbers["cpu, entropy"].value == pytest.approx(0.33, abs=0.02)
    assert 0.03 < numbers["cpu, e2e_tv - ce, acceptance"].value < 0.06
    assert numbers["cpu, ce, kinds"].value == 1.0
    # 1 + a + a^2 + a^3 with a = .85 - .4 h falls by .4 (1 + 2 a + 3 a^2), some 1.6 at .33 nats.
    assert -1.75 < numbers["cpu, ce, sampled, slope over temperatures"].value < -1.5
    sides = {one.statement: one for one in judge(RULES, numbers, facts) if "on a CPU" in one.statement}
    gains = next(one for name, one in sides.items() if "three drafts of end-to-end TV" in name)
    assert gains.untested is None and gains.side == "confirmed" and gains.p < 0.05
    assert next(one for name, one in sides.items() if "moves by less" in name).side == "refuted"
    for of in analysis.TABLES.values():
        assert of(found)


@pytest.mark.slow
def test_nothing_is_tested_outside_the_range_and_part_of_a_run_says_so(tmp_path: Path) -> None:
    found = analysis.read(written(tmp_path, tokens=400, entropy=0.9))
    told = analysis.measure("cpu", found)
    assert "400 of 1,000 tokens, fewer than planned" in str(told.facts["cpu, trained on"])
    assert all(one.untested for one in judge(RULES, told.numbers, told.facts))


def run(folder: Path, module: str, *arguments: str, lacking: tuple[str, ...] = ()) -> str:
    """A command in a process of its own; what it wrote."""
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({lacking!r})); "
        f"sys.argv = ['x', *{list(arguments)!r}]; sys.orig_argv = list(sys.argv); "
        f"runpy.run_module({module!r}, run_name='__main__')"
    )
    paths = {"BEBOP_REPRODUCE": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_stored_rollouts_are_those_that_were_sampled(tmp_path: Path) -> None:
    form = plan.tiny(plan.CPU)
    prompts = [RealPrompt(number=i, kind="story", split="train", text="", token_ids=(1, 2 + i)) for i in range(5)]
    shards = [
        [
            rollouts._of(prompt, seed, "stop" if seed % 2 else "length", range(seed % 7 + shard))
            for prompt, seed, _ in rollouts.train_requests(form, prompts, shard, plan.TRAINED_AT)
        ]
        for shard in range(2)
    ]
    path = tmp_path / "stored.npz"
    rollouts.pack(form, shards, path)
    assert [rollouts.stored(form, prompts, shard, path) for shard in range(3)] == [*shards, None]
    assert rollouts.stored(replace(form, slots=3), prompts, 0, path) is None, "they are of one form"
    with np.load(rollouts.STORED) as kept:
        assert str(kept["form"]) == repr(plan.CPU), "else what is stored is sampled again"
        assert len(kept["lengths"]) % plan.CPU.shard == 0 and kept["lengths"].sum() == len(kept["tokens"])


@pytest.mark.slow
def test_a_study_in_sittings_comes_out_as_one_that_was_not_stopped(tmp_path: Path) -> None:
    """In a process of its own, as a sitting is: after all other tests, in their process, a weight once differed."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as own:
        own.submit(check_sittings, tmp_path).result()


def check_sittings(tmp_path: Path) -> None:
    """Two short sittings and a long one give the heads of one sitting, to the bit."""
    torch.set_num_threads(1)
    form = plan.tiny(plan.CPU)
    model = plan.load(form)
    prompts = rollouts.kept_prompts(form, tmp_path, model)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    for _ in range(2):  # the shared head's shard, and the first of the others
        carried_out(form, model, prompts, parts, 1)
        assert analysis.trained_on(analysis.read(newest(parts))).endswith("fewer than planned")
    for place in (parts, whole):
        carried_out(form, model, prompts, place, None)
        assert "fewer" not in analysis.trained_on(analysis.read(newest(place)))
    heads = {}
    for name in ("shared", *(one.name for one in plan.RUNS)):
        stopped, heads[name] = (torch.load(head_path(place, name), weights_only=True) for place in (parts, whole))
        assert stopped["shards"] == heads[name]["shards"] and (name == "shared" or stopped["shards"] == 3)
        assert all(torch.equal(stopped["weights"][key], value) for key, value in heads[name]["weights"].items())
    check_shares(form, model, prompts, tmp_path / "shares", heads)
    ce, tv, other = (heads[name]["weights"]["project.weight"] for name in ("ce-0", "tv-0", "ce-1"))
    assert not torch.allclose(ce, tv, atol=1e-6)
    assert not torch.equal(ce, other), "a seed is an order"


def check_shares(
    form: plan.Form, model: Policy, prompts: list[RealPrompt], place: Path, heads: Mapping[str, Any]
) -> None:
    """Rollouts that are sampled ahead and heads that are trained in two shares are those of one sitting."""
    assert sample_ahead(form, model, prompts, place, None) == 3 and not (place / "heads").exists()
    for i in range(2):
        assert train_share(form, model, prompts, place, None, (i, 2)) == 3 and newest_looks(place) is None
    carried_out(form, model, prompts, place, None)
    for name, one in heads.items():
        shared = torch.load(head_path(place, name), weights_only=True)
        assert shared["shards"] == one["shards"]
        assert all(torch.equal(shared["weights"][key], value) for key, value in one["weights"].items())


def newest(place: Path) -> Path:
    """The looks of the newest sitting."""
    found = newest_looks(place)
    assert found is not None
    return found


@pytest.mark.slow
def test_a_smoke_run_leaves_a_result_with_all_tables(tmp_path: Path) -> None:
    run(tmp_path, "recipes.reproduce.real_regime", "--quick")
    content = record.read(tmp_path / "real_regime" / "results.json")
    assert content is not None and len(content["tables"]) == len(analysis.TABLES)


@pytest.mark.slow
def test_the_gpu_form_runs_without_what_such_a_machine_lacks(tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    run(tmp_path, "recipes.reproduce.real_regime", "--quick", "--write-prompts", str(file))
    arguments = ("--dry-run", "--prompts", str(file), "--out", str(out))
    run(tmp_path, "recipes.reproduce.real_regime.gpu", *arguments, lacking=LACKING)
    assert len([*out.iterdir()]) == 2, "such a machine returns few files"
    told = run(tmp_path, "recipes.reproduce.real_regime", "--quick", "--gpu-results", str(out))
    assert told.startswith("gpu: heads trained on ")


def test_bad_input_is_one_line_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--prompts is missing"):
        gpu.main(["--out", str(tmp_path / "out")])
    with pytest.raises(UserError, match=r"none\.jsonl is not there"):
        gpu.main(["--dry-run", "--prompts", str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out")])
    (tmp_path / "bad.jsonl").write_text('{"number": 1}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1 is no prompt: it needs number, kind, split, token_ids"):
        rollouts.read_prompts(tmp_path / "bad.jsonl")
    with pytest.raises(UserError, match=r"there is no looks-\*\.zip with progress\.json"):
        study.main(["--gpu-results", str(tmp_path)])
    assert not (tmp_path / "out").exists()


def test_looks_and_runs_have_names_of_their_own() -> None:
    names = [one.name for one in evaluation.wanted()]
    assert len(set(names)) == len(names)
    assert Look(head="tv-1", temperature=plan.TRAINED_AT, split="test").name in names
    assert {run.objective for run in plan.RUNS} == {"ce", "rkl", "tv", "e2e_tv"}
    assert min(plan.SEEDS.values()) >= 2, "intervals over seeds need two"

"""Heads of the study on a real model, on the built-in one: plans, starts, losses, the flat curve, stopping, looking."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from bebop.adaptation.probe import probe
from bebop.errors import UserError
from bebop.kernels.losses import tv_loss
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.trainer.objectives import OBJECTIVES, Sampling, Steps
from recipes.reproduce.real import built_in, evaluation, fused, starts
from recipes.reproduce.real.__main__ import arguments, chosen
from recipes.reproduce.real.curve import Validation, best, flat, rise
from recipes.reproduce.real.heads import BEST, DONE, Training, done
from recipes.reproduce.real.objectives import CHUNK, COMPARED, TOP_K_LOSSES, top_k_mean
from recipes.reproduce.real.runs import CONVERGED, LAST, SHARED, HeadRun, all_runs
from recipes.reproduce.real.states import Text
from recipes.reproduce.real_losses.findings import CUT
from recipes.reproduce.real_losses.findings import MARKS as RULED
from recipes.reproduce.top_k.losses import top_k_tv
from tests.recipes.reproduce.real_builders import PLAN, head_run, small_study

Study = tuple[Policy, Text, Path]


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    place = tmp_path_factory.mktemp("real")
    return *small_study(place), place


# ---- starts


def overlap(model: Policy, text: Text, start: str) -> list[float]:
    policy = dataclasses.replace(model, mtp=MTPHead(model.backbone))
    starts.STARTS[start](policy, [answer.row for answer in text.answers[:20]])
    held_out = text.at(range(20, len(text.answers)))
    found = probe(policy, [a.row for a in held_out.answers], 2, Sampling(), states=held_out.states)
    return list(np.nanmean(found.numbers["overlap"], 0))


@pytest.mark.slow
def test_a_fitted_projection_drafts_better_than_a_copy(study: Study) -> None:
    model, text, _ = study
    found = {start: overlap(model, text, start) for start in starts.STARTS}
    assert all(found["fitted"][k] > 1.3 * found[name][k] for name in ("last", "passing") for k in (0, 1)), found


def test_least_squares_finds_a_linear_map() -> None:
    torch.manual_seed(0)
    inputs, true = torch.randn(400, 6), torch.randn(3, 6)
    assert torch.allclose(starts.least_squares(inputs, inputs @ true.T), true, atol=5e-3)
    narrow = inputs.clone()
    narrow[:, 4:] = 0  # directions that the text does not have
    assert starts.least_squares(narrow, inputs @ true.T)[:, 4:].abs().max() < 1e-6


@pytest.mark.slow
def test_a_start_is_worked_out_once_for_all_runs(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    first = Training(head_run(), tmp_path, model, text).trainer.weights()
    stamp = (tmp_path / "starts" / "fitted.safetensors").stat().st_mtime_ns
    second = Training(head_run("two", seed=1, objective="tv"), tmp_path, model, text).trainer.weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert (tmp_path / "starts" / "fitted.safetensors").stat().st_mtime_ns == stamp
    copied = Training(head_run("three", start="last"), tmp_path, model, text).trainer.weights()
    assert not torch.equal(first["project.weight"], copied["project.weight"])


# ---- losses


def steps(vocab: int = 40) -> Steps:
    torch.manual_seed(1)
    shape = (2, CHUNK // 2, 3)
    draft, target = torch.randn(*shape, 8), torch.randn(*shape, 8)
    return Steps(
        draft=draft.requires_grad_(), target=target, weight=torch.randn(vocab, 8), tokens=torch.zeros(shape).long(),
        mask=torch.rand(shape) < 0.8, sampling=Sampling(),
    )  # fmt: skip


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, of)
    return found


@pytest.mark.parametrize("mode", ["full", "renormalised"])
def test_top_k_in_chunks_is_top_k_at_once(mode: str) -> None:
    one, two = steps(), steps()
    logits = two.draft[two.mask] @ two.weight.T, two.target[two.mask] @ two.weight.T
    by_hand, loss = top_k_tv(*logits, 5, mode).mean(), top_k_mean(one, 5, mode)
    assert len(logits[0]) > 2 * CHUNK and loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert torch.allclose(gradient(loss, one.draft), gradient(by_hand, two.draft), atol=1e-7)
    assert top_k_mean(steps(), 40, mode).item() == pytest.approx(tv_loss(*logits).loss.mean().item(), rel=1e-5)


# ---- the curve


def curve(*lengths: float, every: int = 50) -> list[Validation]:
    return [
        Validation(step=every * i, seconds=float(i), length=length, loss=1.0, overlaps=())
        for i, length in enumerate(lengths)
    ]


def test_a_curve_is_flat_once_its_smoothed_best_rises_no_more() -> None:
    climbing = curve(*(1.2 + 0.01 * i for i in range(20)))
    assert rise(climbing, 300) == pytest.approx(0.06) and not flat(climbing, 300, 0.005)
    level = curve(*(1.5 - 0.5 / (1 + i) ** 2 for i in range(20)))
    assert flat(level, 300, 0.005) and not flat(level[:8], 300, 0.005)
    assert not flat(curve(1.0, 1.0, 1.0), 300, 0.005), "too short to tell"
    noise = np.random.default_rng(0).normal(0, 0.003, 40)
    assert flat(curve(*(1.5 + noise)), 300, 0.005)
    assert flat(curve(1.2, 1.5, 1.45, 1.4, 1.35, 1.3, 1.25, 1.2, 1.15, 1.1), 300, 0.005), "one that falls, too"
    assert math.isinf(rise([], 300))


def test_one_lucky_look_is_no_rise_of_its_own_size() -> None:
    lucky = curve(*[1.5] * 12, 1.512, *[1.5] * 5)
    assert rise(lucky, 300) == pytest.approx(0.004) and best(lucky).length == 1.512


def test_what_a_rate_began_with_is_not_what_it_leads_to() -> None:
    falling = curve(1.9, 1.5, 1.6, 1.7, 1.65, 1.64)
    steps = [one.step for one in falling]
    assert best(falling).length == 1.7 and best(falling, steps[3]).length == 1.65
    assert best(falling, steps[-1]) is falling[-1], "while nothing follows the last drop, what it began with"
    assert best(falling[:1]) is falling[0]


# ---- training


class Stopped(Training):
    """A run that is killed before a step."""

    at = 5

    def _rows(self):  # type: ignore[no-untyped-def]
        if self.trainer.version == self.at:
            raise KeyboardInterrupt
        return super()._rows()


def validations(place: Path, run: HeadRun) -> list[tuple[float, ...]]:
    stored = json.loads((run.folder(place) / "curve.json").read_text())["validations"]
    return [(one["step"], one["length"], *one["overlaps"]) for one in stored]


@pytest.mark.slow
def test_a_stopped_run_goes_on_and_comes_out_the_same(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    run = head_run(drops=2)  # the rate falls after steps 2 and 4
    told = Training(run, tmp_path / "whole", model, text).fit()
    with pytest.raises(KeyboardInterrupt):
        Stopped(run, tmp_path / "stopped", model, text).fit()
    assert not done(run, tmp_path / "stopped") and done(run, tmp_path / "whole")
    again = Training(run, tmp_path / "stopped", model, text)
    assert again.trainer.version == 4 and len(again.curve) == 3
    assert {**again.fit(), "seconds": 0} == {**told, "seconds": 0} and told["steps"] == 6
    assert validations(tmp_path / "stopped", run) == validations(tmp_path / "whole", run)
    assert not (run.folder(tmp_path / "stopped") / "checkpoints").exists(), "what has ended needs none"
    for name in (BEST, "step-00003.safetensors"):
        one, two = (load_file(run.folder(tmp_path / place) / name) for place in ("whole", "stopped"))
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_a_flat_curve_lowers_the_rate_and_then_ends_the_run(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    training = Training(head_run(most_steps=40), tmp_path, model, text)
    told = training.fit()
    assert told["ended"] == "flat" and told["flat"] and told["steps"] == 4, (
        "a rise of 1 token is asked for, each 2 steps"
    )
    assert training.trainer.config.lr == pytest.approx(0.25e-3)
    short = Training(head_run("short", rise=-1.0, most_steps=3), tmp_path, model, text).fit()
    assert short["ended"] == "steps" and not short["flat"] and short["steps"] == 3


@pytest.mark.slow
def test_training_raises_the_accept_length_and_the_best_head_is_kept(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    run = head_run(start="last", rise=-1.0, most_steps=24, drops=0, marks=(), lr=3e-3)
    training = Training(run, tmp_path, model, text)
    told = training.fit()
    assert told["best length"] > training.curve[0].length + 0.1
    kept = load_file(run.folder(tmp_path) / BEST)
    assert all(torch.equal(kept[name], tensor) for name, tensor in training.kept.items())
    assert sum(training.curve[-1].overlaps) > sum(training.curve[0].overlaps)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["ce", "e2e_tv", "e2e_tv_corrected", "top_4"])
def test_products_in_bfloat16_give_nearly_the_loss_and_keep_fp32_weights(
    study: Study, tmp_path: Path, objective: str
) -> None:
    model, text, _ = study
    losses = []
    for mixed in (False, True):
        training = Training(head_run(f"{mixed}", mixed=mixed, objective=objective), tmp_path, model, text)
        rows, hidden = training._rows()
        losses.append(training.trainer.update(rows, COMPARED[objective], hidden, 2)["head/loss"])
        assert all(weight.dtype == torch.float32 for weight in training.trainer.backend.named.values())
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0] != losses[1]


@pytest.mark.slow
def test_a_head_that_was_better_before_is_the_one_that_counts(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    run = head_run(rise=-1.0, most_steps=4, drops=0, lr=0.1, marks=(2, 4), second_marks=(1e-6,))
    training = Training(run, tmp_path, model, text)
    began = training.trainer.weights()
    assert training.fit()["best step"] == 2 and training.curve[-1].length < training.curve[1].length - 0.1
    assert training.curve[1].length < training.curve[0].length, "what it began with was better, and does not count"
    names = (BEST, "step-00002.safetensors", "step-00004.safetensors", "second-00000.safetensors")
    kept, second, last, first = (load_file(run.folder(tmp_path) / name) for name in names)
    assert all(torch.equal(kept[name], second[name]) for name in kept)
    assert all(not torch.equal(other["project.weight"], kept["project.weight"]) for other in (began, last, first))


@pytest.mark.slow
def test_a_run_goes_on_from_the_best_head_of_another(study: Study, tmp_path: Path) -> None:
    model, text, _ = study
    follower = head_run("next", start="one", objective="tv")
    with pytest.raises(UserError, match=r"best.safetensors is not there: train the head 'one' first"):
        Training(follower, tmp_path, model, text)
    Training(head_run(), tmp_path, model, text).fit()
    begun, kept = Training(follower, tmp_path, model, text), load_file(head_run().folder(tmp_path) / BEST)
    assert all(torch.equal(weight, kept[name]) for name, weight in begun.trainer.weights().items())
    with pytest.raises(UserError, match=r"a head made with another lr \(0.001, now 0.5\)"):
        Training(dataclasses.replace(follower, lr=0.5), tmp_path, model, text)


# ---- evaluation and command


@pytest.mark.slow
def test_held_out_chains_are_looked_at_once_by_split(
    study: Study, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "EVERY", 2)  # completions are of some tokens here
    model, text, _ = study
    run = head_run(depth=3)
    Training(run, tmp_path, model, text).fit()
    drafting = dataclasses.replace(model, mtp=MTPHead(model.backbone))
    lines = evaluation.evaluate([run], tmp_path, drafting, text)
    plain = [line for line in lines if line["temperature"] == 1 and line["top_p"] == 1 and line["at"] == "best"]
    assert [line["split"] for line in plain] == ["test", "unseen"] and {line["at"] for line in lines} == {
        "best",
        "step-00003",
    }
    assert {line["temperature"] for line in lines} == set(evaluation.TEMPERATURES)
    asked = evaluation.Evaluated(head="one", file=BEST, sampling=Sampling(), split="unseen")
    found = evaluation.read_chains(asked.path(tmp_path))
    assert set(found.task) == {"lcm"}
    evaluation.load_head(drafting, run.folder(tmp_path) / BEST, "one")
    part = text.only("unseen")
    again = probe(drafting, [a.row for a in part.answers], 3, Sampling(), every=evaluation.EVERY)
    assert np.allclose(found.numbers["overlap"], again.numbers["overlap"], atol=1e-4, equal_nan=True)
    assert plain[1]["overlap 1"]["value"] == pytest.approx(np.nanmean(again.numbers["overlap"][:, 0]), abs=1e-4)
    stamp = asked.path(tmp_path).stat().st_mtime_ns
    assert evaluation.evaluate([run], tmp_path, drafting, text) == lines
    assert asked.path(tmp_path).stat().st_mtime_ns == stamp
    with pytest.raises(UserError, match="holds no head that has ended"):
        evaluation.evaluate([head_run("other")], tmp_path, drafting, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--stage", "training"], "invalid choice: 'training'"),
        (["--share", "3/2"], "'3/2' is not possible: give two numbers such as 1/2"),
        (["--head", "x", "--what"], "unrecognized arguments"),
    ],
)
def test_a_wrong_argument_is_one_line(given: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments(given)


def test_heads_are_chosen_by_name_and_shared_out() -> None:
    runs = all_runs()
    assert [run.name for run in chosen(runs, ["shared", "tv-*"])] == ["shared", *(f"tv-{seed}" for seed in range(6))]
    with pytest.raises(UserError, match=r"--heads 'tvv' is not possible: there are shared, "):
        chosen(runs, ["tvv"])
    assert arguments(["--share", "2/3"]).share == (2, 3) and arguments([]).stage == [
        "corpus", "states", "fused", "heads", "evaluation", "claims",
    ]  # fmt: skip
    assert PLAN.model == "tiny"


# ---- the plan


def test_every_loss_is_compared_by_three_seeds_from_one_head_and_those_that_converge_by_six() -> None:
    named = {"hard_ce", "ce", "tv", "e2e_tv", "e2e_tv_corrected", "nla", "hybrid", *TOP_K_LOSSES}
    assert {*named, "kl"} <= set(COMPARED) and all(
        COMPARED[name] is OBJECTIVES[name] for name in named & set(OBJECTIVES)
    )
    runs = all_runs()
    assert runs[0].name == SHARED and runs[0].objective == "ce" and runs[0].depth == 5
    seeds = {name: {r.seed for r in runs if r.objective == name and r.start == SHARED} for name in named}
    assert seeds == {name: set(range(6 if name in CONVERGED else 3)) for name in named}
    assert len({run.name for run in runs}) == len(runs)


def test_what_claims_need_most_comes_first_and_reaches_every_mark() -> None:
    runs = all_runs()[1:]
    assert [run.name for run in runs[:8]] == [f"{name}-{seed}" for seed in (0, 1) for name in CONVERGED]
    for run in runs:
        assert run.marks == (100, LAST) and set(run.marks) <= set(range(0, LAST + 1, run.validate_every))
        soonest = run.patience * (run.drops + 1)  # a curve that is flat from its beginning
        assert min(soonest, run.most_steps) >= LAST and run.most_steps <= 1600
        long = run.objective in CONVERGED and run.start == SHARED
        assert (soonest <= run.most_steps) == long, "what is compared at marks alone never counts as flat"


def test_marks_are_those_that_the_rules_ask_for() -> None:
    named = (
        [f"step {step}" for step in all_runs()[1].marks],
        [f"second {mark:.0f}" for mark in all_runs()[1].second_marks],
    )
    assert [list(marks) for marks in RULED.values()] == list(named) and set(CUT) == set(TOP_K_LOSSES)


def test_only_best_heads_of_some_losses_are_swept(tmp_path: Path) -> None:
    def looks(name: str, objective: str) -> list[tuple[str, float, str]]:
        run = head_run(name, objective=objective)
        for file in (BEST, "step-00100.safetensors", f"step-{LAST:05d}.safetensors"):
            run.folder(tmp_path).mkdir(parents=True, exist_ok=True)
            (run.folder(tmp_path) / file).touch()
        return [(Path(e.file).stem, e.sampling.temperature, e.split) for e in evaluation.wanted(run, tmp_path)]

    best = [("best", 1.0, "test"), ("best", 1.0, "unseen")]
    first, last = (f"step-{step:05d}" for step in (100, LAST))
    assert looks("nla-0", "nla") == looks("kl-0", "kl") == [*best, (last, 1.0, "test")], (
        "compared at the last mark alone"
    )
    assert looks("fresh-ce-0", "ce") == [*best, (first, 1.0, "test"), (last, 1.0, "test")]
    for name, marks in (("ce-0", 2), (SHARED, 0)):
        swept = looks(name, "ce")
        assert len(swept) == len(best) + marks + 6 and {t for _, t, _ in swept} == set(evaluation.TEMPERATURES)
        assert [one for one in swept if one[2] == "unseen"] == best[1:]


# ---- the head that Bebop brings


def test_the_best_head_that_has_ended_is_brought_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(built_in, "HERE", tmp_path)
    monkeypatch.setattr(built_in, "HEAD", tmp_path / "head.safetensors")
    with pytest.raises(UserError, match=r"no head of e2e_tv in .* has ended: run first python -m"):
        built_in.main([])
    heads = {"e2e_tv-0": 1.4, "e2e_tv-1": 1.6, "e2e_tv-2": 1.5, "tv-0": 1.9, "fresh-e2e_tv-0": 1.8}
    for place, (name, length) in enumerate(heads.items()):
        folder = tmp_path / "heads" / name
        folder.mkdir(parents=True)
        save_file({"project.weight": torch.full((2, 3), place + 1 / 3)}, folder / BEST)
        (folder / DONE).write_text(json.dumps({"best length": length}))
    built_in.main([])
    assert "e2e_tv-1, accept length 1.600" in capsys.readouterr().out
    (weight,) = load_file(tmp_path / "head.safetensors").values()
    assert torch.equal(weight, torch.full((2, 3), 1 + 1 / 3).half())
    with safe_open(tmp_path / "head.safetensors", framework="pt") as opened:
        assert opened.metadata()["head"] == "e2e_tv-1"


# ---- losses by plain autograd and by the kernels


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return fused.example(*small_study(tmp_path_factory.mktemp("fused")))


@pytest.mark.parametrize("name", fused.EAGER)
@pytest.mark.slow
def test_both_arms_compute_the_same(example: Steps, name: str) -> None:
    assert not example.mask.all() and example.mask.sum(-1).max() == fused.DEPTH, "chains of different lengths"
    (one,) = torch.autograd.grad(value := OBJECTIVES[name].loss(example), example.draft)
    (two,) = torch.autograd.grad(other := fused.EAGER[name](example), example.draft)
    assert value.item() == pytest.approx(other.item(), rel=1e-5) and torch.allclose(one, two, atol=1e-7)
    assert one.abs().max() > 1e-5


@pytest.mark.slow
def test_memory_is_what_is_held_at_the_highest(example: Steps) -> None:
    def holding(count: int) -> fused.Loss:
        return lambda some: (torch.ones(count << 18).sum() * 0 + some.draft.sum()) * 0

    found = [fused.held(holding(count), example) for count in (300, 60, 300)]
    assert 300 <= found[0] == found[2] < 301 and 60 <= found[1] < 61, found


@pytest.mark.slow
def test_a_line_for_each_loss_and_arm(tmp_path: Path) -> None:
    lines = fused.compare_losses(tmp_path, *small_study(tmp_path))
    assert [(line["loss"], line["arm"]) for line in lines] == [(n, a) for n in fused.EAGER for a in ("fused", "eager")]
    assert all(line["CPU seconds"] > 0 and line["vocabulary"] == 512 for line in lines)

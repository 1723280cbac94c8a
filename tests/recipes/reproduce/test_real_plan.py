"""Which heads of the study on a real model are trained, for how long, and which of them are looked at how."""

from pathlib import Path

from bebop.trainer.objectives import OBJECTIVES
from recipes.reproduce.real import evaluation
from recipes.reproduce.real.heads import BEST
from recipes.reproduce.real.objectives import COMPARED, TOP_K_LOSSES
from recipes.reproduce.real.runs import CONVERGED, LAST, SHARED, all_runs
from recipes.reproduce.real_losses.findings import CUT
from recipes.reproduce.real_losses.findings import MARKS as RULED
from tests.recipes.reproduce.real_builders import head_run


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

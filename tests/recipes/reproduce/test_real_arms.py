"""Arms from files of the evaluation: which heads are in them, what is left out, and how two of them are paired."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.adaptation.probe import Probe
from bebop.errors import UserError
from bebop.trainer.objectives import Sampling
from recipes.reproduce.measured import over_seeds
from recipes.reproduce.real import arms
from recipes.reproduce.real.arms import Measured, each, heads, runs_of, stem
from recipes.reproduce.real.effects import accept_length, paired, single
from recipes.reproduce.real.runs import BRIEF, CONVERGED, FRESH, SHARED, all_runs
from tests.recipes.reproduce.synthetic import end, synthetic, write_arm, write_head


def arm(place: Path, name: str, **look: Any) -> list[Probe]:
    return list(heads(place, name, **look).values())


def made(seed: int, sampling: Sampling) -> Probe:
    return synthetic(seed, sampling)


def better(seed: int, sampling: Sampling) -> Probe:
    return synthetic(seed + 10, sampling, lift=0.05)


def test_every_run_is_of_one_arm() -> None:
    names = [*((name, False) for name in (SHARED, *CONVERGED, *BRIEF, "kl")), *((name, True) for name in FRESH)]
    found = [run.name for name, fresh in names for run in runs_of(name, fresh)]
    assert sorted(found) == sorted(run.name for run in all_runs()) and len(set(found)) == len(found)
    assert [run.name for run in runs_of("ce")] == [f"ce-{seed}" for seed in range(6)]
    assert [run.name for run in runs_of("ce", fresh=True)] == ["fresh-ce-0", "fresh-ce-1", "fresh-ce-2"]


def test_marks_are_files_as_training_names_them() -> None:
    assert (stem("best"), stem("step 100"), stem("second 2400")) == ("best", "step-00100", "second-02400")


def test_an_arm_is_what_has_ended_and_was_looked_at(tmp_path: Path) -> None:
    for seed in (0, 2):
        write_head(tmp_path, f"ce-{seed}", synthetic(seed))
    for name in ("ce-0", "ce-1"):
        end(tmp_path, name)
    assert list(heads(tmp_path, "ce")) == [0], "1 was not looked at, 2 has not ended"
    assert arm(tmp_path, "ce", fresh=True) == arm(tmp_path, "tv") == arm(tmp_path, "ce", at="step 100") == []
    (one,), truth = arm(tmp_path, "ce"), synthetic(0)
    assert np.allclose(one.numbers["overlap"], truth.numbers["overlap"], atol=1e-6, equal_nan=True)
    assert np.array_equal(one.task, truth.task) and one.accept == pytest.approx(truth.accept)


def test_marks_samplings_splits_and_fresh_heads_are_arms_of_their_own(tmp_path: Path) -> None:
    hot = Sampling(temperature=1.4)
    for number, (name, at, sampling, split) in enumerate(
        [
            ("ce-0", "best", Sampling(), "test"),
            ("ce-0", "best", Sampling(), "unseen"),
            ("ce-0", "best", hot, "test"),
            ("ce-0", "second-00120", Sampling(), "test"),
            ("fresh-ce-0", "best", Sampling(), "test"),
        ]
    ):
        end(tmp_path, name)
        write_head(tmp_path, name, synthetic(number, lift=number), at, sampling, split)
    found = [
        arm(tmp_path, "ce"), arm(tmp_path, "ce", split="unseen"), arm(tmp_path, "ce", sampling=hot),
        arm(tmp_path, "ce", at="second 120"), arm(tmp_path, "ce", fresh=True),
    ]  # fmt: skip
    means = [np.nanmean(one.numbers["overlap"]) for (one,) in found]
    assert np.diff(means) == pytest.approx(1, abs=0.05)


def test_arms_are_paired_by_the_seeds_that_both_have(tmp_path: Path) -> None:
    write_arm(tmp_path, "ce", made, seeds=(0, 1, 2))
    write_arm(tmp_path, "e2e_tv", better, seeds=(1, 2))
    ours, theirs = (each(heads(tmp_path, name), accept_length) for name in ("e2e_tv", "ce"))
    told = Measured()
    told.difference("e2e_tv - ce", ours, theirs)
    truth = paired(arm(tmp_path, "e2e_tv"), arm(tmp_path, "ce")[1:], accept_length)
    wrong = paired(arm(tmp_path, "e2e_tv"), arm(tmp_path, "ce")[:2], accept_length)
    assert told.numbers["e2e_tv - ce"] == truth.number() and truth.number() != wrong.number()
    assert told.facts["size of e2e_tv - ce"] == f"{truth.size:.1f} times what two seeds of one arm differ by"


def test_numbers_of_one_arm_come_with_those_over_seeds(tmp_path: Path) -> None:
    write_arm(tmp_path, "ce", made)
    told = Measured()
    told.arm("ce, accept length", each(heads(tmp_path, "ce"), accept_length))
    probes = arm(tmp_path, "ce")
    assert told.numbers["ce, accept length"] == single(probes, accept_length).number()
    over, truth = told.numbers["ce, accept length, seeds"], over_seeds([float(p.accept.mean()) for p in probes])
    assert (over.value, over.spread, over.seeds) == pytest.approx((truth.value, truth.spread, 3))


def test_what_cannot_be_measured_is_left_out(tmp_path: Path) -> None:
    write_arm(tmp_path, "ce", made, seeds=(1,))
    told = Measured()
    one, none = (each(heads(tmp_path, name), accept_length) for name in ("ce", "tv"))
    told.arm("ce, accept length", one)
    told.arm("tv, accept length", none)
    told.difference("ce - tv", one, none)
    told.curves(tmp_path, "tv")
    assert not told.numbers and not told.facts, "one seed has no interval over seeds"
    assert arms.interval(arms.of_arm(one)).low < arms.interval(arms.of_arm(one)).value


def test_flat_curves_are_counted(tmp_path: Path) -> None:
    write_arm(tmp_path, "ce", made)
    end(tmp_path, "ce-1", flat=False)
    write_arm(tmp_path, "tv", made, seeds=(0, 1))
    told = Measured()
    for name in ("ce", "tv", "e2e_tv"):
        told.curves(tmp_path, name)
    assert told.facts == {
        "curves of ce": "2 of 3 validation curves of ce flat", "curves of tv": "2 of 2 validation curves of tv flat",
    }  # fmt: skip
    assert (told.numbers["ce, flat"].low, told.numbers["tv, flat"].high) == (2 / 3, 1.0)


def test_heads_that_were_looked_at_on_other_chains_are_not_compared(tmp_path: Path) -> None:
    arms.same_chains([])
    arms.same_chains([synthetic(0), synthetic(1)])
    with pytest.raises(UserError, match="not all looked at on the same chains"):
        arms.same_chains([synthetic(0), synthetic(1, prompts=20)])

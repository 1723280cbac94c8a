"""Curves and rules of the top-K recipe on numbers whose truth is known."""

import numpy as np
import pytest
import torch

from bebop.trainer.objectives import Sampling, Steps, make_objective
from recipes.reproduce.harness import Results
from recipes.reproduce.study import SEEDS
from recipes.reproduce.top_k.arms import SIZES, RunResult, labels, options
from recipes.reproduce.top_k.curves import CurveRecorder, Curves, churn, jumps, objective, spread
from recipes.reproduce.top_k.losses import top_k_tv
from recipes.reproduce.top_k.study import ARMS, LENGTH, RULES, STUDY
from recipes.reproduce.verdicts import judge

VOCABULARY = 32


def steps(seed: int = 0) -> Steps:
    """Hidden states of 3 rows, 5 anchors, 2 steps; the last step of the last anchor does not exist."""
    torch.manual_seed(seed)
    mask = torch.ones(3, 5, 2, dtype=torch.bool)
    mask[:, -1, -1] = False
    return Steps(
        draft=torch.randn(3, 5, 2, 8),
        target=torch.randn(3, 5, 2, 8),
        weight=torch.randn(VOCABULARY, 8),
        tokens=torch.randint(VOCABULARY, (3, 5, 2)),
        mask=mask,
        sampling=Sampling(),
    )


def test_all_tokens_are_the_ordinary_tv_loss() -> None:
    whole = make_objective("tv").loss(steps())
    assert objective(None, "full")(steps()) == pytest.approx(float(whole), abs=1e-6)
    for mode in ("full", "renormalised"):
        assert objective(VOCABULARY, mode)(steps()) == pytest.approx(float(whole), abs=1e-6)
        # K = 4 is another loss: had top_k been dropped on the way, the recipe would compare the same thing with itself.
        assert abs(float(objective(4, mode)(steps()) - whole)) > 0.01


def test_both_readings_by_hand() -> None:
    """q = (.5, .3, .2), p = (.1, .3, .6), K = 2 keeps tokens 0 and 1."""
    draft, target = (torch.tensor([probs], dtype=torch.float64).log() for probs in ((0.5, 0.3, 0.2), (0.1, 0.3, 0.6)))
    by_hand = {
        "full": (0.6, (0.5 * 0.3, 0.3 * (0.3 - 1), 0.2 * 0.3)),  # 1 - (.1 + .3); of the K, only the second has q <= p
        "renormalised": (0.375, (15 / 64, -15 / 64, 0)),  # q = (5/8, 3/8), p = (1/4, 3/4)
    }
    for mode, (loss, grad) in by_hand.items():
        z = draft.clone().requires_grad_()
        value = top_k_tv(z, target, 2, mode)
        assert value.tolist() == pytest.approx([loss], abs=1e-12)
        assert torch.autograd.grad(value.sum(), z)[0][0].tolist() == pytest.approx(grad, abs=1e-12)


def test_a_set_of_tokens_changes_by_its_members_not_by_their_order() -> None:
    before = torch.tensor([[3, 7], [1, 2]])
    assert churn(before, torch.tensor([[7, 3], [2, 1]]), 8) == 0
    assert churn(before, torch.tensor([[7, 4], [1, 2]]), 8) == 0.25
    by_place = (before != torch.tensor([[7, 3], [2, 1]])).double().mean()
    assert by_place == 1  # the broken variant


def test_look_follows_the_set_from_step_to_step() -> None:
    recorder = CurveRecorder(top_k=4, mode="full")
    for seed in (0, 0, 1):
        recorder(steps(seed))
    loss, full, changed = np.array(recorder.seen).T
    assert changed[0] == changed[1] == 0 < changed[2]
    assert (loss >= full - 1e-6).all()  # the overlap over K tokens is a part of the overlap over all
    assert full[0] == pytest.approx(float(make_objective("tv").loss(steps(0))), abs=1e-6)


def test_a_steady_fall_has_no_spread_and_a_spike_has() -> None:
    steady = np.asarray(0.5 * 0.97 ** np.arange(60), np.float64)
    assert spread(steady, 6) < 1e-12 < np.std(steady)  # the plain deviation (broken) takes the fall for spikes
    spiky = steady.copy()
    spiky[30] *= 1.5
    assert spread(spiky, 6) == pytest.approx(np.std(np.append(np.zeros(51), [np.log(1.5), -np.log(1.5)]), ddof=1))
    assert spread(10 * spiky, 6) == pytest.approx(spread(spiky, 6))
    assert jumps(spiky, 6).max() == pytest.approx(np.log(1.5 * 0.97))


def test_labels_and_options_belong_together() -> None:
    assert labels()[:2] == ["start", "all"]
    assert options("all") == (None, "full")
    assert [options(label) for label in labels()[2:4]] == [(SIZES[0], "full"), (SIZES[0], "renormalised")]


def planted(loss_by_k: float, noise_by_k: float) -> Results[RunResult]:
    """Accept length 2.9 with all tokens, less by ``loss_by_k`` / K else; curves as noisy as ``noise_by_k`` / K."""
    rng = np.random.default_rng(0)
    found = {}
    for name, (_, label) in ARMS.items():
        for seed in SEEDS:
            size = options(label)[0] if label.startswith("K") else None
            cost = loss_by_k / size if size else 0.0
            noise = 0.01 + (noise_by_k / size if size else 0.0)
            curve = 0.3 * np.exp(noise * rng.normal(size=80))
            curves = Curves(grad_norm=curve, loss=curve, full=curve, churn=np.zeros(80))
            length = 2.9 + 0.05 * seed - cost + 0.001 * rng.normal()
            found[name, seed] = RunResult(sampled=length, greedy=length, curves=curves)
    return Results(found=found, seeds=SEEDS)


def test_findings_follow_what_was_planted() -> None:
    def judged(loss_by_k: float, noise_by_k: float) -> list[tuple[str, bool]]:
        return [(f.side, f.p < 0.05) for f in judge(RULES, STUDY.numbers(planted(loss_by_k, noise_by_k)))]

    assert judged(20.0, 0.5) == [("confirmed", True)] * 3
    assert judged(-20.0, 0.0)[:2] == [("refuted", True)] * 2
    assert judged(20.0, 0.0)[2] != ("confirmed", True)
    assert judged(0.05, 0.5)[0] != ("confirmed", True)  # within what two seeds of one arm differ by


def test_the_gain_is_paired_by_seed() -> None:
    difference = planted(1.0, 0.5).interval(LENGTH.gain("fresh: all", "fresh: K = 4, full"))
    assert difference.value == pytest.approx(0.25, abs=0.01)
    assert difference.high - difference.low < 0.05  # unpaired, the seeds' own differences of 0.05 would make it 0.25

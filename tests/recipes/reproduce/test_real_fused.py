"""The losses by plain autograd are those of the kernels, and what is measured of them is time and memory."""

from pathlib import Path

import pytest
import torch

from bebop.trainer.objectives import OBJECTIVES, Steps
from recipes.reproduce.real import fused
from tests.recipes.reproduce.real_builders import small_study


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    return fused.example(*small_study(tmp_path_factory.mktemp("fused")))


@pytest.mark.parametrize("name", fused.EAGER)
def test_both_arms_compute_the_same(steps: Steps, name: str) -> None:
    assert not steps.mask.all() and steps.mask.sum(-1).max() == fused.DEPTH, "chains of different lengths"
    (one,) = torch.autograd.grad(value := OBJECTIVES[name].loss(steps), steps.draft)
    (two,) = torch.autograd.grad(other := fused.EAGER[name](steps), steps.draft)
    assert value.item() == pytest.approx(other.item(), rel=1e-5) and torch.allclose(one, two, atol=1e-7)
    assert one.abs().max() > 1e-5


@pytest.mark.slow
def test_memory_is_what_is_held_at_the_highest(steps: Steps) -> None:
    def holding(count: int) -> fused.Loss:
        return lambda some: (torch.ones(count << 18).sum() * 0 + some.draft.sum()) * 0

    found = [fused.held(holding(count), steps) for count in (300, 60, 300)]
    assert 300 <= found[0] == found[2] < 301 and 60 <= found[1] < 61, found


@pytest.mark.slow
def test_a_line_for_each_loss_and_arm(tmp_path: Path) -> None:
    lines = fused.compare_losses(tmp_path, *small_study(tmp_path))
    assert [(line["loss"], line["arm"]) for line in lines] == [(n, a) for n in fused.EAGER for a in ("fused", "eager")]
    assert all(line["CPU seconds"] > 0 and line["vocabulary"] == 512 for line in lines)

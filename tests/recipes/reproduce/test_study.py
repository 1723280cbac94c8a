"""Heads that the studies share: trained once, each on sequences that its sampling would draw."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bebop.trainer.objectives import Sampling
from recipes.reproduce import study
from recipes.reproduce.study import Arm


@pytest.mark.parametrize(
    ("sampling", "overrides"),
    [(Sampling(), ()), (Sampling(target_top_p=0.9), ("data.sampling.top_p=0.9",))],
)
def test_a_head_learns_on_sequences_truncated_as_its_target_is(
    sampling: Sampling, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(study, "FOLDER", tmp_path)
    monkeypatch.setattr(study, "policy", lambda: SimpleNamespace(mtp=torch.nn.Linear(1, 1)))
    monkeypatch.setattr(study, "corpus", lambda seed, *overrides: asked.append((seed, overrides)) or ["a", "b", "c"])
    study._with_states.cache_clear()
    monkeypatch.setattr(study, "backbone_states", lambda model, rows: [f"states of {row}" for row in rows])
    monkeypatch.setattr(study, "train", lambda model, arm, rows, states: asked.append([*rows, *states]))
    arm = Arm(objective="e2e_tv", seed=5, sampling=sampling, sequences=2)
    for _ in range(2):  # the second time it is kept
        head = study.head(arm)
    assert asked == [(5, overrides), ["a", "b", "states of a", "states of b"]]
    assert not any(weight.requires_grad for weight in head.mtp.parameters())

"""Greedy drafts, accepted with p(draft): the same distribution of tokens."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from bebop.config.job import JobConfig
from tests.integration.sglang.builders import engine
from tests.served_models import ask_many, checkpoint, draft_model, job, tokens_distribution_test


def of_head(folder: Path, draft: Path) -> JobConfig:
    return job(folder, "target_only")


def of_another_model(folder: Path, draft: Path) -> JobConfig:
    config = job(folder, "draft_model", draft_model(draft))
    return dataclasses.replace(config, decoding=dataclasses.replace(config.decoding, draft_temperature=0.0))


@pytest.mark.parametrize("drafting", [of_head, of_another_model])
def test_the_distribution_of_tokens(drafting: Callable[[Path, Path], JobConfig], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model")
    with engine(drafting(folder, tmp_path / "draft")) as sglang:
        found = ask_many(sglang, {2: 40})
    tokens_distribution_test(found, folder)
    overlap, only = (sum(float(getattr(c.stats, name).sum()) for c in found) for name in ("overlap", "target_only"))
    assert overlap == only > 0
    assert not any(c.stats.draft_entropy.any() for c in found)

"""Greedy drafts, accepted with p(draft): the same distribution of tokens."""

from pathlib import Path

from tests.integration.sglang.builders import engine
from tests.served_models import ask_many, checkpoint, job, tokens_distribution_test


def test_the_distribution_of_tokens(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with engine(job(folder, "target_only")) as sglang:
        found = ask_many(sglang, {2: 40})
    tokens_distribution_test(found, folder)
    overlap, only = (sum(float(getattr(c.stats, name).sum()) for c in found) for name in ("overlap", "target_only"))
    assert overlap == only > 0
    assert not any(c.stats.draft_entropy.any() for c in found)

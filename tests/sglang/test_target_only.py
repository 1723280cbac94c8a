"""Greedy drafts, accepted with p(draft): the same law of tokens."""

import time
from pathlib import Path

from tests.sglang.builders import answers, ask, checkpoint, engine, job, tokens_law_test

BATCH, ROUNDS = 50, 40


def test_the_law_of_tokens(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with engine(job(folder, "target_only")) as sglang:
        began = time.perf_counter()
        found = [c for _ in range(ROUNDS) for c in answers(sglang, ask(BATCH, 3))]
        print(f"{len(found)} requests in {time.perf_counter() - began:.0f} s")
    tokens_law_test(found, folder)
    overlap, only = (sum(float(getattr(c.stats, name).sum()) for c in found) for name in ("overlap", "target_only"))
    assert overlap == only > 0
    assert not any(c.stats.draft_entropy.any() for c in found)

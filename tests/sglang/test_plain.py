"""Plain decoding: what drafts are compared with."""

from pathlib import Path

import numpy as np

from tests.sglang.builders import PROMPT, answers, ask, checkpoint, engine, job, logprobs


def test_plain_decoding(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, heads=2)  # on one pair of keys and values
    config = job(folder)
    with engine(config) as drafting:
        drafted = answers(drafting, ask(1, 24, temperature=0.0))[0]
    with engine(job(folder, "autoregressive")) as plain:
        greedy = answers(plain, ask(1, 24, temperature=0.0))[0]
        sampled = answers(plain, ask(2, 12))
    assert drafted.token_ids.tolist() == greedy.token_ids.tolist()
    assert greedy.stats.cycles == greedy.stats.tokens == 24
    for found in sampled:
        np.testing.assert_allclose(found.logprobs, logprobs(folder, PROMPT, found.token_ids.tolist()), atol=1e-4)

"""Plain decoding: greedy answers are those that drafts give (``test_rejection``), sampled ones have the same
distribution."""

from pathlib import Path

import numpy as np

from tests.integration.sglang.builders import engine
from tests.served_models import PROMPT, answers, ask, checkpoint, embedded, job, logprobs


def test_plain_decoding(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with engine(job(folder, "autoregressive")) as plain:
        greedy = answers(plain, ask(2, 24, temperature=0.0))
        sampled = answers(plain, ask(2, 12))
    wanted = answers(embedded(folder, "autoregressive"), ask(2, 24, temperature=0.0))
    assert [c.token_ids.tolist() for c in greedy] == [c.token_ids.tolist() for c in wanted]
    assert greedy[0].stats.cycles == greedy[0].stats.tokens == 24
    for found in sampled:
        np.testing.assert_allclose(found.logprobs, logprobs(folder, PROMPT, found.token_ids.tolist()), atol=1e-4)

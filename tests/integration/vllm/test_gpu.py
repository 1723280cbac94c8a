"""The same engine on a GPU, with the stock wheel. Not run yet: there was none."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bebop.config.job import ModelConfig
from bebop.trajectory import DecodeStats, SamplingParams
from tests.goodness_of_fit import p_value
from tests.integration.vllm.builders import engine, held, with_update
from tests.integration.vllm.test_distributions import drawn, exact
from tests.served_models import PROMPT, answers, ask, checkpoint, collect, job, logprobs, reload

pytest.importorskip("vllm")  # where the file is named, its folder's conftest leaves out nothing
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("runner", ["v2", "v1"])
def test_the_whole_of_it_on_a_gpu(tmp_path: Path, runner: str) -> None:
    """Distributions, log-probs, acceptance, and weights in flight with keys and values computed again."""
    folder, other = checkpoint(tmp_path / "model"), checkpoint(tmp_path / "other", seed=1)
    model = ModelConfig(path=str(folder), device="cuda", dtype="float32")
    cool = SamplingParams(temperature=0.7, max_new_tokens=3)
    with engine(dataclasses.replace(job(folder), model=model), memory_fraction=0.2, model_runner=runner) as vllm:
        assert p_value(drawn(vllm, PROMPT, cool), exact(folder, PROMPT, cool)) > 1e-3
        found = answers(vllm, ask(64, 40))
        stats = DecodeStats.total(c.stats for c in found)
        assert stats.accepted.sum() > 0 and abs((stats.accepted - stats.overlap) / stats.reached).max() < 0.1
        for one in found[:4]:
            np.testing.assert_allclose(one.logprobs, logprobs(folder, PROMPT, one.token_ids.tolist()), atol=1e-3)
        with_update(vllm, recompute=True)
        for request in ask(6, 60):
            vllm.add(request)
        with held(vllm, 15):
            vllm.load_weights(reload(other).weights(mtp=True), 7)
        for one in collect(vllm, 6):
            ids, new = one.token_ids.tolist(), one.versions == 7
            assert 0 < new.sum() < len(ids)
            np.testing.assert_allclose(one.logprobs[~new], logprobs(folder, PROMPT, ids)[~new], atol=1e-3)
            np.testing.assert_allclose(one.logprobs[new], logprobs(other, PROMPT, ids)[new], atol=1e-3)

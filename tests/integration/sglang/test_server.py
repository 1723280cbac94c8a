"""A server that is there already: HTTP with a key, weights by shared memory, by process group and by folder."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bebop.bench.gpu.models import TINY
from bebop.bench.publish import Publishing
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from tests.integration.sglang.builders import engine
from tests.integration.sglang.serving import serving
from tests.served_models import PROMPT, answers, ask, checkpoint, job, logprobs, policy

KEY = "for-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), heads=2)  # on one pair of keys and values


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config, place = job(folder), tmp_path_factory.mktemp("log")
    with serving(config, folder, place, {"BEBOP_VERIFY_EVERY": "1"}, api_key=KEY, weight_version="default") as found:
        yield found


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)


@pytest.mark.parametrize("transfer", ["tensor", "distributed", "disk"])
def test_a_server_by_address(
    url: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transfer: str
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    other = checkpoint(tmp_path / "other", seed=4, heads=2)
    with engine(job(folder), urls=(url,), transfer=transfer, folder=str(tmp_path / "weights")) as sglang:
        for seed, model, version in ((0, folder, 1), (4, other, 2), (0, folder, 3), (4, other, 4)):
            heads = version < 4  # the last time they are frozen, and must stay
            sglang.load_weights(policy(seed, heads=2).weights(mtp=heads), version)
            for found in answers(sglang, ask(2, 6)):
                assert found.versions.tolist() == [version] * 6 and found.stats.overlap.any()
                wanted = logprobs(model, PROMPT, found.token_ids.tolist())
                np.testing.assert_allclose(found.logprobs, wanted, atol=1e-4)


def test_a_server_that_decodes_otherwise(url: str, folder: Path, key: None, monkeypatch: pytest.MonkeyPatch) -> None:
    config = job(folder, "target_only")
    assert config.decoding == DecodingConfig(system="target_only", draft_tokens=2)
    with pytest.raises(UserError, match="rejection_sampling"), engine(config, urls=(url,)):
        pass
    monkeypatch.setenv("SGLANG_API_KEY", "wrong")
    with pytest.raises(UserError, match="api_key_env"), engine(job(folder), urls=(url,)):
        pass


def test_copies_on_the_way_to_sglang() -> None:
    """Into shared memory, and out of it by SGLang's scheduler; before, flat and in shared memory of its own too."""
    both = Publishing(TINY)
    for way, copies in (("store", 5), ("shared", 2), ("broadcast", 3)):
        assert both.copies(both.sglang, way) == copies and both.arrived()

"""MTP heads of families in vLLM's own classes: the same numbers as Bebop's, new weights in every layer, real drafts."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.job import ModelConfig, TrainerConfig
from bebop.model.checkpoint import load_policy
from tests.integration import heads
from tests.integration.vllm.builders import RUNNER, engine
from tests.model.families import experts_of
from tests.served_models import answers, ask, job, reload, stock
from tests.tiny_families import write_family

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, heads.Head]:
    root = tmp_path_factory.mktemp("families")
    return {name: heads.write(root, name) for name in heads.SERVED}


@pytest.fixture(scope="module")
def found(written: dict[str, heads.Head]) -> dict[str, Any]:
    root = next(iter(written.values())).folder.parent
    return heads.run("tests.integration.vllm.run_heads", root, written, {})


@pytest.mark.parametrize("family", heads.SERVED)
def test_the_forward_is_that_of_bebop(written: dict[str, heads.Head], found: dict[str, Any], family: str) -> None:
    heads.check_forward(written[family], found)


@pytest.mark.parametrize("family", heads.SERVED)
def test_new_weights_reach_every_layer(written: dict[str, heads.Head], found: dict[str, Any], family: str) -> None:
    heads.check_update(written[family], found)


@torch.no_grad()
def greedy(folder: Path, prompt: tuple[int, ...], count: int) -> list[int]:
    """Return a completion by transformers."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(stock(folder)(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_glm_drafts_and_takes_new_weights(tmp_path: Path) -> None:
    """The whole of GLM-4.5 runs on a CPU: its head drafts, and a new version decodes as transformers does with it."""
    folder, other = write_family(tmp_path / "a", "glm4_moe"), write_family(tmp_path / "b", "glm4_moe", seed=1)
    heads.write_update(folder, other)  # what no trainer changes is the same in both
    prompt = (3, 1, 4, 1, 5)
    with engine(job(folder)) as vllm:
        for version, place in enumerate((folder, other)):
            if version:
                vllm.load_weights(reload(place).weights(mtp=True), version)
            (plain,) = answers(vllm, ask(1, 16, temperature=0.0, prompt=prompt))
            assert plain.token_ids.tolist() == greedy(place, prompt, 16)
            # A head that was never trained: of the few drafts that temperature 1 accepts there were none in some runs.
            sampled = answers(vllm, ask(32, 24, temperature=2.0, prompt=prompt))
            assert sum(int(one.stats.accepted.sum()) for one in sampled) > 0
            assert {version} == set(plain.versions.tolist())


@pytest.mark.skipif(RUNNER == "v1", reason="vLLM's first model runner records no routing")
def test_routing_is_that_of_the_target_whatever_is_drafted(tmp_path: Path) -> None:
    """Its head routes too, and so do drafts that are rejected: neither is what a token was computed with."""
    folder = write_family(tmp_path, "glm4_moe")
    config = dataclasses.replace(job(folder), trainer=TrainerConfig(routing_replay=True))
    policy, requests = load_policy(ModelConfig(path=str(folder), device="cpu")), ask(24, 24, prompt=(3, 1, 4, 1, 5))
    with engine(config) as vllm:
        done = answers(vllm, requests)
    assert sum(int(one.stats.accepted.sum()) for one in done) > 0
    for request, one in zip(requests, done, strict=True):
        text, routing = [*request.token_ids, *one.token_ids.tolist()], one.routing
        assert routing is not None and (routing[-1] == -1).all()
        assert np.array_equal(np.sort(routing[:-1], -1), experts_of(policy, text)[:-1])

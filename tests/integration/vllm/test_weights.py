"""Weights change: between answers, within them, and of one model alone; and what does not arrive is noticed."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from bebop.bench.publish import Copies
from bebop.config.job import DecodingConfig, JobConfig, ModelConfig, MonitorConfig, RolloutConfig, SamplingConfig
from bebop.driver.weights import SharedReader, WeightBuffers
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy, resolve
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.vllm.engine import VllmServer
from bebop.trajectory import DecodeStats, SamplingParams
from tests.integration.vllm.builders import core, engine, fewer, held, with_update
from tests.served_models import PROMPT, answers, ask, checkpoint, collect, logprobs, policy, reload

WORDS = (4, 5, 6, 7) * 26  # four blocks of keys and values, the last of which a head's cache never shares
COPIES = 3.34  # of the weights of this model, within vLLM: it loads into layers of its own, then where graphs read


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy's checkpoint."""
    return checkpoint(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture
def fresh(vllm: ServedEngine, folder: Path) -> Iterator[ServedEngine]:
    """The engine with the weights that it started with, before and after."""
    yield vllm
    vllm.abort()
    with_update(vllm, recompute=False)
    vllm.load_weights(reload(folder).weights(mtp=True), 0)


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_flight(recompute: bool, fresh: ServedEngine, folder: Path, other: Path) -> None:
    """Each token has the log-prob of its own version: exactly so where keys and values are computed again, and of the
    first tokens in any case."""
    with_update(fresh, recompute)
    for request in ask(6, 60):
        fresh.add(request)
    with held(fresh, 15):
        fresh.load_weights(reload(other).weights(mtp=True), 7)
    for found in collect(fresh, 6):
        ids, versions = found.token_ids.tolist(), found.versions
        new = versions == 7
        assert set(versions.tolist()) == {0, 7} and (np.diff(versions) >= 0).all()
        old, changed = logprobs(folder, PROMPT, ids), logprobs(other, PROMPT, ids)
        np.testing.assert_allclose(found.logprobs[~new], old[~new], atol=1e-4)
        assert np.abs(found.logprobs[new] - old[new]).max() > 0.1
        if recompute:
            np.testing.assert_allclose(found.logprobs[new], changed[new], atol=1e-4)
            assert np.array_equal(found.oldest, versions)
        else:
            assert not found.oldest.any() and np.abs(found.logprobs[new] - changed[new]).max() > 1e-4


def test_keys_and_values_of_old_weights_are_not_found_again(fresh: ServedEngine, folder: Path, other: Path) -> None:
    """vLLM's prefix cache does not know of weights; where its salt stays, this test fails."""
    long = Request(id=0, token_ids=WORDS, params=SamplingParams(max_new_tokens=8))
    answers(fresh, [long])
    fresh.load_weights(reload(other).weights(mtp=True), 1)
    (found,) = answers(fresh, [long])
    np.testing.assert_allclose(found.logprobs, logprobs(other, WORDS, found.token_ids.tolist()), atol=1e-4)
    fresh.load_weights(reload(folder).weights(mtp=True), 2)
    core(fresh)._salt = "the same"
    answers(fresh, [long])
    fresh.load_weights(reload(other).weights(mtp=True), 3)
    core(fresh)._salt = "the same"
    (stale,) = answers(fresh, [long])
    assert np.abs(stale.logprobs - logprobs(other, WORDS, stale.token_ids.tolist())).max() > 1e-2


def test_what_was_not_sent_must_not_change_and_what_was_must(fresh: ServedEngine, folder: Path, other: Path) -> None:
    """Broken transfers: one that loads the draft's weights beside the target's, one that loads nothing."""
    server = core(fresh)
    own, load = reload(other).weights(mtp=True), server.load
    target = {n: t for n, t in own.items() if n.startswith("backbone.")}

    def meddling(role: str, place: object) -> None:
        load(role, place)  # type: ignore[arg-type]
        worker = server.engine.model_executor.driver_worker.worker
        with torch.no_grad():
            next(p for n, p in worker.model_runner.get_draft_model().named_parameters() if "norm" in n).add_(1)

    server.load = meddling  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="not for the draft"):
        fresh.load_weights(target, 1)
    server.load = load  # type: ignore[method-assign]
    fresh.server._why = None  # type: ignore[attr-defined]
    fresh.server._watch.begin(server.checksums(), {})  # type: ignore[attr-defined]
    fresh.load_weights(own, 2)
    server.load = lambda role, place: None  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="target was sent and did not arrive"):
        fresh.load_weights(reload(folder).weights(mtp=True), 3)
    server.load = load  # type: ignore[method-assign]


def test_part_of_a_model_is_refused(fresh: ServedEngine, folder: Path) -> None:
    own = reload(folder).weights()
    own.pop("backbone.model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"version 5 has .* lacks 'model.layers.0.mlp.up_proj.weight': vLLM takes"):
        fresh.load_weights(own, 5)
    assert answers(fresh, ask(1, 4))[0].versions.tolist() != [5] * 4


def test_policies_differ(folder: Path, other: Path) -> None:
    assert not torch.equal(
        policy(0).weights()["backbone.lm_head.weight"], policy(1).weights()["backbone.lm_head.weight"]
    )


@torch.no_grad()
def test_a_noised_head_slows_decoding_alone_and_recovers() -> None:
    """On the built-in model, whose head was trained."""
    model = ModelConfig(path="tiny", device="cpu")
    own = load_policy(model, need_head=True)
    generator = torch.Generator().manual_seed(0)
    sound = {name: t for name, t in own.weights(mtp=True).items() if name.startswith("mtp.")}
    noised = {n: t + t.std() * torch.randn(t.shape, generator=generator) for n, t in sound.items() if t.dim() == 2}
    prompts = [tuple(own.tokenizer(f"Calculate {i} + {7 * i % 10} - {i}.")["input_ids"]) for i in range(fewer(32, 6))]
    requests = [
        Request(id=i, token_ids=prompt, params=SamplingParams(max_new_tokens=fewer(48, 24)))
        for i, prompt in enumerate(prompts)
    ]
    config = JobConfig(
        model=model,
        decoding=DecodingConfig(draft_tokens=3),
        rollout=RolloutConfig(max_length=120, sampling=SamplingConfig(max_new_tokens=48)),
        monitor=MonitorConfig(decode_stats=True),
    )
    lengths = []
    with engine(config) as vllm:
        for version, head in enumerate((sound, sound | noised, sound)):
            vllm.load_weights(head, version)
            found = answers(vllm, requests)
            lengths.append(DecodeStats.total(c.stats for c in found).accept_length)
            for prompt, one in zip(prompts[:4], found, strict=False):
                wanted = logprobs(resolve("tiny"), prompt, one.token_ids.tolist())
                np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)
                assert set(one.versions.tolist()) == {version}
    assert lengths[1] < 1.4 < fewer(1.8, 1.5) < min(lengths[0], lengths[2]), lengths
    assert abs(lengths[0] - lengths[2]) < fewer(0.25, 0.8), lengths


def test_copies_of_a_load(fresh: ServedEngine, other: Path) -> None:
    """What vLLM copies, beside the one copy to memory that the trainer shares."""
    server = fresh.server
    assert isinstance(server, VllmServer)
    named = reload(other).weights()
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}
    buffers = WeightBuffers()
    weights, release = SharedReader().open(buffers.write(iter(named.items()), layout))
    load = server._to_update(weights, 1)

    def loaded() -> int:
        counter = Copies(torch.float32)
        with counter:
            server.transfer.send(server.core, load)
        return counter.bytes

    found = fresh.run(server._run("load", loaded))
    release()
    assert found / sum(t.numel() * t.element_size() for t in load.target.values()) == pytest.approx(COPIES, abs=0.2)

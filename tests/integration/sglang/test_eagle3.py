"""EAGLE-3 drafters in SGLang on the CPU: greedy cycles and overlaps are those of the embedded engine, and follow new
weights. Sampled drafts there are of the whole vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.sglang.builder import check
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import DecodeStats
from tests.eagle3_models import drafter, eagle3_job, folders, target
from tests.integration.sglang.builders import engine, with_sglang
from tests.served_models import PROMPT, VOCAB, answers, ask, logprobs

WHOLE = tuple(range(VOCAB))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return folders(tmp_path_factory.mktemp("eagle3"), WHOLE)


@pytest.fixture(scope="module")
def sglang(models: tuple[Path, Path]) -> Iterator[ServedEngine]:
    with engine(eagle3_job(*models)) as found:
        yield found


def ours(models: tuple[Path, Path]) -> Policy:
    config = ModelConfig(path=str(models[0]), device="cpu", parts={"eagle3": str(models[1])})
    return load_policy(config, needs=("eagle3",))


def embedded(policy: Policy, models: tuple[Path, Path]) -> TorchEngine:
    return TorchEngine(policy, eagle3_job(*models).decoding, slots=8, max_length=120)


def assert_same(sglang: ServedEngine, one: TorchEngine, prompt: Sequence[int]) -> None:
    """Tokens, cycles and accepted drafts: each greedy draft was the same.

    SGLang's prefill gives the first token, and drafts begin after it.
    """
    (found,) = answers(sglang, ask(1, 24, temperature=0.0, prompt=prompt))
    first, *rest = found.token_ids.tolist()
    (wanted,) = answers(one, ask(1, 23, temperature=0.0, prompt=(*prompt, first)))
    assert rest == wanted.token_ids.tolist()
    assert found.stats.cycles == wanted.stats.cycles
    assert found.stats.accepted.tolist() == wanted.stats.accepted.tolist()
    assert 0 < found.stats.accepted.sum() < found.stats.reached.sum()


def test_greedy_cycles_are_those_of_the_embedded_engine(sglang: ServedEngine, models: tuple[Path, Path]) -> None:
    one = embedded(ours(models), models)
    for prompt in (PROMPT, (7, 2, 5, 0, 9)):
        assert_same(sglang, one, prompt)


def test_sampled_drafts_have_our_overlap_and_tokens_their_logprobs(
    sglang: ServedEngine, models: tuple[Path, Path]
) -> None:
    found = answers(sglang, ask(24, 12))
    for one in found[:4]:
        np.testing.assert_allclose(one.logprobs, logprobs(models[0], PROMPT, one.token_ids.tolist()), atol=1e-4)
    wanted = answers(embedded(ours(models), models), ask(400, 12))
    theirs, own = (DecodeStats.total(c.stats for c in some) for some in (found, wanted))
    assert np.abs(theirs.overlap / theirs.reached - own.overlap / own.reached).max() < 0.06
    assert np.abs(theirs.draft_entropy / theirs.reached - own.draft_entropy / own.reached).max() < 0.12


def test_new_weights_of_target_and_drafter_arrive(sglang: ServedEngine, models: tuple[Path, Path]) -> None:
    changed = Policy(
        backbone=target(5).backbone, tokenizer=ours(models).tokenizer, mtp=None, layout="mimo",
        parts={"eagle3": drafter(WHOLE, seed=6)}, drafting="eagle3",
    )  # fmt: skip
    sglang.load_weights({name: t.detach() for name, t in changed.weights(mtp=True).items()}, 3)
    assert sglang.head == changed.head_fingerprint()
    assert_same(sglang, embedded(changed, models), PROMPT)


def test_a_part_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    made = with_sglang(eagle3_job(*folders(tmp_path)))
    with pytest.raises(UserError, match="for a drafter of 9 of 12 tokens"):
        check(made)
    check(dataclasses.replace(made, decoding=dataclasses.replace(made.decoding, system="eagle3_target_only")))

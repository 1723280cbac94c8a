"""Drafts from past answers, which vLLM looks up in a tree of them: exact whatever it was told; bounds, weights."""

import dataclasses
import inspect
import subprocess
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.vllm.engine import self_test
from bebop.rollout.vllm.suffixes import Suffixes
from bebop.trajectory import DecodeStats
from tests.goodness_of_fit import p_value
from tests.integration.vllm.builders import core, engine, held
from tests.integration.vllm.test_distributions import DRAWS, LEVEL, PROMPTS, SAMPLINGS, drawn, exact, residual
from tests.killed_engine import STEPS, command, rows
from tests.served_models import VOCAB, answers, ask, checkpoint, job, logprobs, policy, reload

DRAFTS, TOKENS = 8, 1 << 17


@pytest.fixture(scope="module")
def module(folder: Path) -> Iterator[ServedEngine]:
    options = {"tokens": TOKENS}
    decoding = DecodingConfig(system="history", draft_tokens=DRAFTS, draft_temperature=0.0, options=options)
    with engine(dataclasses.replace(job(folder), decoding=decoding)) as found:
        yield found


@pytest.fixture
def vllm(module: ServedEngine) -> ServedEngine:
    """Which knows of nothing."""
    known(module).clear()
    return module


def known(engine: ServedEngine) -> Suffixes:
    past = core(engine).past
    assert past is not None
    return past


def stats(engine: ServedEngine, requests: list[Request]) -> DecodeStats:
    return DecodeStats.total(found.stats for found in answers(engine, requests))


@pytest.mark.parametrize("sampling", ["plain", "cool"])
def test_answers_are_drawn_from_the_target(vllm: ServedEngine, folder: Path, sampling: str) -> None:
    """Told of likely and of unlikely answers."""
    for prompt in PROMPTS:
        vllm.remember(prompt, [[a, b, 3] for a in range(0, VOCAB, 2) for b in (1, 2, 7)])
        counts, wanted = drawn(vllm, prompt, SAMPLINGS[sampling]), exact(folder, prompt, SAMPLINGS[sampling])
        assert p_value(counts, wanted) > LEVEL / len(SAMPLINGS) / len(PROMPTS), (prompt, sampling)


def test_the_first_drafts_come_from_what_was_told(vllm: ServedEngine, folder: Path) -> None:
    """A greedy answer that is known is drafted as a whole, and the same without having been told is not."""
    (whole,) = answers(vllm, ask(1, 1 + 2 * (DRAFTS + 1), temperature=0.0))
    ids = whole.token_ids.tolist()
    known(vllm).clear()
    untold = stats(vllm, ask(1, len(ids), temperature=0.0))
    known(vllm).clear()
    vllm.remember(ask(1, 1)[0].token_ids, [ids])
    (again,) = answers(vllm, ask(1, len(ids), temperature=0.0))
    assert again.token_ids.tolist() == ids and again.exact
    assert again.stats.cycles == 2 and again.stats.accept_length == DRAFTS + 1 > untold.accept_length
    assert again.stats.draft_forwards == 0 and again.stats.accepted.tolist() == again.stats.reached.tolist() == [2] * 8


def test_told_drafts_leave_the_distribution(vllm: ServedEngine, folder: Path) -> None:
    params = SAMPLINGS["cool"]
    vllm.remember(PROMPTS[0], [[a, b, 3] for a in range(VOCAB) for b in (1, 2)])
    counts = drawn(vllm, PROMPTS[0], params, 5000)
    assert p_value(counts, exact(folder, PROMPTS[0], params)) > LEVEL


def test_a_residual_with_the_draft_left_in_is_found(
    vllm: ServedEngine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.sample import rejection_sampler

    own = rejection_sampler.rejection_sample
    names = inspect.signature(inspect.unwrap(own))

    def faulty(*args: Any, **named: Any) -> Tensor:
        return residual(own, dict(names.bind(*args, **named).arguments))

    monkeypatch.setattr(rejection_sampler, "rejection_sample", faulty)
    params = SAMPLINGS["plain"]
    vllm.remember(PROMPTS[0], [[a, b, 3] for a in range(0, VOCAB, 2) for b in (1, 2, 7)])
    assert p_value(drawn(vllm, PROMPTS[0], params, DRAWS), exact(folder, PROMPTS[0], params)) < 1e-6


def test_what_vllm_keeps_is_what_is_counted(vllm: ServedEngine) -> None:
    """Told and decoded texts are in its tree until they are replaced or too many; nothing else is."""
    past = known(vllm)
    tree: Any = past.cache

    def names() -> set[Hashable]:
        return set(tree.cached_requests)

    assert not names() and past.tokens == 0
    answers(vllm, ask(5, 20))
    assert past.tokens == 100 and len(names()) == 5
    vllm.remember(ask(1, 1)[0].token_ids, [[1, 2], [3]])
    assert past.tokens == 2 * 3 + 3 and len(names()) == 2
    past.limit = 30
    try:
        answers(vllm, ask(2, 12, prompt=(5, 5)))
        assert past.tokens == 24 and len(names()) == 2  # the other prompt went
    finally:
        past.limit = TOKENS
    vllm.add(ask(1, 60)[0])
    with held(vllm, 5):
        (cut,) = vllm.abort()
    answers(vllm, ask(1, 2))  # a step in which it is missed
    assert past.tokens == 24 + len(cut.completion.token_ids) + 2 and len(names()) == 4


def test_new_weights_are_drafted_for_from_old_answers(vllm: ServedEngine, folder: Path, tmp_path: Path) -> None:
    """What was told stays; log-probs are those of the new weights, whoever drafted."""
    other = checkpoint(tmp_path / "other", seed=5)
    old = answers(vllm, ask(8, 20))
    vllm.remember(ask(1, 1)[0].token_ids, [found.token_ids for found in old])
    before = known(vllm).tokens
    try:
        vllm.load_weights(policy(5).weights(), 3)
        assert known(vllm).tokens == before
        for found in answers(vllm, ask(8, 20)):
            ids = found.token_ids.tolist()
            np.testing.assert_allclose(found.logprobs, logprobs(other, ask(1, 1)[0].token_ids, ids), atol=1e-4)
            assert found.versions.tolist() == [3] * 20
    finally:
        vllm.load_weights(reload(folder).weights(), 0)


def test_the_self_test_notices_that_nothing_told_is_drafted(
    vllm: ServedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    self_test(core(vllm), sampled=False)
    assert known(vllm).tokens == 0  # and nothing of it is kept
    tree: Any = known(vllm).cache
    monkeypatch.setattr(tree, "speculate", lambda *args, **named: type("Nothing", (), {"token_ids": []})())
    with pytest.raises(UserError, match="drafts nothing of a past completion") as caught:
        self_test(core(vllm), sampled=False)
    assert "\n" not in str(caught.value)


def test_a_job_tells_what_was_said_before(tmp_path: Path) -> None:
    """Two questions, asked again in every step: answers are trained on as any other engine's."""
    plain = command(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1")
    (tmp_path / "killed").touch()  # nobody is to be killed here, nor waited for
    kept = [one for one in plain if not one.startswith(("cotrain=", "decoding."))]
    chosen = ["decoding=history", "decoding.draft_temperature=0", f"decoding.draft_tokens={DRAFTS}"]
    run = subprocess.run([*kept, *chosen], capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stderr
    found = rows(tmp_path)
    assert found[-1]["step"] == STEPS and all(row["rollout/accept_length"] > 1 for row in found)
    assert found[0]["rollout/logprob_diff_current"] < 1e-4 and found[0]["train/ratio_error_max"] < 1e-3

"""Drafts of a separate model: each is drawn from what that model gives in one pass over the whole text before it.

Wrong keys and values in the draft model's cache change q alone, and completions stay exact: no test of a distribution
sees them. An observer compares q of every draft with such a pass, whatever the request went through before.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.compose import job_config
from bebop.config.job import DecodingConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_draft, save_policy
from bebop.model.skeleton import check_same_tokens
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.timed_lengths import CostLength
from bebop.rollout.engine import Request
from bebop.rollout.torch_builder import make
from bebop.rollout.torch_engine import TorchEngine
from bebop.runtime.preflight import check_job
from tests.builders import bare_policy, letters, requests, tiny_draft
from tests.rollout.driving import aborted, decoder_of, finished, resumed, started
from tests.rollout.test_exactness import FEW, VOCAB, check, of_system, tiny

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [1, 2, 3]]  # of one token, and of a group
CHAIN = DecodingConfig(system="draft_model", draft_tokens=3)


def policy(rows: int = 0, same: bool = False) -> Policy:
    """A target and a draft model, in fp64; ``same``: the target drafts for itself."""
    target = bare_policy(dtype=torch.float64)
    target.draft = bare_policy(dtype=torch.float64) if same else tiny_draft(rows=rows, dtype=torch.float64)
    return target


def watched(policy: Policy, config: DecodingConfig = CHAIN, **settings: object) -> tuple[TorchEngine, list[int]]:
    """An engine that raises where a draft is of another distribution; and the drafts of each cycle that was seen."""
    engine = TorchEngine(policy, config, slots=4, max_length=64, **settings)  # type: ignore[arg-type]
    seen: list[int] = []

    def look(rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        seen.append(draft.tokens.shape[1])
        if draft.tokens.shape[1]:
            assert draft.probs is not None
            torch.testing.assert_close(draft.probs, by_one_pass(policy, rows, draft), rtol=0, atol=1e-5)

    decoder_of(engine).observers.append(look)
    return engine, seen


def by_one_pass(policy: Policy, rows: Rows, draft: Draft) -> Tensor:
    """Return what the draft model gives at each draft [B, K, V], after context and drafts before it."""
    model, found = policy.draft, []
    assert model is not None
    shared = min(model.vocab_size, policy.vocab_size)
    for size, context, own in zip(rows.sizes.tolist(), rows.context(), draft.tokens, strict=True):
        ids = torch.cat([context[:size], own[:-1]])[None].clamp_max(model.vocab_size - 1)
        hidden = model.hidden(ids, torch.arange(ids.shape[1])[None], PackedContext(torch.tensor([ids.shape[1]])))
        q = torch.zeros(draft.tokens.shape[1], policy.vocab_size)
        q[:, :shared] = model.logits(hidden)[0, size - 1 :, :shared].float().softmax(-1)
        found.append(q)
    return torch.stack(found)


def to_the_end(engine: TorchEngine) -> None:
    finished(started(engine, requests(PROMPTS, max_new_tokens=20)))


def aborted_and_resumed(engine: TorchEngine) -> None:
    asked = requests(PROMPTS, max_new_tokens=20)
    started(engine, asked, cycles=3)
    finished(started(engine, resumed(asked, aborted(engine))))


def parked(engine: TorchEngine) -> None:
    """Completions go on in another turn, from entries that were kept: those of the last draft among them."""
    done = finished(started(engine, parking(PROMPTS)))
    finished(started(engine, parking([[*p, *done[i].token_ids.tolist(), 2] for i, p in enumerate(PROMPTS)])))
    assert engine.retention.counts.hits >= len(PROMPTS) - 1


def parking(prompts: list[list[int]]) -> list[Request]:
    """Return requests that are parked, whose last cycle ends with a token after drafts that were all accepted."""
    return [replace(request, park=True) for request in requests(prompts, max_new_tokens=12)]


def after_another(engine: TorchEngine) -> None:
    """The MTP head drafts for some cycles, which the draft model reads as well."""
    started(engine, requests(PROMPTS, max_new_tokens=20), cycles=2)
    own, chain = decoder_of(engine).observers.pop(), DecodingConfig(system="bebop", draft_tokens=3)
    engine.configure(chain)
    engine.step()
    engine.configure(CHAIN)
    decoder_of(engine).observers.append(own)
    finished(engine)


WAYS: list[Callable[[TorchEngine], None]] = [to_the_end, aborted_and_resumed, parked, after_another]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"paged": False}, {"paged": True}, {"overlap": True}], ids=str)
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_each_draft_is_of_the_draft_models_distribution(
    way: Callable[[TorchEngine], None], same: bool, settings: dict[str, object]
) -> None:
    """Whether drafts are rejected or, where the target drafts for itself, all accepted."""
    engine, seen = watched(policy(same=same), **settings)
    way(engine)
    assert len(seen) > 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", [11, 15])
def test_matrices_of_the_draft_model_may_be_padded_otherwise(rows: int) -> None:
    """Of 12 tokens the last may be unknown to it: it drafts without that, and reads another in its place."""
    engine, seen = watched(policy(rows=rows))
    to_the_end(engine)
    assert len(seen) > 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", [VOCAB - 1, VOCAB + 3])
def test_the_output_distribution_is_the_target_whatever_the_padding(rows: int) -> None:
    def made() -> Policy:
        target = tiny()
        target.draft = tiny_draft(VOCAB, rows=rows, sharp=16.0)
        return target

    check(replace(of_system("draft_model"), model=made), FEW)


@pytest.mark.slow
def test_cycles_without_a_draft_are_read() -> None:
    """With ``draft_tokens=auto`` the number of drafts changes from cycle to cycle, 0 among them."""
    config = DecodingConfig(system="draft_model", draft_tokens="auto", most_drafts=3)
    engine, seen = watched(policy(same=True), config, clock=iter(range(10**6)).__next__)
    length, turns = decoder_of(engine).length, iter([3, 0, 0, 2, 0, 3, 1] * 10**3)
    assert isinstance(length, CostLength)
    length.pace.choose = lambda rows: next(turns)  # type: ignore[method-assign]
    seen.clear()
    to_the_end(engine)
    assert {0, 1, 2, 3} == {*seen}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_every_draft_is_accepted_where_the_target_drafts_for_itself(temperature: float) -> None:
    engine = TorchEngine(policy(same=True), CHAIN, slots=4, max_length=128)
    done = finished(started(engine, requests(PROMPTS, max_new_tokens=80, temperature=temperature)))
    assert all(completion.stats.accept_length == 4 for completion in done.values())


def test_a_model_without_a_draft_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"give model\.draft=DIR"):
        TorchEngine(bare_policy(), CHAIN, slots=1, max_length=16)


def test_an_engine_without_a_draft_model_does_not_change_to_one() -> None:
    engine = TorchEngine(bare_policy(), DecodingConfig(system="bebop", draft_tokens=3), slots=1, max_length=16)
    with pytest.raises(UserError, match=r"there is no model.draft"):
        engine.configure(CHAIN)


# ---- loading


def saved(folder: Path, **settings: Any) -> Policy:
    """Write a checkpoint without an MTP head, and return what was written."""
    made = bare_policy(12, **settings)
    made.mtp = None
    save_policy(made, folder)
    return made


def test_tokens_of_a_draft_model_are_those_of_the_target() -> None:
    """The first id that differs is named, and an id that one of the two lacks differs."""
    more, name = letters(12), "model.draft='x'"
    more.add_tokens(["zz"])
    check_same_tokens(letters(12), letters(12), name)
    for target, draft, line in (
        (
            letters(12, pair=3),
            letters(12),
            "model.draft='x' is not possible: token 3 is 'ab' in model.path and 'd' there",
        ),
        (letters(12), more, "token 12 is missing in model.path and 'zz' there"),
        (more, letters(12), "token 12 is 'zz' in model.path and missing there"),
    ):
        with pytest.raises(UserError, match=line):
            check_same_tokens(target, draft, name)


@pytest.mark.slow
def test_a_draft_model_is_frozen_and_has_the_type_of_the_target(tmp_path: Path) -> None:
    written = saved(tmp_path, seed=5)
    draft = load_draft(ModelConfig(path="tiny", device="cpu", dtype="bfloat16", draft=str(tmp_path)), letters(12))
    assert draft.mtp is None and not any(p.requires_grad for p in draft.backbone.parameters())
    assert draft.backbone.dtype == torch.bfloat16
    ours, wanted = draft.backbone.lm_head.weight, written.backbone.lm_head.weight
    assert torch.equal(ours, wanted.bfloat16())
    with pytest.raises(UserError, match=r"model.draft='.*' cannot be loaded"):
        load_draft(ModelConfig(path="tiny", device="cpu", draft=str(tmp_path.parent)), letters(12))


@pytest.mark.slow
def test_the_built_in_model_drafts_for_itself_in_a_job(tmp_path: Path) -> None:
    """Its whole way from the command line; new weights then part the target from the draft model, which stays."""
    small = ["task=gcd", "trainer.steps=2", "trainer.groups_per_step=2", "trainer.group_size=2", "trainer.lr=1e-2"]
    small += ["rollout.sampling.max_new_tokens=24", "rollout.staleness=0", "monitor.certify_every=1"]
    config = job_config([*small, "decoding=draft_model", "model.draft=tiny", f"runtime.dir={tmp_path}"])
    check_job(config)
    engine, _ = make(config)
    own = engine.policy.draft
    assert own is not None
    before = {name: tensor.clone() for name, tensor in own.weights().items()}
    prompt, new = own.tokenizer("12+30=")["input_ids"], {n: 1.5 * t for n, t in engine.policy.weights().items()}
    first = finished(started(engine, requests([prompt] * 4, max_new_tokens=24)))
    engine.load_weights(new, 1)
    second = finished(started(engine, requests([prompt] * 4, max_new_tokens=24)))
    assert all(done.stats.accept_length == 4 for done in first.values() if len(done.token_ids) % 4 == 0)
    assert any(done.stats.accept_length < 4 for done in second.values())
    assert all(torch.equal(before[name], tensor) for name, tensor in own.weights().items())


@pytest.mark.slow
def test_a_job_names_what_its_draft_model_lacks(tmp_path: Path) -> None:
    saved(tmp_path / "other")
    given = ["decoding=draft_model", "task=gcd"]
    with pytest.raises(
        UserError, match=r"model.draft=None is not possible: decoding=draft_model drafts with another model"
    ):
        job_config(given)
    with pytest.raises(UserError, match=r"model.draft='tiny' is not possible: decoding=bebop does not draft with it"):
        job_config(["model.draft=tiny"])
    with pytest.raises(UserError, match=r"model.draft='.*other' is not possible: token 0 is '.*' in model.path"):
        check_job(job_config([*given, f"model.draft={tmp_path / 'other'}"]))
    with pytest.raises(UserError, match=r"model.draft='.*' cannot be loaded"):
        check_job(job_config([*given, f"model.draft={tmp_path}"]))
    short = ["model.draft=tiny", "rollout.max_length=100000"]
    with pytest.raises(UserError, match=r"rollout.max_length=100000 is not possible: the model has"):
        check_job(job_config([*given, *short]))

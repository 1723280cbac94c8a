"""The certificate beside the trainer: which tokens are looked at, under which weights, what is found, and resumes."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.certify.answers import Block
from bebop.certify.evidence import Evidence
from bebop.config.job import DecodingConfig
from bebop.model.checkpoint import save_policy
from bebop.monitor.certified import Certified, chosen
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trainer.certify import SPAN, Certifier, fair, window
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.rank import TrainerRank
from bebop.trajectory import Batch, Completion, Group, Prompt, SamplingParams, Trajectory
from tests.cases import slow_but
from tests.rollout.test_exactness import BonusFromTheLastDraftRow
from tests.trainer.builders import TEMPERATURE, job, policy
from tests.trainer.test_old_policies import Run, one_tensor_missing

PROMPTS = ((1, 2, 3), (4, 5), (6,), (7, 8, 9))


def test_windows_cover_answers_of_any_length() -> None:
    assert {window(number, 100) for number in range(9)} == {range(0, SPAN)}
    long = [window(number, 2000) for number in range(12)]
    assert [w.start for w in long] == [0, SPAN, 2 * SPAN, 4 * SPAN] * 3 and {len(w) for w in long} == {SPAN}
    assert window(1, SPAN) == range(0, SPAN) and window(1, SPAN + 1) == range(SPAN, 2 * SPAN)


def completion(versions: Sequence[int], contexts: Sequence[int] | None) -> Completion:
    own = np.array(versions)
    zeros = np.zeros(len(own))
    seen = None if contexts is None else np.array(contexts)
    return Completion(token_ids=zeros.astype(np.int64), logprobs=zeros.astype(np.float32), versions=own, contexts=seen)


@pytest.mark.parametrize(
    ("versions", "contexts", "wanted"),
    [
        ([2, 2, 3, 3], [2, 2, 3, 3], {2: [0, 1], 3: [2, 3]}),  # all was computed again
        ([2, 2, 3, 3], [2, 2, 2, 2], {2: [0, 1]}),  # keys and values of before were kept
        ([2, 2, 3, 3], None, {2: [0, 1]}),  # an engine that does not say
        ([1, 2, 3, 4], [1, 2, 3, 4], {2: [1], 3: [2]}),  # the others are not at hand
        ([3] * 6, [3] * 6, {3: [0, 1, 2, 3]}),  # beyond the window
    ],
)
def test_tokens_of_one_version_that_is_at_hand(
    versions: list[int], contexts: list[int] | None, wanted: dict[int, list[int]]
) -> None:
    found = fair(completion(versions, contexts), range(0, 4), [2, 3])
    assert {version: places.tolist() for version, places in found.items()} == wanted


class Seeing(Run):
    """The asynchronous run of ``test_old_policies`` with readings, whose blocks are kept."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, certify_every=1)
        self.certifier = Certifier(self.trainer.scorer, self.trainer.old_policies, self.trainer.config)
        self.blocks: list[Block] = []
        self.batches: list[Batch] = []
        update = self.certifier.ledger.update
        self.certifier.ledger.update = lambda block: (self.blocks.append(block), update(block))[1]  # type: ignore

    def look(self, batch: Batch) -> None:
        self.batches.append(batch)
        assert self.certifier.read(chosen(batch.groups), 0, self.trainer.version) is not None


@pytest.mark.slow
@pytest.mark.parametrize("on_update", slow_but(["recompute"], ["keep", "recompute"]))
def test_each_token_is_held_against_the_weights_that_wrote_it(on_update: str) -> None:
    run = Seeing(on_update)
    for _ in range(4):
        run.step()
    straddling = 0
    for version, (block, batch) in enumerate(zip(run.blocks, run.batches, strict=True)):
        own = [t.completion for group in batch.groups for t in group.trajectories]
        whole = [c.versions == c.oldest for c in own]
        assert len(block) == sum(int(mask.sum()) for mask in whole) > 20
        assert block.tokens.tolist() == [int(t) for c, m in zip(own, whole, strict=True) for t in c.token_ids[m]]
        assert block.request.tolist() == sorted(block.request.tolist())
        assert block.reported is not None and float((block.reported - block.logprobs).abs().max()) < 1e-4
        assert float((block.probs.sum(1) - 1).abs().max()) < 1e-12
        straddling += version > 0 and any(len(set(c.versions[m].tolist())) > 1 for c, m in zip(own, whole, strict=True))
    assert (straddling > 0) == (on_update == "recompute")
    first = [batch.groups[0].trajectories[0].completion for batch in run.batches]
    assert any((c.versions < version).any() for version, c in enumerate(first))


@pytest.mark.slow  # test_old_policies.py has the same fault in the quick suite
def test_weights_that_did_not_arrive_show_in_the_log_probs() -> None:
    run = Seeing("recompute", one_tensor_missing)
    for _ in range(3):
        run.step()
    assert max(float((b.reported - b.logprobs).abs().max()) for b in run.blocks if b.reported is not None) > 1e-2


@pytest.mark.slow
def test_looking_changes_nothing() -> None:
    """Weights go on to the bit as without readings, and so do torch's random numbers."""
    plain, seeing = Run("recompute"), Seeing("recompute")
    before = torch.get_rng_state()
    for _ in range(2):
        plain.step()
        seeing.step()
    ours, wanted = seeing.trainer.weights(), plain.trainer.weights()
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    assert torch.equal(torch.get_rng_state(), before) and seeing.trainer.scorer.kept is None


def drawn(readings: int, temperature: float = TEMPERATURE, fault: str = "", size: int = 8) -> list[list[Group]]:
    """Answers of an engine with the trainer's weights, ``size`` pairs a reading."""
    source = policy()
    engine = TorchEngine(source, DecodingConfig(system="bebop", draft_tokens=1), slots=64, max_length=48)
    if fault == "bonus":
        engine.decoder.rule = BonusFromTheLastDraftRow()  # type: ignore[attr-defined]
    asked, stops = [], source.eos_token_ids
    for i in range(readings * size * 2):
        seed = i // 2 if fault == "seeds" else i
        sampling = SamplingParams(temperature=temperature, max_new_tokens=20, seed=seed, stop_token_ids=stops)
        asked.append(Request(id=i, token_ids=PROMPTS[i // 2 % len(PROMPTS)], params=sampling))
    answers = generate(engine, asked)

    def group(i: int) -> Group:
        prompt = Prompt(index=i, task="test", text="", token_ids=PROMPTS[i % len(PROMPTS)], item={})
        pair = tuple(Trajectory.single(completion=c, reward=0.0) for c in answers[2 * i : 2 * i + 2])
        return Group(prompt=prompt, trajectories=pair)

    return [[group(r * size + i) for i in range(size)] for r in range(readings)]


def certifier(every: int = 1) -> Certifier:
    trainer = PolicyTrainer(policy(), job(monitor={"certify_every": every}))
    return Certifier(trainer.scorer, trainer.old_policies, trainer.config)


def said(readings: Sequence[Sequence[Group]], since: int = 0) -> Certified:
    own = certifier()
    last = [own.read(groups, since, 0) for groups in readings][-1]
    assert last is not None
    return last


@pytest.fixture(scope="module")
def clean() -> list[list[Group]]:
    return drawn(14)


def test_an_intact_engine_passes(clean: list[list[Group]]) -> None:
    last = said(clean)
    assert not last.failed and last.highest < 3 and last.tokens > 2500
    assert last.tv is not None and 0 < last.tv <= 1


FAULTS = [
    ("bonus", TEMPERATURE, {"wrong_row"}),
    ("seeds", TEMPERATURE, {"shared_randomness"}),
    ("", 1.15 * TEMPERATURE, {"sharpness", "reported_logprobs"}),
]


@pytest.mark.parametrize(("fault", "temperature", "causes"), slow_but([FAULTS[0]], FAULTS, several=True))
@pytest.mark.slow
def test_a_fault_is_found_and_named(fault: str, temperature: float, causes: set[str]) -> None:
    last = said(drawn(14, temperature, fault))
    assert last.failed and last.cause in causes and last.sentence


def test_reports_that_no_token_follows_are_named_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong context would give the same evidence; claimed over reported probability tells them apart."""
    own = certifier()
    strengths = {"": 50.0, "_far": 40.0, "_high": 40.0, "_low": 20.0, "_hot": 5.0, "_cold": 5.0}
    same = {"group": "reported", "weight": 0.1, "share": None, "tv": None}
    told = [Evidence(name=f"reported{name}", log_e=log_e, **same) for name, log_e in strengths.items()]  # type: ignore
    monkeypatch.setattr(own.ledger, "evidence", lambda: told)
    own.ledger.highest, own.ledger._reported._odds = 50.0, np.array([50.0, 10.0])
    assert own._certified().cause == "reported_logprobs"


def test_answers_of_an_inexact_system_are_not_weighed(clean: list[list[Group]]) -> None:
    first = clean[0][0]
    inexact = dataclasses.replace(first.trajectories[0].completion, exact=False)
    mixed = dataclasses.replace(first, trajectories=(Trajectory.single(inexact, reward=0.0),))
    own = certifier()
    assert own.read([mixed, *clean[0][1:]], 0, 0) is None and own.ledger.tokens == 0


def test_evidence_begins_again_where_it_has_to(clean: list[list[Group]]) -> None:
    own = certifier()
    tokens = [own.read(groups, since, 0).tokens for groups, since in zip(clean, (0, 0, 5, 5), strict=False)]  # type: ignore
    assert tokens[0] < tokens[1] > tokens[2] < tokens[3] and own.since == 5


def test_a_reading_without_a_fair_token_says_what_was_known(clean: list[list[Group]]) -> None:
    own = certifier()
    before = own.read(clean[0], 0, 0)
    again = own.read(clean[1], 0, 7)  # weights of version 0 are not at hand any more
    assert before == again


def test_a_checkpoint_holds_the_evidence(clean: list[list[Group]], tmp_path: Path) -> None:
    save_policy(policy(), tmp_path / "model")
    config = job(str(tmp_path / "model"), monitor={"certify_every": 1})
    one, other = TrainerRank(config), TrainerRank(config)
    for groups in clean[:2]:
        one.certify(groups, 3)
    one.save(tmp_path / "step_000004", {})
    other.load(tmp_path / "step_000004")
    assert other.certifier.since == 3
    for groups in clean[2:4]:
        wanted, found = one.certify(groups, 3), other.certify(groups, 3)
        assert wanted == found, "to the bit"
    fresh = TrainerRank(config)
    assert [fresh.certify(groups, 3) for groups in clean[2:4]][-1] != wanted
    assert [c.tokens for c in (wanted, found) if c] == [one.certifier.ledger.tokens] * 2


def test_evidence_of_another_version_of_bebop_begins_again(
    clean: list[list[Group]], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = certifier(), certifier()
    one.read(clean[0], 2, 0)
    state = one.state_dict()
    del state["ledger"]["bets"]
    other.load_state_dict(state)
    assert other.since == 2 and other.ledger.tokens == 0 and "begins again" in caplog.text

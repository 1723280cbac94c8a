"""The strongest direction names the fault: planted faults in closed form, and evidence made by hand."""

from dataclasses import replace

import pytest
import torch

from bebop.certify.answers import Block
from bebop.certify.certificate import CAUSES, NAMED, cause
from bebop.certify.directions import verified
from bebop.certify.evidence import Evidence
from bebop.certify.ledger import EVENT_NAMES, FAMILY, Ledger
from tests.cases import slow_but
from tests.certify.blocks import Fault, block

M = 32


def unit(r: torch.Tensor) -> torch.Tensor:
    return r / r.sum(-1, keepdim=True)


def mixed(share: float, r: Fault) -> Fault:
    return lambda given: (1 - share) * given.probs + share * r(given)


def one_draft(given: Block, drawn: torch.Tensor | None = None, recovered: torch.Tensor | None = None) -> torch.Tensor:
    """What verification of one draft samples, with drafts or recovered tokens from something else."""
    p, q = given.probs, given.draft
    assert q is not None
    accept = (p / q).clamp_max(1)
    residual = unit((p - q).clamp_min(0))
    return verified(p, q if drawn is None else drawn, accept, residual if recovered is None else recovered)


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "row before": (mixed(0.05, lambda given: given.before), {"wrong_row"}),
    "row of a neighbour": (mixed(0.1, lambda given: given.probs.roll(20, 0)), {"wrong_row"}),
    "hotter": (lambda given: unit(given.probs**0.85), {"sharpness"}),
    "colder": (lambda given: unit(given.probs**1.2), {"sharpness"}),
    "top-p": (lambda given: unit(given.probs * (given.probs > 0.015)), {"truncation"}),
    "stops suppressed": (lambda given: unit(given.probs.index_fill(1, torch.tensor([1, 3]), 0.0)), {"stop_token"}),
    "one token written": (mixed(0.02, lambda given: torch.eye(M).double()[torch.full((len(given),), 9)]), {"override"}),
    "recovered from p": (lambda given: one_draft(given, recovered=given.probs), {"draft_leak"}),
    "drafts drawn hotter": (lambda given: one_draft(given, drawn=unit(given.draft**0.7)), {"draft_leak"}),
    "seen tokens": (lambda given: unit(given.probs * (1 + given.seen)), {"context"}),
}  # fmt: skip


# One of each cause; the others have a cause in common with one of these.
QUICK = [name for name in FAULTS if name not in ("row of a neighbour", "colder", "drafts drawn hotter")]


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    fault, names = FAULTS[name]
    ledger, cohorts = Ledger(M, enumerate_rows=False), 0
    while ledger.log_e <= 9.22 and cohorts < 6:  # named where a certificate would stop
        ledger.update(block(1000, M, seed=cohorts, first=50 * cohorts, fault=fault))
        cohorts += 1
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name in names
    assert ledger.positions(3)


def shared_seeds(seed: int) -> Block:
    """Every second request with the uniforms of the one before."""
    given = block(1000, M, seed=seed, first=50 * seed)
    u = torch.rand(25, 20, generator=torch.Generator().manual_seed(seed)).repeat_interleave(2, 0).ravel()
    cells = (given.probs.cumsum(-1) < u[:, None]).sum(-1).clamp_max(M - 1)
    chosen = given.probs.gather(1, cells[:, None])[:, 0].log()
    return replace(given, tokens=cells, cells=cells, logprobs=chosen, reported=chosen, declared=chosen, twin=None)


def test_shared_seeds_are_found_and_named() -> None:
    ledger = Ledger(M)
    for i in range(3):
        ledger.update(shared_seeds(i))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == "shared_randomness"


def test_copies_of_a_twin_are_found_and_named() -> None:
    ledger = Ledger(M)
    for i in range(3):
        given = block(1000, M, seed=i, first=50 * i)
        struck = (torch.arange(1000) % 10 == 0) & (given.twin >= 0)
        cells = torch.where(struck, given.twin, given.cells)
        chosen = given.probs.gather(1, cells[:, None])[:, 0].log()
        ledger.update(replace(given, tokens=cells, cells=cells, logprobs=chosen, reported=chosen, declared=chosen))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == "shared_randomness"
    assert ledger.positions(1)[0][2] > 0


def reports(truth: Fault, told: Fault, seed: int) -> Block:
    """Tokens drawn from ``truth``, log-probs of ``told``."""
    given = block(1000, M, seed=seed, first=50 * seed, fault=truth)
    return replace(given, reported=told(given).gather(1, given.cells[:, None])[:, 0].log())


def jittered(size: float) -> Fault:
    def fault(given: Block) -> torch.Tensor:
        noise = torch.randn(given.probs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        return (given.probs.log() + size * noise).softmax(-1)

    return fault


def sometimes(fault: Fault, one_in: int) -> Fault:
    return lambda given: torch.where((torch.arange(len(given)) % one_in == 0)[:, None], fault(given), given.probs)


right: Fault = lambda given: given.probs  # noqa: E731
REPORTS: dict[str, tuple[Fault, Fault, str]] = {
    "of the draft, one in a hundred": (right, sometimes(lambda given: given.draft, 100), "reported_logprobs"),
    "weights a little off": (jittered(0.01), jittered(0.01), "weights"),
    "temperature 1 % off": (*[lambda given: unit(given.probs**0.99)] * 2, "sharpness"),
    "another context, one in ten": (*[sometimes(jittered(1.0), 10)] * 2, "context"),
    "top-p in secret": (*[lambda given: unit(given.probs * (given.probs > 0.005))] * 2, "truncation"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_wrong_reports_are_found_and_named(name: str) -> None:
    truth, told, wanted = REPORTS[name]
    ledger = Ledger(M, enumerate_rows=False)
    for i in range(2):
        ledger.update(reports(truth, told, i))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == wanted


def test_a_setting_that_was_not_applied_is_told_from_a_temperature() -> None:
    assert cause([one("unprocessed"), one("bigram", log_e=5)]).name == "truncation"
    assert cause([one("unprocessed"), one("hotter", log_e=15)]).name == "sharpness"


def one(name: str, group: str = "contamination", log_e: float = 20.0) -> Evidence:
    return Evidence(name=name, group=group, log_e=log_e, weight=0.01, share=None, tv=None)


def test_every_direction_has_a_cause_with_a_sentence() -> None:
    for name, (group, _) in FAMILY.items():
        if name not in EVENT_NAMES:
            assert cause([one(name, group)]).name != "unknown", name
    assert set(NAMED.values()) <= set(CAUSES)
    for name, sentence in CAUSES.items():
        assert "look at" in sentence and sentence.endswith("."), name


def test_the_look_inside_names_its_draw_and_structure_comes_first() -> None:
    assert cause([one("hotter", "draft_draw")]).name == "draft_draw"
    assert cause([one("lenient", "acceptance", 30), one("hotter", "draft_draw")]).name == "acceptance"
    assert cause([one("hotter")], structure=True).name == "structure"
    assert cause([]).name == "unknown"

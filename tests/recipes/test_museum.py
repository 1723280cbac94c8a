"""The museum: each planted fault follows its law, look-alikes are exact, and verdicts follow the rules."""

import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify import __main__ as certify
from bebop.certify.declared import known_rule
from bebop.certify.embedded import WatchedRule
from bebop.certify.white_box import WhiteBox
from bebop.errors import UserError
from bebop.rollout.decoding.base import Accepted, Draft
from recipes.certify.museum import damage, engines, page, planted, study
from recipes.certify.museum.damage import Damage, Place
from recipes.certify.museum.engines import BoxResult, RunResult
from recipes.certify.museum.exhibits import ATTACKS, CLEAN, EXHIBITS, LOOK_ALIKES, Exhibit
from recipes.reproduce.certificate.verification import Chain, verified

ROWS, SIZE, DRAFTS, HEAT = 6000, 24, 3, 2.0
ALL = {one.name: one for one in (*EXHIBITS, *LOOK_ALIKES)}
NOT_WRONG_HERE = ("sglang-35771", "deepspec-31", "ascend-2881")  # at a cycle's first place


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Cycles over random rows, decoded by an exhibit's parts."""

    chain: Chain
    q: Tensor  # [B, K, V] as the engine would process it
    logits: Tensor  # [B, K, V] the draft's
    accepted: Tensor
    following: Tensor

    @property
    def first(self) -> Tensor:
        """The first token of each cycle."""
        return torch.where(self.accepted > 0, self.chain.tokens[:, 0], self.following)


def drawn(exhibit: Exhibit, seed: int = 0, size: float | None = None) -> Drawn:
    numbers = torch.Generator().manual_seed(seed)
    raw = 2 * torch.randn(ROWS, 4, SIZE, generator=numbers, dtype=torch.float64)
    logits = raw[:, :3] + torch.randn(ROWS, 3, SIZE, generator=numbers, dtype=torch.float64)
    p, q = (raw / HEAT).softmax(-1), (logits / HEAT).softmax(-1)
    rule, draw = exhibit.fault.make()
    u = torch.rand(ROWS, 8, generator=numbers, dtype=torch.float64)
    tokens, recorded = [], []
    for at in range(DRAFTS):
        step = planted.Step(logits=logits[:, at].float(), q=q[:, at], u=u[:, at], temperature=HEAT)
        token, own = (planted.sample(step.q, step.u), step.q) if draw is None else draw(step)
        tokens.append(token)
        recorded.append(planted.one_hot(token, step.q) if own is None else own)
    chain = Chain(
        tokens=torch.stack(tokens, 1), q=torch.stack(recorded, 1), p=p, u=u[:, 3:], heat=HEAT,
        size=exhibit.fault.size if size is None else size, struck=torch.ones(ROWS, dtype=torch.bool),
    )  # fmt: skip
    accepted, following = verified(chain) if rule is None else rule(chain, numbers)
    return Drawn(chain, q, logits, accepted, following)


def far(tokens: Tensor, law: Tensor) -> float:
    """The largest standard score of a token's count, where row i has the law [i, V]."""
    counts = torch.bincount(tokens, minlength=SIZE)
    spread = (law * (1 - law)).sum(0).clamp_min(1).sqrt()
    return float(((counts - law.sum(0)) / spread).abs().max())


def toward(tokens: Tensor, law: Tensor, p: Tensor) -> float:
    """The standard score of the likelihood ratio law / p of tokens [n], if they follow p [n, V]."""
    gain = (law / p.clamp_min(1e-12)).clamp_max(20)
    mean = (p * gain).sum(-1)
    spread = ((p * gain**2).sum(-1) - mean**2).sum().clamp_min(1e-12).sqrt()
    return float((gain.gather(1, tokens[:, None])[:, 0] - mean).sum() / spread)


def place(one: Drawn) -> Place:
    return Place(p=one.chain.p[:, 0], q=one.q[:, 0], logits=one.logits[:, 0].float(), later=one.chain.p[:, 1:3],
                 later_q=one.q[:, 1:], temperature=HEAT)  # fmt: skip


def sorted_by_law(tokens: Tensor, law: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and law in the order of each row's likelihood: what all rows have in common shows there."""
    order = law.argsort(-1, descending=True)
    return (order == tokens[:, None]).int().argmax(-1), law.gather(1, order)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_a_planted_fault_follows_its_law_and_not_the_claim(name: str) -> None:
    exhibit, one = ALL[name], drawn(ALL[name])
    assert exhibit.law is not None
    law, p = exhibit.law(place(one)).written(), one.chain.p[:, 0]
    assert torch.allclose(law.sum(-1), torch.ones(ROWS, dtype=torch.float64))
    assert far(one.first, law) < 5 and far(*sorted_by_law(one.first, law)) < 5
    exact = exhibit in LOOK_ALIKES or name in NOT_WRONG_HERE
    assert (toward(one.first, law, p) > 3.5) != exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ascend-2881", "sglang-32922", "lattice-388", "jaymody-3"])
def test_the_bonus_follows_its_law(name: str) -> None:
    one = drawn(ALL[name])
    full = one.accepted == DRAFTS
    p, last = one.chain.p[full, -1], one.chain.tokens[full, -1]
    law = ALL[name].bonus(p, last, HEAT)
    assert full.sum() > 5 and far(*sorted_by_law(one.following[full], law)) < 5
    wrong = (law - p).abs().sum() > 1e-9
    assert wrong == (name != "jaymody-3")


def test_a_coin_of_zero_accepts_what_the_target_excludes() -> None:
    given = drawn(CLEAN)
    own = given.chain.tokens[:, :1]
    p = given.chain.p.clone()
    p[:, 0] = planted.unit(p[:, 0].scatter(1, own, 0.0))
    for size, stands in ((1.0, True), (0.0, False)):
        chain = dataclasses.replace(given.chain, p=p, size=size)
        accepted, _ = planted.zero_coin(chain, torch.Generator().manual_seed(1))
        assert (accepted > 0).all() if stands else not (accepted > 0).any()


def watched(one: Drawn, rule: Any) -> WhiteBox:
    """A white box after 2,000 cycles of an engine that declares a rule."""
    box, chain, few = WhiteBox(), one.chain, slice(2000)
    draft = Draft(tokens=chain.tokens[few], probs=chain.q[few])
    inner = SimpleNamespace(exact=True, stepwise=True, layers=(), counts=())
    inner.accept = lambda *given: Accepted.chain(draft, one.accepted[few], one.following[few])
    rows = SimpleNamespace(batch=2000, slots=SimpleNamespace(stops=torch.full((2000, 1), -1)))
    out = SimpleNamespace(probs=chain.p[few], rows=None)
    WatchedRule(inner, box, rule).accept(rows, draft, out, chain.u)  # type: ignore[arg-type]
    return box


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle-329", "mlx-swift-459"])
def test_look_alikes_pass_where_the_engine_declares_its_rule(name: str) -> None:
    one = drawn(ALL[name])
    assert watched(one, "rejection").found is not None
    assert watched(one, "one_hot").highest < math.log(20)


@pytest.mark.slow
def test_a_fault_is_found_under_a_declared_rule_as_well() -> None:
    assert watched(drawn(ALL["ascend-13470"]), "one_hot").found is not None


def test_a_rule_that_is_not_known_is_refused() -> None:
    with pytest.raises(UserError, match="rule='exact' is unknown: give one of rejection, one_hot"):
        known_rule("exact")  # type: ignore[arg-type]


# ---- rules and numbers


def box(found: int | None, cause: str = "draft_leak") -> BoxResult:
    evidence = (("draft", "draft", 20.0, 0.01),)
    return BoxResult(found=found, tokens=found or 9, log_e=20.0, highest=20.0, cause=cause, evidence=evidence)


def run(black: int | None, white: int | None = None) -> RunResult:
    return RunResult(black=box(black), white=box(white), acceptance=0.5)


FAINT = Damage(tv=1e-6, kl=1e-9, kl_inside=1e-9, forbidden=0.0)
PLAIN = Damage(tv=0.1, kl=0.1, kl_inside=0.1, forbidden=0.0)


@pytest.mark.parametrize(
    ("found", "moved", "seen"),
    [
        ([900] * 4 + [None], PLAIN, "yes"),
        ([900] * 3 + [None] * 2, PLAIN, "missed"),
        ([900] * 3, PLAIN, "not finished"),
        ([None] * 5, FAINT, "no test can"),
        ([], PLAIN, "not run"),
    ],
)
def test_verdicts_follow_the_rules(found: list[int | None], moved: Damage, seen: str) -> None:
    runs = {1.0: [run(one) for one in found], 2.0: []}
    assert study.judge(runs, {1.0: moved, 2.0: FAINT}, study.Plan()).seen == seen


def test_a_run_counts_where_either_box_found_it() -> None:
    runs = {1.0: [run(None, 50)] * 4 + [run(None)], 2.0: []}
    assert study.judge(runs, {1.0: PLAIN, 2.0: PLAIN}, study.Plan()) == study.Verdict(seen="yes", temperature=1.0)


@pytest.mark.slow
def test_the_likelihood_ratio_reaches_its_level_in_four_of_five_runs() -> None:
    level, steps = math.log(1e4), 2000
    mean = damage._growth(level)
    gains = np.random.default_rng(0).normal(mean / steps, math.sqrt(2 * mean / steps), (4000, steps))
    reached = (gains.cumsum(1).max(1) >= level).mean()
    assert level < mean < 2 * level and reached == pytest.approx(damage.POWER, abs=0.03)


def test_a_single_token_that_cannot_come_is_a_proof() -> None:
    rare = dataclasses.replace(FAINT, forbidden=1e-4)
    assert rare.tokens(1e-4) == pytest.approx(-math.log(0.2) / 1e-4) and FAINT.tokens(1e-4) > 1e9


def test_every_exhibit_has_a_source_a_law_and_right_causes() -> None:
    from bebop.certify.certificate import CAUSES

    names = [one.name for one in (*EXHIBITS, *LOOK_ALIKES, *ATTACKS)]
    assert len(set(names)) == len(names) and len(EXHIBITS) >= 12
    for one in EXHIBITS:
        assert one.law is not None and one.wrong.endswith(".") and one.black and one.white
    for one in (*EXHIBITS, *ATTACKS):
        assert {*one.black, *one.white} <= set(CAUSES), one.name
    assert ALL["atom-2318"].url == "https://github.com/ROCm/ATOM/issues/2318" and not ALL["sglang-ngram"].url


# ---- whole runs


@pytest.mark.slow
def test_an_engine_is_intact_again_after_a_fault() -> None:
    engine = engines.engine_of("random")
    before = engine.decoder.rule, engine.decoder.drafter
    with planted.planted(engine, ALL["jaymody-3"].fault, 1.0, 0):
        assert engine.decoder.drafter is not before[1]
    with planted.planted(engine, ALL["ascend-13470"].fault, 1.0, 0):
        assert engine.decoder.rule is not before[0]
    assert (engine.decoder.rule, engine.decoder.drafter) == before


@pytest.mark.slow
def test_a_study_goes_on_and_its_page_has_every_exhibit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = dataclasses.replace(study.SMOKE, budget=400, other=400)
    moved = {one.name: {1.0: PLAIN, 2.0: FAINT} for one in EXHIBITS}
    jobs = [job for job in study.faults(plan, moved) if job.exhibit.name in ("ascend-13470", "shifted-logprobs")]
    study.run_jobs(tmp_path, jobs[:3], "some")
    made = sorted(tmp_path.iterdir())
    assert len(made) == 3
    monkeypatch.setattr(study, "examine", None)  # nothing is run again
    study.run_jobs(tmp_path, jobs[:3], "some")
    rows, causes, sums = page.gather(tmp_path, moved, plan)
    text = page.page(rows, causes, sums, {})
    assert all(one.source in text for one in (*EXHIBITS, *LOOK_ALIKES))
    assert sums["not run"] == len(EXHIBITS) - 1 and sums["proofs"] >= 1


@pytest.mark.slow
def test_clean_runs_are_added_to_a_record_whose_runs_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are those of all clean runs in one folder, and nothing else of the record changes."""
    monkeypatch.setattr(study, "SMOKE", dataclasses.replace(study.SMOKE, clean_runs=3, clean_tokens=100))
    plan, first = study.SMOKE, dataclasses.replace(study.SMOKE, clean_runs=2)
    study.run_jobs(tmp_path / "all", study.clean(plan), "clean")
    moved = {one.name: {1.0: PLAIN, 2.0: FAINT} for one in EXHIBITS}
    page.store(tmp_path, page.gather(tmp_path / "all", moved, first), {}, first)
    certify.main(["--museum", "--smoke", "--rest", "--out", str(tmp_path / "new"), "--record", str(tmp_path)])
    stored = json.loads((tmp_path / "museum.json").read_text())
    rows, _, sums = page.gather(tmp_path / "all", moved, plan)
    assert {name: stored["settings"][name] for name in sums} == sums and stored["rows"] == rows
    assert len([*(tmp_path / "new").glob("*.json")]) == 1, "those of the record are not made again"
    with pytest.raises(UserError, match="--rest adds to a record that is there"):
        certify.main(["--museum", "--rest", "--out", str(tmp_path / "new")])


def test_the_command_refuses_what_it_does_not_know() -> None:
    with pytest.raises(UserError, match="--fast"):
        certify.main(["--museum", "--fast"])
    with pytest.raises(UserError, match="give a number from 0 to"):
        certify.main(["--museum", "--clean-runs", "-1"])


def test_the_command_says_what_it_needs_without_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="recipes")

    monkeypatch.setattr(certify, "import_module", absent)
    with pytest.raises(UserError, match="needs a checkout"):
        certify.main(["--museum"])

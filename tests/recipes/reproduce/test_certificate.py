"""The planted faults do what they say and nothing else, and the study computes what its rules ask for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify.embedded import EmbeddedEngine
from bebop.kernels.verify import chain_verify
from bebop.model.backbone import Policy
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams
from recipes.reproduce.certificate import analysis, clean, faults, runs
from recipes.reproduce.certificate.clean import Simulated, share_beyond
from recipes.reproduce.certificate.faults import DRAFTS, Planted, live
from recipes.reproduce.certificate.findings import CASES, HARMLESS
from recipes.reproduce.certificate.jobs import BESIDE, Everything, plan
from recipes.reproduce.certificate.runs import Look
from recipes.reproduce.certificate.verification import ODD, RULES, Chain, verified
from tests.builders import tiny_policy
from tests.cases import slow_but
from tests.recipes.reproduce.synthetic import check_names

ROWS, SIZE = 4000, 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Policy:
    policy = tiny_policy(SIZE)
    monkeypatch.setattr(faults, "trusted", lambda: policy)
    return policy


# ---- verification


def chain(size: float, heat: float = 2.0, seed: int = 0) -> Chain:
    numbers = torch.Generator().manual_seed(seed)
    p = torch.randn(ROWS, 4, SIZE, generator=numbers, dtype=torch.float64).softmax(-1)
    q = (p[:, :3].log() + 0.7 * torch.randn(ROWS, 3, SIZE, generator=numbers, dtype=torch.float64)).softmax(-1)
    tokens = torch.multinomial(q.reshape(-1, SIZE), 1, generator=numbers).reshape(ROWS, DRAFTS)
    u = torch.rand(ROWS, 5, generator=numbers, dtype=torch.float64)
    struck = torch.rand(ROWS, generator=numbers) < size
    return Chain(tokens=tokens, q=q, p=p, u=u, size=size, heat=heat, struck=struck)


@pytest.mark.slow
def test_without_a_fault_it_is_the_engines_own_rule() -> None:
    one = chain(1.0)
    wanted = chain_verify(one.tokens, one.q, one.p, one.u)
    assert all(torch.equal(a, b) for a, b in zip(verified(one), wanted, strict=True))


@pytest.mark.parametrize("kind", RULES)
def test_a_fault_strikes_where_it_says(kind: str) -> None:
    strength = kind in ("over-acceptance", "power of acceptance", "unlikely drafts dropped", "override")
    one = chain({"override": 0.02, "unlikely drafts dropped": 0.1}.get(kind, 0.3))
    wanted = verified(one)
    found = RULES[kind](one)
    counts, token = (a != b for a, b in zip(found, wanted, strict=True))
    changed = counts | token
    assert 0.001 < changed.double().mean() < (0.6 if strength else 0.35)
    rejected = wanted[0] < DRAFTS
    if not strength:
        assert not changed[~one.struck].any()
    if kind == "bonus row":
        assert not changed[rejected].any()
    if kind in ("residual not normalised", "residual = p", "q of the row before", "u reused"):
        assert not counts.any() and not changed[~rejected].any()
    if kind in ("over-acceptance", "power of acceptance"):
        assert (found[0] >= wanted[0]).all()
    if kind == "unlikely drafts dropped":
        assert (found[0] <= wanted[0]).all()
        kept = torch.arange(DRAFTS) < found[0][:, None]
        assert one.at(one.q)[kept].min() >= 0.1 > one.at(one.q)[torch.arange(DRAFTS) < wanted[0][:, None]].min()
    if kind == "override":
        assert not counts.any() and (found[1][token] == ODD).all()
        assert float(token.double().sum() / (wanted[0] + 1).sum()) == pytest.approx(0.02 * (1 - 1 / SIZE), rel=0.25)


# ---- the engine's other hooks


def answers(planted: Planted, count: int = 8, seed: int = 3, *, told: Callable[[EmbeddedEngine], None] | None = None):
    engine = live(planted, seed)
    if told is not None:
        told(engine)
    params = SamplingParams(max_new_tokens=40, stop_token_ids=(SIZE - 1,), temperature=planted.heat)
    asked = [
        Request(id=i, token_ids=(1, 2 + i // 2), params=SamplingParams(**{**_fields(params), "seed": 50 + i}))
        for i in range(count)
    ]
    return engine.sample(asked, lambda tokens: None)


def _fields(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in params.__slots__}


def same(one, other) -> list[bool]:
    return [np.array_equal(a.token_ids, b.token_ids) for a, b in zip(one, other, strict=True)]


HOOKS = ("drafts hotter", "argmax as sampled", "stops filtered", "stale cache", "temperature off")


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["argmax as sampled"], HOOKS))
def test_of_size_zero_nothing_changes_and_of_size_one_something_does(kind: str) -> None:
    intact = answers(Planted())
    assert all(same(answers(Planted(kind=kind, size=0.0)), intact))
    assert not all(same(answers(Planted(kind=kind, size=1.0)), intact))


@pytest.mark.slow
def test_drafts_are_drawn_as_the_fault_says() -> None:
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(engine: EmbeddedEngine) -> None:
        decoder = engine.engine.decoder
        assert isinstance(decoder, DraftVerify)
        accept = decoder.rule.accept

        def watching(rows, draft, out, uniforms):  # type: ignore[no-untyped-def]
            seen.append((draft.tokens, draft.probs))
            return accept(rows, draft, out, uniforms)

        decoder.rule.accept = watching  # type: ignore[method-assign]

    answers(Planted(kind="argmax as sampled"), told=spy)
    assert all(torch.equal(tokens, probs.argmax(-1)) for tokens, probs in seen)
    seen.clear()
    answers(Planted(kind="stops filtered"), told=spy)
    assert all((tokens != SIZE - 1).all() for tokens, _ in seen) and max(float(q[..., -1].max()) for _, q in seen) > 0.1


@pytest.mark.slow
def test_what_is_asked_for_and_told() -> None:
    intact, shared = answers(Planted()), answers(Planted(kind="shared seeds"))
    assert same(shared, intact) == [True, False] * 4 and [a.seed for a in shared] == [50 + i for i in range(8)]
    assert np.array_equal(shared[0].token_ids, shared[1].token_ids), "the same prompt and seed"
    assert not any(np.array_equal(intact[i].token_ids, intact[i + 1].token_ids) for i in (0, 4))
    wrong = answers(Planted(kind="wrong log-probs", size=0.5))
    assert all(same(wrong, intact))
    off = np.concatenate([a.logprobs != b.logprobs for a, b in zip(wrong, intact, strict=True)])
    assert 0.3 < off.mean() < 0.7


def test_weights(small: Policy) -> None:
    before = {name: w.clone() for name, w in small.weights(mtp=True).items()}
    for kind, size in (("weights off", 1e-3), ("zeroed head", 1.0), ("stale head", 1.0)):
        policy = live(Planted(kind=kind, size=size), 0).engine.policy
        moved = {name: float((w - before[name]).abs().max()) for name, w in policy.weights(mtp=True).items()}
        head = {name for name in moved if name.startswith("mtp.")}
        if kind == "weights off":
            assert all(moved[name] == 0 for name in head)
            assert all(moved[name] == pytest.approx(1e-3, rel=1e-3) for name in moved.keys() - head)
        else:
            assert all(moved[name] == 0 for name in moved.keys() - head) and max(moved[name] for name in head) > 0
    assert all(torch.equal(w, before[name]) for name, w in small.weights(mtp=True).items()), "the trusted one stays"


# ---- runs


@pytest.mark.slow
def test_runs_of_the_built_in_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = runs.black_box(Planted(kind="bonus row", size=0.3), 2000, seed=1)
    assert found.found is not None and found.cause == "wrong_row" and found.alarm and found.tokens <= 2000
    inside = runs.white_box(Planted(kind="residual = p"), 2000, seed=1)
    assert inside.found is not None and inside.found < 1000 and inside.cause == "recovered"
    for look in runs.watched(Planted(), 500, seed=1):
        assert look.found is None and not look.alarm and look.tokens >= 500 and 0.5 < look.acceptance < 0.9
    one = clean.simulated(1.0, runs=3, count=1, seed=1)
    assert one.tokens > 500 and one.highest.shape == (3,) and one.highest.max() < 9


# ---- what is made of them


def look(found: int | None = 1000, cause: str = "", highest: float = 10.0) -> Look:
    return Look(
        planted=Planted(), seed=0, found=found, tokens=1000, log_e=1.0, highest=highest, cause=cause,
        strongest=(("draft: draft", 1.0),), acceptance=0.5, history=((1000, 1.0),),
    )  # fmt: skip


def results() -> Everything:
    by_case = {one.name: [look(cause=one.causes[0])] * 4 + [look(None)] for one in CASES}
    quiet = [(look(None, highest=2.0), look(None, highest=1.0))]
    ended = [Simulated(heat=heat, tokens=100, highest=np.full(100, 1.0)) for heat in (1.0, 2.0)]
    beside = {one.name: [look()] for one in BESIDE}
    return Everything(
        faults=by_case, beside=beside, simulated=ended, live={kind: 2 * quiet for kind in ("none", *HARMLESS)}
    )


def test_the_study_computes_what_its_rules_ask_for() -> None:
    numbers, facts = analysis.rule_numbers(results()), analysis.facts(results())
    check_names("certificate", [*numbers, *facts])
    name = CASES[0].name
    assert numbers[f"found, {name}"].value == 4 and numbers[f"found, {name}"].above(3.5) == 0
    assert numbers["named, all"].value == 1 and facts[f"tokens, {name}"] == 1000
    assert all(analysis.tables(results()).values())


def test_alarms_and_wrong_names_count() -> None:
    bad = results()
    bad.faults[CASES[0].name] = [look(cause="nonsense")] * 5
    bad.live["none"].append((look(None, highest=9.3), look(None, highest=0.0)))
    bad.live[HARMLESS[0]].append((look(None, highest=0.0), look(None, highest=9.3)))
    bad.simulated[0].highest[:7] = 9.3
    numbers = analysis.rule_numbers(bad)
    assert numbers["named, all"].value == pytest.approx(80 / 85)
    assert numbers["alarms, live"].value == 1 and numbers[f"alarms, {HARMLESS[0]}"].value == 1
    assert numbers["alarms, simulated"].value == 7 and numbers["share beyond 20, simulated"].value == 0.035


def test_wilson_s_interval() -> None:
    share, low, high = share_beyond(np.zeros(500), 20)
    assert share == 0 and low < 1e-12 and high == pytest.approx(1.96**2 / (500 + 1.96**2), rel=1e-3)
    share, low, high = share_beyond(np.array([5.0] * 10 + [0.0] * 90), 20)
    assert (low, share, high) == pytest.approx((0.0552, 0.1, 0.1744), abs=1e-3)


def test_no_two_runs_have_a_seed_in_common() -> None:
    jobs = plan()
    assert len({job.seed for job in jobs}) == len(jobs) and len(CASES) == 21

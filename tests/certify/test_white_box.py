"""The three draws inside verification: bets are fair on an intact rule, and each fault of a draw is found as such."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify.white_box import GROUPS, WhiteBox
from bebop.kernels.verify import chain_verify, sample
from tests.cases import slow_but

VOCABULARY, DRAFTS, STOP = 12, 3, 1


def distributions(*shape: int, seed: int, sharp: float = 1.5) -> Tensor:
    numbers = torch.Generator().manual_seed(seed)
    return (sharp * torch.randn(*shape, generator=numbers, dtype=torch.float64)).softmax(-1)


# ---- fair


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("length", slow_but([2, 0], [2, 1, 0]))
def test_every_bet_is_worth_one_in_the_mean_over_all_outcomes(sampled: bool, length: int) -> None:
    size, drafts = 4, 2
    p = distributions(1, drafts + 1, size, seed=1)
    q = distributions(1, drafts, size, seed=2)
    total: dict[tuple[str, str], np.ndarray] = {}
    mass = 0.0
    drawn = itertools.product(range(size), repeat=drafts) if sampled else [(2, 1)]
    for y in drawn:
        at = [float(q[0, k, y[k]]) if sampled else 1.0 for k in range(drafts)]
        made = math.prod(at)
        chances = [min(1.0, float(p[0, k, y[k]]) / at[k]) for k in range(length)]
        for accepted in range(length + 1):
            outcome = made * math.prod(chances[:accepted]) * (1 - chances[accepted] if accepted < length else 1)
            own = p[0, accepted]
            if accepted < length:
                taken = q[0, accepted] if sampled else torch.eye(size, dtype=torch.float64)[y[accepted]]
                own = (own - taken).clamp_min(0)
                own = own / own.sum() if own.sum() > 0 else own
            for x in range(size):
                chance = outcome * float(own[x])
                if chance == 0:
                    continue
                box = WhiteBox()
                box.update(
                    torch.tensor([y]), q if sampled else None, p, torch.tensor([accepted]), torch.tensor([x]),
                    torch.tensor([length]), (STOP,),
                )  # fmt: skip
                mass += chance
                for key, bets in box.bets.items():
                    total[key] = total.get(key, 0.0) + chance * (np.exp(bets.log_e) - 1)
    assert mass == pytest.approx(1)
    of_drawn = {"draft_draw", "shared_noise"}  # what is not drawn has no noise
    assert {group for group, _ in total} == {*GROUPS} - (set() if sampled else of_drawn)
    # Less than one only where the alternative may bring what cannot come at all: a token without mass, a rejection at
    # p >= q.
    beyond = {
        "strict",
        "unlikely_dropped",
        *(f"recovered {name}" for name in ("target", "draft", "row_off", "uniform")),
    }
    for (group, name), gained in total.items():
        fair = not {name, f"{group} {name}"} & beyond
        assert gained.max() < 1e-9 and (gained.min() > -1e-9 or not fair), (group, name, gained)
    assert length == 0 or total["recovered", "draft"].min() < -1e-4


# ---- faults


def cycles(box: WhiteBox, fault: str, count: int, batch: int = 256, seed: int = 0) -> WhiteBox:
    """So many cycles of a chain, each row with distributions of its own, some of them faulty."""
    numbers = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=numbers, dtype=torch.float64)

    for step in range(-(-count // batch)):
        p = distributions(batch, DRAFTS + 1, VOCABULARY, seed=1000 * seed + step)
        q = (p[:, :-1] * distributions(batch, DRAFTS, VOCABULARY, seed=-1 - 1000 * seed - step).sqrt()).clamp_min(1e-9)
        q = q / q.sum(-1, keepdim=True)
        drawn = q**0.85 if fault == "hot drafts" else q
        if fault == "no stops drafted":
            drawn = q * (torch.arange(VOCABULARY) != STOP)
        noise = random(batch, DRAFTS)
        tokens = sample(drawn, noise)
        gumbel = -random(batch, DRAFTS, VOCABULARY).log().neg().log() if fault == "noise reused" else q
        if fault == "noise reused":
            tokens = (q.log() + gumbel).argmax(-1)
        if fault == "greedy drafts":
            tokens = torch.where(random(batch, 1) < 0.2, q.argmax(-1), tokens)
        u = random(batch, DRAFTS + 2)
        coins = u.clone()
        at_q = q.gather(-1, tokens[..., None])[..., 0]
        if fault == "lenient":
            coins[:, :DRAFTS] /= 1.2
        if fault == "unlikely dropped":
            coins[:, :DRAFTS][at_q < 0.1] = 1 - 1e-12
        if fault == "tested by its own u":
            coins[:, :DRAFTS] = noise
        accepted, following = chain_verify(tokens, q, p, coins)
        rows, rejected, place = torch.arange(batch), accepted < DRAFTS, accepted.clamp(max=DRAFTS - 1)
        if fault == "residual is p":
            following = torch.where(rejected, sample(p[rows, accepted], random(batch)), following)
        left = (p[rows, accepted] - q[rows, place]).clamp_min(0)
        if fault == "u reused":
            following = torch.where(rejected, sample(left, u[rows, place]), following)
        if fault == "u of the draft":
            following = torch.where(rejected, sample(left, noise[rows, place]), following)
        if fault == "noise reused":
            following = torch.where(rejected, (left.log() + gumbel[rows, place]).argmax(-1), following)
        if fault == "row before":
            following = torch.where(rejected, following, sample(p[:, DRAFTS - 1], random(batch)))
        box.update(tokens, q, p, accepted, following, stops=(STOP,))
    return box


@pytest.mark.parametrize("seeds", slow_but([1], [1, 8]))
def test_an_intact_rule_raises_no_alarm(seeds: int) -> None:
    boxes = [cycles(WhiteBox(), "none", 3000, seed=seed) for seed in range(seeds)]
    assert max(box.highest for box in boxes) < math.log(20)
    assert boxes[0].tokens > 3000 and boxes[0].cycles == 3072
    bounds = {(e.group, e.name): e.share for e in boxes[0].evidence()}
    assert bounds["recovered", "target"] < 0.3 and bounds["bonus", "row_before"] < 0.3  # type: ignore[operator]


FAULTS = [
    ("hot drafts", "draft_draw", {"hotter"}),
    ("no stops drafted", "draft_draw", {"no_stop"}),
    ("lenient", "acceptance", {"lenient", "power_lenient"}),
    ("residual is p", "recovered", {"target"}),
    ("u reused", "recovered", {"reused_uniform"}),
    ("row before", "bonus", {"row_before"}),
    ("greedy drafts", "draft_draw", {"argmax"}),
    ("unlikely dropped", "acceptance", {"unlikely_dropped"}),
    ("noise reused", "shared_noise", {"residual_draft_gumbel"}),
    ("u of the draft", "shared_noise", {"residual_draft_uniform"}),
    ("tested by its own u", "shared_noise", {"accept_draft_uniform"}),
]


# Each draw, and the bets with a rule of their own: on stop tokens and on uniforms that are used twice.
@pytest.mark.parametrize(("fault", "group", "names"), slow_but(FAULTS[:6], FAULTS, several=True))
def test_a_fault_is_found_in_its_own_draw(fault: str, group: str, names: set[str]) -> None:
    box = cycles(WhiteBox(), fault, 3000)
    best = box.evidence()[0]
    assert box.found is not None and best.group == group and best.name in names, (box.found, best)
    others = [e.log_e for e in box.evidence() if e.group != group]
    assert max(others) < math.log(1e4), "the draws beside it are sound"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["q ignored", "matched"])
def test_rules_that_ignore_q_are_exact_if_they_say_so(rule: str) -> None:
    """Drafts judged as if they were one-hot, and drafts that stand if a draw of the target comes out the same."""
    numbers, told, silent = torch.Generator().manual_seed(0), WhiteBox(), WhiteBox()
    for step in range(12):
        p, q = distributions(256, 2, VOCABULARY, seed=step), distributions(256, 1, VOCABULARY, seed=-1 - step)
        u = torch.rand(256, 4, generator=numbers, dtype=torch.float64)
        tokens = sample(q, u[:, :1])
        if rule == "matched":
            drawn = sample(p[:, 0], u[:, 1])
            accepted = (drawn == tokens[:, 0]).long()
        else:
            accepted = (u[:, 1] < p[:, 0].gather(1, tokens)[:, 0]).long()
            drawn = sample(p[:, 0].scatter(1, tokens, 0.0), u[:, 2])
        following = torch.where(accepted == 1, sample(p[:, 1], u[:, 3]), drawn)
        told.update(tokens, q, p, accepted, following, one_hot=True)
        silent.update(tokens, q, p, accepted, following)
    assert told.highest < math.log(20) and silent.found is not None
    assert {group for group, _ in told.bets} == set(GROUPS)


def test_drafts_that_were_not_reached_and_completions_that_end_with_a_draft() -> None:
    """The last draft of every row is token 0, which q says is rare; verification never comes to it."""
    p, q = distributions(64, 3, 5, seed=3), distributions(64, 2, 5, seed=4)
    q[:, 1] = torch.tensor([1e-6, 0.25, 0.25, 0.25, 0.249999], dtype=torch.float64)
    tokens, none = (
        torch.stack([sample(q[:, 0], torch.arange(64).double() / 64), torch.zeros(64).long()], 1),
        torch.zeros(64),
    )
    following = torch.full((64,), -1)
    all_of_them, reached = WhiteBox(), WhiteBox()
    for box, only in ((all_of_them, False), (reached, True)):
        box.update(tokens, q, p, none.long(), p[:, 0].argmax(-1), reached_only=only)
    assert all_of_them.found is not None and all_of_them.drafts == 128 and reached.drafts == 64
    reached.update(tokens, q, p, none.long() + 1, following, none.long() + 1)  # ended by the first draft
    assert reached.tokens == 128 and np.all(reached.bets["bonus", "draft"].log_e == 0)


# ---- what goes in, and out


def test_a_state_goes_through_json() -> None:
    one = cycles(WhiteBox(), "lenient", 500)
    other = WhiteBox()
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other.state_dict() == one.state_dict() and other.evidence() == one.evidence()
    assert cycles(other, "lenient", 200, seed=1).log_e == cycles(one, "lenient", 200, seed=1).log_e


def test_rows_that_do_not_fit_at_once_and_drafts_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = cycles(WhiteBox(), "lenient", 64, batch=64)
    monkeypatch.setattr("bebop.certify.white_box.PIECE", 100)
    pieces = cycles(WhiteBox(), "lenient", 64, batch=64)
    assert pieces.log_e == pytest.approx(whole.log_e, rel=1e-12) and pieces.tokens == whole.tokens
    p, q = distributions(2, 3, 5, seed=3), distributions(2, 2, 5, seed=4)
    tokens, accepted, following = torch.tensor([[0, 1], [2, 3]]), torch.tensor([1, 0]), torch.tensor([4, 4])
    box = WhiteBox()
    box.update(tokens, q, p, accepted, following, torch.tensor([1, 1]))
    other = WhiteBox()
    other.update(tokens[:, :1], q[:, :1], p[:, :2], accepted, following)
    assert box.log_e == pytest.approx(other.log_e, rel=1e-12) and box.drafts == other.drafts == 2


def test_what_cannot_be_tested_is_said() -> None:
    p, q = distributions(4, 3, 5, seed=3), distributions(4, 2, 5, seed=4)
    none = torch.zeros(4, dtype=torch.long)
    box = WhiteBox()
    box.update(none[:, None].expand(4, 2), q, p, none, none, stepwise=False)
    assert {group for group, _ in box.bets} == {"draft_draw", "bonus"} and "acceptance, recovered" in box.untested
    box.update(none[:, None].expand(4, 2), None, p, none, none)
    box.skip(4, "all draws", "drafts are a tree")
    assert box.untested["draft_draw"] == "drafts are not sampled" and box.skipped == 4


def test_plain_decoding_is_tested_as_a_bonus_row() -> None:
    p = distributions(4, 1, 5, seed=3)
    none = torch.zeros(4, dtype=torch.long)
    box = WhiteBox()
    for _ in range(40):
        box.update(none[:, None][:, :0], None, p, none, p[:, 0].argmin(-1))
    assert box.found is not None and box.evidence()[0].group == "bonus" and box.untested == {}

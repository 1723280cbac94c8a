"""The loss of pseudo states against one that is written out anchor by anchor, and what training with it does."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.systems.firp.losses import MEASURES, Anchored, drafts_and_targets, firp_loss, lay_out, read_rows, sums
from bebop.systems.firp.network import PseudoContext, PseudoStates, hidden_with_pseudo
from bebop.trainer.chains import TokenRow
from tests.builders import bare_policy
from tests.cases import slow_but

ROWS = [TokenRow(prompt=p, answer=a) for p, a in (((1, 2, 3), (4, 5, 1, 0)), ((3, 2), (2,)), ((5,), (5, 1, 1, 2, 3)))]
LAYERS = (1, 2, 2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = bare_policy(6, seed=3, layers=4, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


def network(layers: tuple[int, ...] = LAYERS) -> PseudoStates:
    return PseudoStates(hidden_size=32, layers=layers).double()


def laid_out(policy: Policy, anchors: int, rows: list[TokenRow] = ROWS, layers: tuple[int, ...] = LAYERS) -> Anchored:
    return lay_out(read_rows(policy, layers, rows), anchors, 0)


def logits_alone(policy: Policy, row: TokenRow, anchor: int) -> tuple[Tensor, Tensor]:
    """Drafts [K, V] of one anchor in a pass that ends with it, and the model's own [L, V]."""
    ids = torch.tensor([row.token_ids])
    positions = torch.arange(ids.shape[1])[None]
    own = policy.logits(policy.hidden(ids, positions, CausalContext()))[0]
    anchors, fed = torch.tensor([[anchor]]), slice(0, anchor + 1)
    context = PseudoContext.training(anchors, anchor + 1)
    _, drafts = hidden_with_pseudo(policy, network(), ids[:, fed], positions[:, fed], anchors, context)
    return policy.logits(drafts)[0, 0], own


def written_out(policy: Policy, texts: Anchored, step: int, kind: str, late: int = 0) -> float:
    """One anchor at a time; ``late``: the model's distribution is taken so much later."""
    values = []
    for row, anchors in zip(ROWS, texts.anchors.tolist(), strict=True):
        for anchor in anchors:
            count = min(step, len(row.token_ids) - anchor - 2)
            if count < (1 if kind == "e2e_tv" else step):
                continue
            drafts, own = logits_alone(policy, row, anchor)
            places = (anchor + 1 + torch.arange(count) + late).clamp_max(len(own) - 1)
            p, q = softmax(own[places], -1), softmax(drafts[:count], -1)
            overlap = torch.minimum(p, q).sum(-1)
            kl = (p * (p.log() - log_softmax(drafts[:count], -1))).sum(-1)
            e2e = 1 - overlap.cumprod(0).sum() / count
            values.append({"kl": kl[-1], "tv": 1 - overlap[-1], "e2e_tv": e2e}[kind])
    return float(torch.stack(values).mean().detach())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["kl", "tv", "e2e_tv"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_loss_is_that_of_anchors_one_at_a_time(policy: Policy, kind: str, step: int) -> None:
    texts = laid_out(policy, 4)
    loss = float(firp_loss(policy, network(), texts, step, kind=kind).detach())
    assert loss == pytest.approx(written_out(policy, texts, step, kind), rel=1e-5)
    assert loss != pytest.approx(written_out(policy, texts, step, kind, late=1), rel=1e-3)


def test_anchors_whose_token_lies_behind_the_text_count_nowhere(policy: Policy) -> None:
    texts = laid_out(policy, 9)
    assert texts.mask(3).sum((0, 1)).tolist() == [3 + 0 + 4, 2 + 3, 1 + 2]
    before = float(firp_loss(policy, network(), texts, 2, kind="kl").detach())
    padded = torch.arange(texts.real.hidden.shape[1]) >= texts.ends[:, None]
    texts.real.hidden[padded] = 4
    texts.real.held.permute(2, 4, 0, 1, 3, 5)[padded] = 4
    assert float(firp_loss(policy, network(), texts, 2, kind="kl").detach()) == pytest.approx(before, rel=1e-12)
    texts.real.held[..., 1, :] += 1
    assert float(firp_loss(policy, network(), texts, 2, kind="kl").detach()) != pytest.approx(before, rel=1e-3)


def test_what_is_measured_is_the_mean_over_every_place(policy: Policy) -> None:
    found, places = sums(policy, network(), ROWS)
    texts = laid_out(policy, 9)
    assert places.sum(0).tolist() == texts.mask(3).sum((0, 1)).tolist()
    means = dict(zip(MEASURES, (found.sum(0) / places.sum(0)[:, None]).T, strict=True))
    for step in (1, 2, 3):
        assert float(means["kl"][step - 1]) == pytest.approx(written_out(policy, texts, step, "kl"), rel=1e-4)
        assert 1 - float(means["overlap"][step - 1]) == pytest.approx(written_out(policy, texts, step, "tv"), rel=1e-4)
    drafts, targets = (policy.logits(x).argmax(-1) for x in drafts_and_targets(policy, network(), texts, 3))
    same = (drafts == targets)[texts.mask(3)].sum()
    assert found[..., 2].sum() == same < places.sum()


@pytest.mark.parametrize("kind", slow_but(["e2e_tv"], ["kl", "tv", "e2e_tv"]))
def test_training_a_step_moves_its_matrix_alone_and_helps(policy: Policy, kind: str) -> None:
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 5, (16, 12), generator=numbers).tolist()
    rows = [TokenRow(prompt=tuple(row[:3]), answer=tuple(row[3:])) for row in ids]
    own = network((2, 3))
    own.maps[0].requires_grad_(False)
    optimizer = torch.optim.Adam(own.maps[1].parameters(), lr=3e-3)
    (before, places), texts = sums(policy, own, rows), laid_out(policy, 9, rows, (2, 3))
    for _ in range(30):
        optimizer.zero_grad()
        firp_loss(policy, own, texts, 2, kind=kind).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    change = (sums(policy, own, rows)[0] - before)[..., 0].sum(0) / places.sum(0)
    assert change[0] == 0 and change[1] > 0.02
    assert all(p.grad is None for p in (*policy.backbone.parameters(), *own.maps[0].parameters()))

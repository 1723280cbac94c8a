"""What the study of pseudo states measures, against values that are computed another way."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.model.backbone import Policy
from bebop.systems.firp.losses import BEYOND, drafts_of, firp_loss, lay_out, read_rows
from bebop.systems.firp.network import PseudoStates, RealText, read_text
from bebop.trainer.chains import TokenRow
from recipes.reproduce.firp import measures
from recipes.reproduce.firp.arms import ARMS, FIRST_SWEEP, LAYERS, SECOND_SWEEP
from recipes.reproduce.firp.comparison import Found, rule_numbers, tables
from recipes.reproduce.firp.heads import EarlyExits, MedusaHeads, head_loss
from recipes.reproduce.firp.measures import CHAIN, NODES, Measured
from tests.builders import tiny_policy
from tests.recipes.reproduce.synthetic import check_names

ROWS = [
    TokenRow(prompt=p, answer=a)
    for p, a in (((1, 2, 3), (4, 5, 1, 0, 2, 2)), ((3, 2), (2,)), ((5, 0), (5, 1, 1, 2, 3)))
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = tiny_policy(6, seed=3, layers=4, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


class Own:
    """As ``texts.Seed``."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy


# ---- baselines


def test_medusa_heads_begin_as_the_language_model_head_and_exits_as_the_model_after_a_layer(policy: Policy) -> None:
    read = read_text(policy, (2, 4), [row.token_ids for row in ROWS])
    real, anchors = RealText.beside(read), torch.tensor([[1, 2], [1, 0], [2, 3]])
    last = policy.logits(real.hidden.gather(1, anchors[..., None].expand(-1, -1, 32)))
    medusa, exits = MedusaHeads(policy, 3).double(), EarlyExits(policy, (2, 4)).double()
    assert (medusa.drafts()(real, anchors) - last[:, :, None]).abs().max() < 1e-10
    found = exits.drafts()(real, anchors)
    assert (found[:, :, 1] - last).abs().max() < 1e-10 and (found[:, :, 0] - last).abs().max() > 1e-2
    sizes = [sum(p.numel() for p in heads.parameters()) for heads in (medusa, exits)]
    assert sizes == [3 * (32 * 32 + 32 + 6 * 32), 2 * 6 * 32]


@pytest.mark.parametrize("kind", ["hard_ce", "kl"])
def test_loss_of_a_head(policy: Policy, kind: str) -> None:
    heads = MedusaHeads(policy, 2).double()
    texts = lay_out(read_rows(policy, (2,), ROWS), 9, 0)
    ids = torch.zeros(3, 9, dtype=torch.long)
    for i, row in enumerate(ROWS):
        ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
    values = []
    for i, row in enumerate(ROWS):
        own = policy.logits(texts.real.hidden[i])
        for anchor in range(len(row.prompt) - 1, len(row.token_ids) - 3):
            q = own[anchor].log_softmax(-1)  # the head is as it began
            p = own[anchor + 2].softmax(-1)
            values.append(-q[row.token_ids[anchor + 3]] if kind == "hard_ce" else (p * (p.log() - q)).sum())
    loss = head_loss(policy, heads, texts, ids, 2, kind)
    assert float(loss.detach()) == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    loss.backward()  # type: ignore[no-untyped-call]
    reached = {name for name, p in heads.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert reached == {"out.1", "inner.1.weight", "inner.1.bias"}, "of this step alone"


@pytest.mark.slow
def test_after_the_last_layer_training_is_that_of_a_linear_head(policy: Policy) -> None:
    """F4: the same optimum as norm(W h) under the language-model head, trained directly by other code."""
    numbers = torch.Generator().manual_seed(0)
    rows = [TokenRow(prompt=(int(a),), answer=tuple(map(int, b))) for a, b in
            ((row[0], row[1:]) for row in torch.randint(0, 5, (24, 10), generator=numbers))]  # fmt: skip
    texts = lay_out(read_rows(policy, (4,), rows), 9, 0)
    network = PseudoStates(hidden_size=32, layers=(4,)).double()
    linear = torch.nn.Linear(32, 32, bias=False).double()
    torch.nn.init.eye_(linear.weight)
    keep = texts.mask(1)[..., 0]
    states, wanted = (
        x.gather(1, places.clamp_max(9)[..., None].expand(-1, -1, 32))[keep]
        for x, places in ((texts.real.entering[4], texts.anchors), (texts.real.hidden, texts.anchors + 1))
    )
    p = policy.logits(wanted).softmax(-1)

    def direct() -> Tensor:
        q = policy.logits(policy.backbone.get_decoder().norm(linear(states))).log_softmax(-1)
        return (p * (p.log() - q)).sum(-1).mean()

    def ours() -> Tensor:
        return firp_loss(policy, network, texts, 1, kind="kl")

    ends = []
    for loss, parameters in ((direct, linear.parameters()), (ours, network.parameters())):
        optimizer = torch.optim.LBFGS(parameters, max_iter=150, line_search_fn="strong_wolfe")

        def closure(loss=loss, optimizer=optimizer) -> Tensor:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        begun = float(loss().detach())
        optimizer.step(closure)  # type: ignore[no-untyped-call]
        ends.append(float(loss().detach()))
    assert ends[1] == pytest.approx(ends[0], rel=1e-3) and ends[0] < 0.9 * begun
    assert float(direct().detach()) == pytest.approx(ends[0], rel=1e-9)


# ---- what is measured


@pytest.mark.slow
def test_accepted_drafts_are_those_of_rejection_sampling_in_the_mean(policy: Policy) -> None:
    """Over all texts of two more tokens, weighted by their probability, a mean is what a chain is accepted."""
    network = PseudoStates(hidden_size=32, layers=(2, 3)).double().requires_grad_(False)
    start = (1, 2, 3, 4)  # anchor at token 3, newest 4
    wanted, estimate = 0.0, 0.0
    for tail in itertools.product(range(6), repeat=2):
        row = TokenRow(prompt=start[:3], answer=(start[3], *tail))
        read = read_text(policy, network.layers, [row.token_ids])
        own = policy.logits(read[0].hidden[0]).softmax(-1)
        drafts = drafts_of(policy, network)(read[0], torch.tensor([[2]]))[0, 0].softmax(-1)
        weight = float(own[3, tail[0]] * own[4, tail[1]])
        *_, accepted, count = measures.sampled(Own(policy), drafts_of(policy, network), [row], read)  # type: ignore[arg-type]
        assert count[0] == 1
        estimate += weight * accepted[0]
        both = [torch.minimum(own[3 + k], drafts[k]) for k in range(2)]
        # The first accepted draft is x with probability min(p(x), q(x)); then the second is judged in its context.
        wanted += float(both[0][tail[0]] * (1 + both[1].sum()) / 6)
    assert estimate == pytest.approx(wanted, rel=1e-9) and 0.05 < wanted < 2


def test_hits_count_ranks_below_one_and_five() -> None:
    assert measures.hits([[0, 4], [5, BEYOND], [1, BEYOND]]).tolist() == [[1, 2], [0, 1]]


def measured(length: float = 2.0, accuracy: float = 0.5, steps: int = 3) -> Measured:
    """Four prompts."""
    one = np.ones(4)
    return Measured(
        tasks=("gcd", "gcd", "chain_sum", "number_sorting"), tokens=10 * one,
        cycles={n: 10 / length * one for n in (CHAIN, *NODES)}, hits=accuracy * np.ones((4, steps, 2)),
        places=np.ones((4, steps)), overlap=np.ones((4, steps)), divergence=np.ones((4, steps)), accepted=one,
        anchors=one, parameters=100,
    )  # fmt: skip


def found() -> list[Found]:
    names = [*ARMS, *FIRST_SWEEP, *SECOND_SWEEP]
    arms = {name: measured(3.0 if name == "FIRP" else 2.0) for name in names}
    arms["Medusa, KL"] = measured(2.5)
    arms |= {f"step 1 at {t}": measured(accuracy=level) for t, level in ((1, 0.4), (5, 0.5), (11, 0.1))}
    table = np.full((3, 13), np.nan)
    for k, layer in enumerate(LAYERS):
        table[k, layer:] = np.linspace(0.2, 0.9, 13 - layer)
    return [Found(arms=arms, cosines={n: table for n in ("own", "other", "centred")}) for _ in range(3)]


def test_the_study_computes_what_its_rules_ask_for() -> None:
    numbers = rule_numbers(found())
    check_names("firp", numbers)
    assert numbers["length 16, FIRP - best Medusa"].value == pytest.approx(0.5), "the better of the two"
    assert numbers["per parameter, 16"].value == pytest.approx(2 / 1.5)
    assert numbers["spread over fall, step 1"].value == pytest.approx(0.1 / 0.4)
    assert numbers["cosine growth 1"].value == pytest.approx(0.7)
    assert all(tables(found()).values())

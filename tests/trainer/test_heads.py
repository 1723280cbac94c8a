"""Training of a head: the backbone stays, micro-batches add up, a resume is exact, NaN ends it."""

import copy
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bebop.adaptation.probe import probe
from bebop.config.job import HeadConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow, chain_rows, spaced
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import OBJECTIVES, Objective, Sampling
from tests.builders import bare_policy
from tests.cases import slow_but

CONFIG = HeadConfig(objective="e2e_tv", depth=3, lr=3e-3, lr_warmup_steps=2, max_tokens=64)


def rows(seed: int = 0, count: int = 8) -> list[TokenRow]:
    """Texts of different lengths."""
    rng = random.Random(seed)

    def some(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.randrange(12) for _ in range(rng.randint(least, most)))

    return [TokenRow(prompt=some(1, 5), answer=some(1, 16)) for _ in range(count)]


def trainer(policy: Policy | None = None, rank: int = 0, world: int = 1, **changes: Any) -> HeadTrainer:
    backend = FSDPBackend(policy or bare_policy(), Sampling(), rank, world)
    return HeadTrainer(backend, dataclasses.replace(CONFIG, **changes))


def copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in module.state_dict().items()}


def gradients(of: HeadTrainer) -> dict[str, Tensor]:
    """What the last update stepped along, clipped."""
    return {name: p.grad.clone() for name, p in of.backend.named.items() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return float(np.max([float((a[name] - b[name]).abs().max()) for name in a]))  # NaN stays


@pytest.mark.parametrize("name", slow_but(["ce", "e2e_tv_corrected"], OBJECTIVES))
def test_only_the_head_changes(name: str) -> None:
    policy = bare_policy()
    assert policy.mtp is not None
    backbone, head = copied(policy.backbone), copied(policy.mtp)
    training = trainer(policy, objective=name)
    for seed in range(3):
        training.update(rows(seed))
    after = copied(policy.backbone)
    assert all(torch.equal(after[key], value) for key, value in backbone.items()), "bit for bit"
    assert all(p.grad is None for p in policy.backbone.parameters())
    assert all(not torch.equal(value, head[key]) for key, value in copied(policy.mtp).items())


MICRO_BATCHES = [(objective, every) for objective in ("ce", "e2e_tv", "e2e_tv_corrected") for every in (1, 3)]


@pytest.mark.parametrize(("objective", "every"), slow_but([("e2e_tv_corrected", 3)], MICRO_BATCHES, several=True))
def test_micro_batches_add_up(objective: str, every: int) -> None:
    texts, found = rows(count=9), {}
    for size in (20, 64, 100_000):
        training = trainer(objective=objective, max_tokens=size, max_grad_norm=1e9)
        found[size] = training.update(texts, every=every), gradients(training)
    whole, grads = found[100_000]
    for size in (20, 64):
        assert found[size][0] == pytest.approx(whole, rel=1e-5) and distance(found[size][1], grads) < 1e-6


@pytest.mark.parametrize("name", slow_but(["e2e_tv"], ["ce", "e2e_tv"]))
def test_a_share_of_the_chains_has_the_mean_loss_of_those(name: str) -> None:
    texts, training = rows(count=9), trainer(objective=name, max_tokens=20)
    few, whole = (spaced(chain_rows(texts, CONFIG.depth), every, seed=0) for every in (3, 1))
    by_hand, of_all = (trainer().backend.loss(some, OBJECTIVES[name].loss, None).item() for some in (few, whole))
    assert training.update(texts, every=3)["head/loss"] == pytest.approx(by_hand, rel=1e-5)
    assert by_hand != pytest.approx(of_all, rel=1e-3)


def test_a_plain_mean_over_micro_batches_would_be_caught() -> None:
    texts = rows(count=5)
    losses = [trainer().update([row])["head/loss"] for row in texts if len(row.token_ids) > 2]
    whole = trainer(max_tokens=100_000).update(texts)["head/loss"]
    assert abs(sum(losses) / len(losses) - whole) > 1e-3


def test_known_hidden_states_save_a_pass_and_change_nothing() -> None:
    policy, texts = bare_policy(), rows()
    with torch.no_grad():
        ids = [torch.tensor([row.token_ids]) for row in texts]
        states = [policy.hidden(i, torch.arange(i.shape[1])[None], CausalContext())[0] for i in ids]
    first, second = trainer(), trainer()
    assert first.update(texts) == pytest.approx(second.update(texts, hidden=states), rel=1e-5)
    assert distance(gradients(first), gradients(second)) < 1e-6
    third = trainer()
    third.update(texts, hidden=[-s for s in states])
    assert distance(gradients(first), gradients(third)) > 1e-3


def resumed(state: dict[str, Any], last: Sequence[int]) -> HeadTrainer:
    policy = bare_policy(seed=5)  # another head, which the state replaces
    policy.backbone.load_state_dict(bare_policy().backbone.state_dict())
    again = trainer(policy)
    again.load_state_dict(state)
    for seed in last:
        again.update(rows(seed))
    return again


def test_a_resume_is_bit_exact() -> None:
    training = trainer()
    for seed in range(2):
        training.update(rows(seed))
    state = copy.deepcopy(training.state_dict())
    for seed in (2, 3):
        training.update(rows(seed))
    again = resumed(state, (2, 3))
    assert again.version == training.version == 4
    assert distance(again.weights(), training.weights()) == 0
    forgetful = resumed({**state, "optimizer": {}}, (2, 3))
    assert distance(forgetful.weights(), training.weights()) > 1e-5, "the moments of the optimizer count"


def test_a_state_of_another_head_is_refused() -> None:
    state = trainer().state_dict()
    state["weights"]["project.weight"] = torch.zeros(3, 3)
    with pytest.raises(UserError, match=r"another head: project.weight has shape \(3, 3\), the model needs \(32, 64\)"):
        trainer().load_state_dict(state)


BROKEN = Objective(lambda steps: steps.draft.sum() * float("nan"))  # a loss that is not a number


def test_three_losses_in_a_row_that_are_not_finite_end_training() -> None:
    training = trainer()
    training.update(rows())
    before = training.weights()
    for skipped in (BROKEN, BROKEN):
        numbers = training.update(rows(), skipped)
        assert numbers["head/skipped"] == 1 and "head/grad_norm" not in numbers
    assert distance(training.weights(), before) == 0, "such a gradient is never stepped along"
    with pytest.raises(UserError, match=r"head.lr=0.003: the loss of the MTP head is not finite in 3 steps running"):
        training.update(rows(), BROKEN)
    assert distance(training.weights(), before) == 0


def test_a_finite_loss_between_them_starts_the_count_anew() -> None:
    training = trainer()
    for objective in (BROKEN, BROKEN, "e2e_tv", BROKEN, BROKEN, "e2e_tv"):
        training.update(rows(count=2), objective)
    assert training.version == 6


def test_the_learning_rate_warms_up_and_stays() -> None:
    training = trainer(lr=1e-3, lr_warmup_steps=4)
    assert [training.update(rows(count=2))["head/lr"] for _ in range(6)] == pytest.approx(
        [2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3]
    )


def test_texts_without_a_step_are_refused() -> None:
    with pytest.raises(UserError, match="no completion in these rows is long enough"):
        trainer().update([TokenRow(prompt=(1, 2), answer=()), TokenRow(prompt=(3,), answer=(4,))])


def test_a_head_with_a_bias_is_refused() -> None:
    policy = bare_policy()
    policy.backbone.lm_head = nn.Linear(32, 12)
    with pytest.raises(UserError, match="has a bias"):
        trainer(policy)


def test_bfloat16_trains_fp32_master_weights() -> None:
    policy = bare_policy(dtype=torch.bfloat16)
    coarse, fine = trainer(policy), trainer()
    policy.mtp.load_state_dict(fine.weights())  # type: ignore[union-attr]
    ours, wanted = coarse.update(rows()), fine.update(rows())
    assert ours["head/loss"] == pytest.approx(wanted["head/loss"], abs=0.03)
    assert {p.dtype for p in coarse.backend.named.values()} == {torch.float32}
    assert {p.dtype for p in policy.backbone.parameters()} == {torch.bfloat16}


def gain(policy: Policy, updates: int, **changes: Any) -> float:
    """How much the overlap of first drafts rises over some updates on a few texts."""
    texts = rows(count=6)
    before = probe(policy, texts, 3, Sampling()).numbers["overlap"][:, 0].mean()
    training = trainer(policy, **changes)
    for _ in range(updates):
        training.update(texts)
    return float(probe(policy, texts, 3, Sampling()).numbers["overlap"][:, 0].mean() - before)


def test_training_raises_the_overlap() -> None:
    assert gain(bare_policy(), 10, objective="tv") > 0.05
    assert gain(bare_policy(), 1, objective="tv", lr=0.0) == 0


def test_a_step_in_a_batch_weighs_as_much_as_any_other() -> None:
    """The loss of a batch is the mean over its steps: by hand from the losses of single rows."""
    texts = [row for row in rows(count=5) if len(row.token_ids) > 2]
    single = [trainer(objective="tv").update([row])["head/loss"] for row in texts]
    counts = [int(chain_rows([row], CONFIG.depth).steps.sum()) for row in texts]
    wanted = sum(x * n for x, n in zip(single, counts, strict=True)) / sum(counts)
    assert trainer(objective="tv").update(texts)["head/loss"] == pytest.approx(wanted, rel=1e-5)

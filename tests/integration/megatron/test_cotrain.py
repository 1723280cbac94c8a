"""Beside a policy: the policy's gradients do not change by a bit, and the head learns what a head by itself would."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from bebop.errors import UserError
from bebop.megatron_job import backend, cotrain
from bebop.megatron_job.parallel import ParallelConfig, Place, joined
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from tests.integration.megatron.builders import checkpoint, rows, trainer
from tests.integration.megatron.policy import cotrainer, gradients, text, wrapped

ONE = ParallelConfig()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("cotrain") / "checkpoint")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with joined(ONE, "cpu") as found:
        yield found


def policy_step(model: DistributedDataParallel, some: list[TokenRow], mask: bool = True) -> dict[str, Tensor]:
    """Forward and backward of a stand-in for a policy's loss; the gradients in Megatron's buffers."""
    model.zero_grad_buffer()
    token_ids, loss_mask = text(some)
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    logits = model(token_ids, positions, None, loss_mask=loss_mask if mask else None)
    (logits.log_softmax(-1).gather(2, token_ids[..., None]).mean() * -1).backward()
    return gradients(model)


def largest(gradients: dict[str, Tensor]) -> float:
    return max(float(g.abs().max()) for g in gradients.values())


@pytest.mark.smoke("gradients")
def test_policy_gradients_are_the_same_to_the_bit(saved: Path, place: Place) -> None:
    with_head, without = wrapped(saved, place), wrapped(saved, place)
    head = cotrainer(with_head)
    without.module.config.mtp_num_layers = None  # what a model without MTP training has
    without.module.mtp_process = False
    for step in range(3):
        found, wanted = policy_step(with_head, rows(step)), policy_step(without, rows(step))
        assert found.keys() == wanted.keys() and not any("mtp." in name for name in found)
        assert largest(wanted) > 1e-3
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        numbers = head.step()
        assert numbers["head/grad_norm"] > 0


def test_the_head_has_no_gradient_into_the_policy(saved: Path, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss on states that are not cut from their graph reaches the policy: the comparison can see it."""

    def forward(model: DistributedDataParallel) -> dict[str, Tensor]:
        model.zero_grad_buffer()
        token_ids, loss_mask = text(rows(0))
        model(token_ids, torch.arange(token_ids.shape[1]).expand_as(token_ids), None, loss_mask=loss_mask)
        return gradients(model)

    sound = wrapped(saved, place)
    head = cotrainer(sound)
    assert largest(forward(sound)) == 0
    assert float(head.sums[1]) > 0 and max(float(p.grad.abs().max()) for p in head.backend.parameters.values()) > 0

    def leaky(
        head: Any, embeddings: Tensor, hidden: Tensor, weight: Tensor, some: Any, sampling: Sampling, least: int
    ) -> Any:
        from bebop.model.mtp import chain, gather_rows
        from bebop.trainer.objectives import Steps

        depth = int(some.steps.max())
        draft = list(chain(head, embeddings, hidden, depth, some.anchors))
        last = hidden.shape[1] - 1
        target = [gather_rows(hidden, (some.anchors + i).clamp_max(last)) for i in range(1, depth + 1)]
        tokens = torch.stack([some.tokens(i) for i in range(1, depth + 1)], 2)
        return Steps(
            draft=torch.stack(draft, 2), target=torch.stack(target, 2), weight=weight, tokens=tokens,
            mask=some.mask(depth), sampling=sampling,
        )  # fmt: skip

    monkeypatch.setattr(cotrain, "constant", lambda hidden, split: hidden)
    monkeypatch.setattr(backend, "unroll", leaky)
    broken = wrapped(saved, place)
    cotrainer(broken)
    assert largest(forward(broken)) > 1e-4


def test_the_head_learns_as_it_does_by_itself(saved: Path, place: Place) -> None:
    """The policy stands still; micro-batches of rows give the step of all rows at once."""
    model = wrapped(saved, place)
    head = cotrainer(model)
    alone = trainer(saved, ONE, place, objective="e2e_tv")
    for step in range(4):
        some = rows(step)
        for part in (some[:2], some[2:]):
            policy_step(model, part)
        found, wanted = head.step(), alone.update(some)
        assert found["head/loss"] == pytest.approx(wanted["head/loss"], abs=1e-5)
        assert found["head/grad_norm"] == pytest.approx(wanted["head/grad_norm"], rel=1e-4)


def test_packed_rows_are_rows_side_by_side(saved: Path, place: Place) -> None:
    head = cotrainer(wrapped(saved, place))
    some = [row for row in rows(3) if row.answer]
    token_ids, mask = text(some)
    states = torch.randn(*token_ids.shape, 32, generator=torch.Generator().manual_seed(0))
    head._learn(states.transpose(0, 1), token_ids, mask, None)
    wanted, gradient = head.sums.clone(), head.backend.parameters["mtp.layers.0.eh_proj.weight"].grad.clone()
    head.discard()
    lengths = [len(row.token_ids) for row in some]
    end_to_end = [torch.cat([x[i, :n] for i, n in enumerate(lengths)])[None] for x in (token_ids, mask, states)]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    head._learn(end_to_end[2].transpose(0, 1), end_to_end[0], end_to_end[1], packed)
    torch.testing.assert_close(head.sums, wanted, rtol=0, atol=1e-4)
    torch.testing.assert_close(head.backend.parameters["mtp.layers.0.eh_proj.weight"].grad, gradient, rtol=0, atol=1e-4)


def test_a_head_in_megatrons_buffers_is_refused(saved: Path, place: Place) -> None:
    with pytest.raises(UserError, match="gradient buffers"):
        cotrainer(wrapped(saved, place, left_out=False))

"""Losses over a draft vocabulary against sums that are written out, their gradients against autograd's."""

import pytest
import torch
from torch import Tensor

from bebop.kernels.draft_losses import LOSSES, needs_labels
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.trainer.chains import Per
from bebop.trainer.draft_vocabulary import DraftHead, RowNumbers, mean_of_rows, row_numbers
from bebop.trainer.objectives import OBJECTIVES, Sampling, Steps

VOCAB, ROWS, SIZE, TEMPERATURE = 11, 7, 5, 0.7
TOKENS = (1, 2, 4, 5, 7, 8, 10)


def given(tokens: tuple[int, ...] = TOKENS) -> tuple[Tensor, DraftHead, Tensor, Tensor, Tensor]:
    """Draft states, head, target states, the target's head, labels."""
    torch.manual_seed(0)
    draft, target = (torch.randn(ROWS, SIZE, dtype=torch.float64) for _ in range(2))
    own, weight = (torch.randn(n, SIZE, dtype=torch.float64) for n in (len(tokens), VOCAB))
    head = DraftHead(weight=own.requires_grad_(), tokens=torch.tensor(tokens))
    return draft.requires_grad_(), head, target, weight, torch.arange(ROWS) + 2


def numbers(kind: str, tokens: tuple[int, ...] = TOKENS) -> tuple[RowNumbers, tuple[Tensor, ...]]:
    draft, head, target, weight, labels = given(tokens)
    found = row_numbers(draft, head, target, weight, kind=kind, labels=labels, temperature=TEMPERATURE)
    return found, (draft, head.weight)


def distributions() -> tuple[Tensor, Tensor]:
    """q and p [N, V], q with zeros outside of the draft vocabulary."""
    draft, head, target, weight, _ = given()
    q = torch.zeros(ROWS, VOCAB, dtype=torch.float64)
    q = q.index_copy(1, head.tokens, (draft @ head.weight.T / TEMPERATURE).softmax(-1))
    return q, (target @ weight.T / TEMPERATURE).softmax(-1)


def test_the_overlap_is_that_of_the_whole_distributions() -> None:
    q, p = distributions()
    wanted = torch.minimum(q, p).sum(-1)
    found, _ = numbers("tv")
    assert torch.allclose(found.alpha, wanted) and torch.allclose(found.loss, 1 - wanted)
    assert torch.allclose(numbers("nla")[0].loss, -wanted.log())
    renormalised = torch.minimum(q, p[:, TOKENS].div(p[:, TOKENS].sum(-1, keepdim=True)).sum() * p).sum(-1)
    assert not torch.allclose(found.alpha, renormalised), "the test would notice another p"


def test_other_losses_compare_within_the_draft_vocabulary() -> None:
    q, p = (x[:, TOKENS] for x in distributions())
    p = p / p.sum(-1, keepdim=True)
    assert torch.allclose(numbers("ce")[0].loss, -(p * q.log()).sum(-1))
    assert torch.allclose(numbers("rkl")[0].loss, (q * (q / p).log()).sum(-1))


def test_labels_outside_do_not_count() -> None:
    whole, _ = distributions()
    found, _ = numbers("hard_ce")
    labels = given()[-1]
    known = torch.isin(labels, torch.tensor(TOKENS))
    assert known.any() and not known.all() and torch.equal(found.counts, known)
    wanted = -whole[torch.arange(ROWS), labels].log()[known]
    assert torch.allclose(found.loss[known], wanted) and not found.loss[~known].any()
    assert torch.allclose(mean_of_rows(found), wanted.sum() / ROWS)
    parts = [
        RowNumbers(**{name: getattr(found, name)[rows] for name in RowNumbers.__dataclass_fields__})
        for rows in (slice(0, 2), slice(2, None))
    ]
    shares = [mean_of_rows(part) * len(part.counts) / ROWS for part in parts]
    assert torch.allclose(sum(shares), mean_of_rows(found)), "micro-batches add up"
    assert torch.allclose(found.draft_log[known], -wanted) and bool((found.draft_log[~known] < -1e3).all())


@pytest.mark.parametrize("kind", ["tv", "nla", "ce", "jsd", "hard_ce"])
def test_gradients_are_those_of_differences(kind: str) -> None:
    labels = given()[-1]

    def loss(draft: Tensor, own: Tensor) -> Tensor:
        _, head, target, weight, _ = given()
        head = DraftHead(weight=own, tokens=head.tokens)
        options = {"labels": labels} if needs_labels(kind) else {}
        return mean_of_rows(row_numbers(draft, head, target, weight, kind=kind, temperature=TEMPERATURE, **options))

    draft, head, *_ = given()
    value = loss(draft, head.weight)
    value.backward()
    for place, tensor in ((0, draft), (1, head.weight)):
        step = 1e-6 * torch.randn_like(tensor)
        pair = [draft.detach(), head.weight.detach()]
        ends = []
        for sign in (1, -1):
            moved = list(pair)
            moved[place] = moved[place] + sign * step
            ends.append(loss(moved[0], moved[1]))
        assert tensor.grad is not None
        assert torch.allclose((ends[0] - ends[1]) / 2, (tensor.grad * step).sum(), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("kind", LOSSES)
def test_the_whole_vocabulary_gives_the_losses_of_a_head(kind: str) -> None:
    everything = tuple(range(VOCAB))
    draft, head, target, weight, labels = given(everything)
    wanted = linear_draft_loss(
        draft, head.weight, target, weight, kind=kind, temperature=TEMPERATURE,
        labels=labels if needs_labels(kind) else None,
    )  # fmt: skip
    found, _ = numbers(kind, everything)
    assert torch.allclose(found.loss, wanted.loss) and torch.allclose(found.alpha, wanted.alpha)


def chains(tokens: tuple[int, ...]) -> Steps:
    """Chains of three steps at two places, one of which ends early."""
    torch.manual_seed(1)
    draft, target = (torch.randn(1, 2, 3, SIZE, dtype=torch.float64) for _ in range(2))
    own, weight = (torch.randn(n, SIZE, dtype=torch.float64) for n in (len(tokens), VOCAB))
    return Steps(
        draft=draft.requires_grad_(), target=target, weight=weight, tokens=torch.tensor([[[1, 2, 3], [4, 0, 6]]]),
        mask=torch.tensor([[[True, True, True], [True, False, False]]]), sampling=Sampling(temperature=TEMPERATURE),
        head=DraftHead(weight=own, tokens=torch.tensor(tokens)),
    )  # fmt: skip


@pytest.mark.parametrize("corrected", [False, True])
def test_expected_drafts_of_chains(corrected: bool) -> None:
    """Over the whole vocabulary as a head's; over a part of it written out."""
    name, everything = "e2e_tv_corrected" if corrected else "e2e_tv", tuple(range(VOCAB))
    steps = chains(everything)
    assert steps.head is not None
    flat = [x.flatten(0, 1) for x in (steps.draft, steps.target, steps.mask, steps.tokens)]
    wanted = linear_e2e_tv_loss(
        flat[0], steps.head.weight, flat[1], steps.weight, flat[2], tokens=flat[3] if corrected else None,
        temperature=TEMPERATURE,
    )  # fmt: skip
    assert torch.allclose(OBJECTIVES[name].loss(steps), wanted)
    part = chains(TOKENS)
    assert part.head is not None
    q = torch.zeros(2, 3, VOCAB, dtype=torch.float64)
    q[..., TOKENS] = (part.draft[0] @ part.head.weight.T / TEMPERATURE).softmax(-1).detach()
    p = (part.target[0] @ part.weight.T / TEMPERATURE).softmax(-1)
    alpha = torch.minimum(q, p).sum(-1)
    kept = alpha
    if corrected:
        at = part.tokens[0][..., None]
        kept = (q.gather(-1, at) / p.gather(-1, at)).clamp_max(1)[..., 0]
    first = (alpha[0, 0] + kept[0, 0] * alpha[0, 1] + kept[0, 0] * kept[0, 1] * alpha[0, 2]) / 3
    assert torch.allclose(OBJECTIVES[name].loss(part), ((1 - first) + (1 - alpha[1, 0])) / 2)


def test_means_are_taken_over_steps_and_anchors() -> None:
    per: dict[str, Per] = {name: objective.per for name, objective in OBJECTIVES.items()}
    assert per["tv"] == "step" and per["e2e_tv"] == "anchor"
    steps = chains(TOKENS)
    steps.draft.grad = None
    OBJECTIVES["tv"].loss(steps).backward()
    assert steps.draft.grad is not None
    touched = steps.draft.grad.abs().sum(-1)[0] > 0
    assert torch.equal(touched, steps.mask[0])

"""Training of the network of pairs: where PADs go, which labels count, whose gradients they are."""

import random
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from bebop.model.attention import CausalContext
from bebop.systems.pipo.losses import (
    PairBatch,
    PairRow,
    acceptance,
    batch_rows,
    opd_loss,
    reverse_kl,
    sft_loss,
    split_row,
    teacher_logprobs,
    without_pads,
)
from bebop.systems.pipo.network import ConfidenceHead
from bebop.trainer.chains import TokenRow
from tests.builders import tiny_pairs, tiny_policy

PAD, VOCAB = 0, 12
POLICY = tiny_policy(VOCAB, dtype=torch.float64)


def text(prompt: int, answer: int, seed: int = 0) -> TokenRow:
    numbers = random.Random(seed)
    return TokenRow(
        prompt=tuple(numbers.randrange(1, VOCAB) for _ in range(prompt)),
        answer=tuple(numbers.randrange(1, VOCAB) for _ in range(answer)),
    )


def stripped(pairs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    return tuple(token for pair in pairs for token in pair if token != PAD)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_split_changes_no_text_and_puts_pads_second(share: float) -> None:
    for prompt, answer in product(range(1, 4), range(1, 10)):
        row = text(prompt, answer, seed=answer)
        made = split_row(row, PAD, share, random.Random(1))
        assert stripped(made.pairs) == row.token_ids and stripped(made.pairs[: made.prompt]) == row.prompt
        assert all(first != PAD for first, _ in made.pairs)
        pads = sum(second == PAD for _, second in made.pairs[made.prompt :])
        if share == 0:
            assert pads == answer % 2
        if share == 1:
            assert pads == answer, "a token a pair"


def test_tokens_after_a_split_are_paired_anew() -> None:
    row = TokenRow(prompt=(1, 1), answer=(2, 3, 4, 5, 6, 7))
    made = {split_row(row, PAD, 0.34, random.Random(s)).pairs for s in range(30)}
    assert any((3, 4) in pairs for pairs in made) and any((2, 3) in pairs for pairs in made)


def test_labels_are_tokens_of_the_answer_and_no_pads() -> None:
    rows = [
        PairRow(pairs=((1, 2), (3, PAD), (4, PAD), (5, 6)), prompt=2, drafts=(9, PAD)),
        PairRow(pairs=((1, 2), (7, 8)), prompt=1),
    ]
    batch = batch_rows(rows, PAD)
    assert batch.firsts.tolist() == [[False, True, True], [True, False, False]]
    assert batch.seconds.tolist() == [[False, False, True], [True, False, False]]
    assert batch.drafted.tolist() == [[False, True, False], [False, False, False]], "rejected drafts count"
    assert batch.drafts[0].tolist() == [PAD, PAD, 9, PAD]
    assert PairRow.read(rows[0].line()) == rows[0]


def counted(length: int, start: int) -> TokenRow:
    numbers = [1 + (start + i) % 10 for i in range(length)]
    return TokenRow(prompt=tuple(numbers[:3]), answer=tuple(numbers[3:]))


@pytest.mark.slow
def test_both_places_learn_to_count() -> None:
    """With splits at random places: after (a, PAD) comes a + 1, after (a, a + 1) a + 2 and a + 3."""
    network, policy = tiny_pairs(tiny_policy(VOCAB)).requires_grad_(True), tiny_policy(VOCAB)
    optimizer = torch.optim.Adam(network.parameters(), lr=4e-3)
    numbers = random.Random(0)

    def batch() -> PairBatch:
        rows = [split_row(counted(14, numbers.randrange(10)), PAD, numbers.random(), numbers) for _ in range(16)]
        return batch_rows(rows, PAD)

    for _ in range(120):
        loss, _ = sft_loss(network, policy, batch())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = batch()
    h, u = network.read(policy, fresh.pairs)
    for states, where, place in ((h, fresh.firsts, 0), (u, fresh.seconds, 1)):
        guesses = network.logits(policy, states[where]).argmax(-1)
        assert float((guesses == fresh.pairs[:, 1:, place][where]).double().mean()) > 0.97


# ---- the teacher


def with_pads(seed: int = 3) -> PairBatch:
    rows = [split_row(text(p, a, seed=p), PAD, 0.5, random.Random(seed)) for p, a in ((3, 9), (4, 6), (1, 11))]
    return batch_rows(rows, PAD)


def remapped(shift: int = 0) -> float:
    """How far the teacher's log-probs at pairs are from a run over each text alone, its index off by ``shift``."""
    network, batch = tiny_pairs(POLICY), with_pads()
    first, second = teacher_logprobs(POLICY, network, batch)
    apart = 0.0
    for b, row in enumerate(batch.pairs.tolist()):
        tokens = [token for pair in row for token in pair if token != PAD]
        ids = torch.tensor([tokens])
        hidden = POLICY.hidden(ids, torch.arange(len(tokens))[None], CausalContext())
        clean = network.logits(POLICY, hidden)[0].log_softmax(-1)
        read = 0
        for i, (_, y) in enumerate(row):
            if row[i][0] == PAD:
                break
            if i > 0:
                apart = max(
                    apart, float((first[b, i - 1] - clean[read - 1 + shift]).exp().sub(1).nan_to_num().abs().max())
                )
                after = clean[min(read + shift, len(tokens) - 1)]
                apart = max(apart, float((second[b, i - 1] - after).exp().sub(1).nan_to_num().abs().max()))
            read += 1 + (y != PAD)
    return apart


def test_the_teacher_reads_the_text_without_pads_and_answers_at_each_place() -> None:
    with torch.no_grad():
        assert remapped() < 1e-9
        assert remapped(shift=1) > 1e-2


def test_a_place_without_a_token_stands_for_the_one_before() -> None:
    tokens, index = without_pads(torch.tensor([[[5, PAD], [6, 7], [8, PAD]]]), PAD)
    assert tokens[0, :4].tolist() == [5, 6, 7, 8] and index[0].tolist() == [[0, 0], [1, 2], [3, 3]]


def laws(places: int, seed: int = 0, vocab: int = 6) -> tuple[Tensor, Tensor]:
    """Student logits that need a gradient, and teacher log-probs, [N, V]."""
    numbers = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, places, vocab, generator=numbers, dtype=torch.float64)
    return student.requires_grad_(True), (1.5 * teacher).log_softmax(-1)


def test_a_student_that_is_the_teacher_is_accepted_for_certain() -> None:
    logits, teacher = laws(5)
    same = logits.detach().log_softmax(-1)
    drafts = torch.tensor([0, 1, 2, 3, 4])
    assert torch.equal(acceptance(same, same, drafts), torch.ones(5, dtype=torch.float64))
    assert float(reverse_kl(same, same).abs().max()) == 0
    assert float(acceptance(same, teacher, drafts).min()) < 0.9
    kept = acceptance(same, teacher, drafts)
    assert (kept <= 1).all() and not kept.requires_grad


def test_tokens_that_are_never_drawn_count_nothing() -> None:
    never = torch.tensor([[float("-inf"), 0.0, 1.0]]).log_softmax(-1).requires_grad_(True)
    teacher = torch.tensor([[float("-inf"), 1.0, 0.0]]).log_softmax(-1)
    value = reverse_kl(never, teacher)
    assert value.isfinite().all() and float(value.detach()) > 0
    (gradient,) = torch.autograd.grad(reverse_kl(never, teacher).sum(), never)
    assert gradient.isfinite().all()


def test_all_gradients_of_a_distillation_step_reach_the_network() -> None:
    network = tiny_pairs(POLICY).requires_grad_(True)
    rows = [PairRow(pairs=((1, 2), (3, PAD), (4, 5)), prompt=1, drafts=(6, 5))]
    loss, found = opd_loss(network, POLICY, batch_rows(rows, PAD))
    loss.backward()
    assert all(p.grad is not None for name, p in network.named_parameters() if "bias" not in name)
    other = [PairRow(pairs=rows[0].pairs, prompt=1, drafts=(7, 5))]
    _, numbers = opd_loss(network, POLICY, batch_rows(other, PAD))
    assert numbers["mean_target"] != found["mean_target"], "a draft that was rejected is a label, too"


# ---- the confidence head


def learned(labels: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What a head comes to say of 6 states with known distributions, and 1 - TV of these."""
    torch.manual_seed(0)
    logits, teacher = laws(6)
    student = logits.detach().log_softmax(-1)
    states = torch.randn(6, 32, dtype=torch.float64)
    head = ConfidenceHead(32, 1e-6).double()
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    for _ in range(400):
        drafts = torch.multinomial(student.exp(), 128, replacement=True)
        targets = labels(student, teacher, drafts)
        said = head(states, states.flip(1))[:, None].expand_as(targets)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(said, targets).backward()
        optimizer.step()
        rates.step()
    return head(states, states.flip(1)).sigmoid().detach(), torch.minimum(student.exp(), teacher.exp()).sum(-1)


def of_drafts(student: Tensor, teacher: Tensor, drafts: Tensor) -> Tensor:
    wide = drafts.shape[1]
    return acceptance(student[:, None].expand(-1, wide, -1), teacher[:, None].expand(-1, wide, -1), drafts)


def of_gold(student: Tensor, teacher: Tensor, drafts: Tensor) -> Tensor:
    """The target of SFT: the student's probability of the teacher's token."""
    gold = torch.multinomial(teacher.exp(), drafts.shape[1], replacement=True)
    return student.exp().gather(1, gold)


@pytest.mark.slow
def test_confidence_becomes_one_less_the_total_variation() -> None:
    said, wanted = learned(of_drafts)
    assert float((said - wanted).abs().max()) < 0.03
    said, wanted = learned(of_gold)
    assert (said < wanted + 0.03).all() and float((wanted - said).mean()) > 0.1, "the target of SFT is biased low"

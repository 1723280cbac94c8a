"""The loss of pseudo states against one that is written out anchor by anchor, and what training with it does.

Ranks of coming tokens, and cycles that follow from them, against drafts that are made and checked one by one.
"""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from bebop.config.adapt import AdaptConfig
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.truncation import truncate_
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp import training
from bebop.systems.firp.losses import (
    BEYOND,
    MEASURES,
    Anchored,
    cycles,
    drafts_and_targets,
    drafts_of,
    firp_loss,
    lay_out,
    read_rows,
    sums,
    token_ranks,
)
from bebop.systems.firp.network import PseudoContext, PseudoStates, RealText, hidden_with_pseudo, read_text
from bebop.systems.firp.options import FirpTraining
from bebop.systems.firp.training import FirpTrainer
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from bebop.trajectory import Completion, Prompt
from tests.builders import bare_policy, requests, tiny_policy
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


def test_matrices_learn_what_is_left_of_a_cut_distribution(policy: Policy) -> None:
    """Both the loss and what is reported as acceptance."""
    texts, sampling = laid_out(policy, 9), Sampling(target_top_k=2)
    drafts, targets = drafts_and_targets(policy, network(), texts, 1)
    mask = texts.mask(1)
    p = softmax(truncate_(policy.logits(targets[mask]), 1.0, 1.0, 2), -1)
    wanted = float((1 - torch.minimum(p, softmax(policy.logits(drafts[mask]), -1)).sum(-1)).mean().detach())
    assert float(firp_loss(policy, network(), texts, 1, kind="tv", sampling=sampling).detach()) == pytest.approx(wanted)
    found, places = sums(policy, network(), ROWS, sampling)
    assert float(1 - found[:, 0, 0].sum() / places[:, 0].sum()) == pytest.approx(wanted, rel=1e-4)
    assert wanted != pytest.approx(written_out(policy, texts, 1, "tv"), rel=1e-3)


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


# ---- ranks and cycles


PROMPTS = ((1, 2, 3), (3, 2), (5, 1, 1, 2))
SHAPE = {(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)}


@pytest.fixture(scope="module")
def rows(policy: Policy) -> list[TokenRow]:
    """Greedy answers of several lengths."""
    listed = []
    for prompt, count in zip(PROMPTS, (9, 1, 14), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + count:
            text = torch.tensor([ids])
            hidden = policy.hidden(text, torch.arange(len(ids))[None], CausalContext())
            ids.append(int(policy.logits(hidden[0, -1]).argmax()))
        listed.append(TokenRow(prompt=prompt, answer=tuple(ids[len(prompt) :])))
    return listed


def ranks_of(policy: Policy, rows: list[TokenRow]) -> list[list[list[int]]]:
    read = read_text(policy, LAYERS, [row.token_ids for row in rows])
    return token_ranks(drafts_of(policy, network()), rows, read, batch=2)


def best_drafts(policy: Policy, known: list[int]) -> list[list[int]]:
    """Tokens of each step, the likeliest first, from the token before the newest of what is known."""
    ids, anchor = torch.tensor([known[:-1]]), torch.tensor([[len(known) - 2]])
    context = PseudoContext.training(anchor, ids.shape[1])
    _, states = hidden_with_pseudo(policy, network(), ids, torch.arange(ids.shape[1])[None], anchor, context)
    ordered: list[list[int]] = policy.logits(states)[0, 0].argsort(-1, descending=True).tolist()
    return ordered


def decoded(policy: Policy, row: TokenRow, shape: set[tuple[int, ...]]) -> int:
    """Cycles of a decoder that drafts a tree and keeps the longest path that comes."""
    known, whole, count = list(row.prompt), row.token_ids, 0
    while len(known) < len(whole):
        drafts = best_drafts(policy, known)
        coming = list(whole[len(known) :])
        fits = [p for p in shape if [drafts[k][r] for k, r in enumerate(p)] == coming[: len(p)]]
        accepted = max((len(p) for p in fits), default=0)
        known, count = list(whole[: len(known) + accepted + 1]), count + 1
    return count


@pytest.mark.slow  # those of the engine are quick
def test_cycles_are_those_of_a_decoder(policy: Policy, rows: list[TokenRow]) -> None:
    for shape in (SHAPE, {(0,), (0, 0), (0, 0, 0)}, {(3,)}):
        ranks = ranks_of(policy, rows)
        assert [cycles(own, shape) for own in ranks] == [decoded(policy, row, shape) for row in rows]
    late = [own[1:] + own[-1:] for own in ranks]
    shape = {(0,), (1,), (2,)}
    assert [cycles(own, shape) for own in late] != [decoded(policy, row, shape) for row in rows]


def test_cycles_are_those_of_the_engine() -> None:
    """Which ends an answer in the middle of a cycle too, and drafts with other code."""
    model = tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)
    prompts = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2]]
    asked = {"temperature": 0.0, "max_new_tokens": 23}
    alone = DecodingConfig(system="autoregressive", draft_tokens=0)
    plain = generate(TorchEngine(model, alone, slots=4, max_length=64), requests(prompts, **asked))
    rows = [TokenRow(prompt=tuple(p), answer=tuple(a.token_ids.tolist())) for p, a in zip(prompts, plain, strict=True)]
    own = model.parts["firp"]
    assert isinstance(own, PseudoStates)
    read = read_text(model, own.layers, [row.token_ids for row in rows])
    ranks = token_ranks(drafts_of(model, own), rows, read)
    shape = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))
    decoding = DecodingConfig(system="firp", draft_tokens=len(shape), options={"shape": shape})
    drafted = generate(TorchEngine(model, decoding, slots=4, max_length=64), requests(prompts, **asked))
    assert [a.token_ids.tolist() for a in drafted] == [list(row.answer) for row in rows]
    counted = [a.stats.cycles for a in drafted]
    assert [cycles(one, {*shape}) for one in ranks] == counted and min(counted) < 23
    assert [cycles(one, {(0,), (0, 0)}) for one in ranks] != counted


def test_ranks_end_with_the_text(policy: Policy, rows: list[TokenRow]) -> None:
    ranks = ranks_of(policy, rows)
    assert [len(own) for own in ranks] == [9, 1, 14]
    assert [place.count(BEYOND) for place in ranks[0]] == [0] * 7 + [1, 2]
    assert ranks[1][0][0] >= 0 and ranks[1][0][1:] == [BEYOND] * 2
    assert all(0 <= rank < 6 for place in ranks[2][:-2] for rank in place)


def test_ranks_of_long_answers_are_counted_in_parts(policy: Policy) -> None:
    numbers = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (16, 43), generator=numbers).tolist()
    rows = [TokenRow(prompt=tuple(row[:3]), answer=tuple(row[3 : 43 - i])) for i, row in enumerate(ids)]
    read, drafts, sizes = read_text(policy, LAYERS, [row.token_ids for row in rows]), drafts_of(policy, network()), []

    def watched(real: RealText, anchors: Tensor) -> Tensor:
        sizes.append(anchors.numel())
        return drafts(real, anchors)

    assert token_ranks(watched, rows, read) == token_ranks(drafts, rows, read, batch=1)
    assert sum(sizes) == 16 * 40 and max(sizes) <= 256


def trainer(policy: Policy) -> FirpTrainer:
    """A trainer as far as ranks need it, without a folder."""
    one = object.__new__(FirpTrainer)
    one.config, one.options = AdaptConfig(progress=False), FirpTraining(calibration=2)
    one.policy, one.network = policy, network()
    return one


def prompts_of(*texts: tuple[int, ...]) -> list[Prompt]:
    return [Prompt(index=i, task="t", text="", token_ids=ids, item={}) for i, ids in enumerate(texts)]


def test_a_prompt_of_one_token_has_no_ranks(
    policy: Policy, rows: list[TokenRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {row.prompt: row.answer for row in rows} | {(4,): (1, 2)}

    def answers(policy: Policy, prompts: list[Prompt], *_: object, **__: object) -> list[Completion]:
        ids = [np.array(known[prompt.token_ids]) for prompt in prompts]
        return [Completion(token_ids=one, logprobs=np.zeros(len(one), np.float32), versions=one * 0) for one in ids]

    monkeypatch.setattr(training, "run_engine", answers)
    ranks = trainer(policy)._ranks(prompts_of((4,), *PROMPTS), 0, "greedy")
    assert ranks == ranks_of(policy, rows)


@pytest.mark.parametrize(("short", "word"), [(0, "calibrate"), (1, "measure")])
def test_prompts_of_one_token_alone_are_refused_before_training(
    short: int, word: str, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [prompts_of(*PROMPTS), prompts_of(*PROMPTS)]
    streams[short] = prompts_of((1,), (2,))
    monkeypatch.setattr(training, "question_streams", lambda config, policy: tuple(streams))
    with pytest.raises(UserError, match=f"the 2 prompts to {word} on have a single token each"):
        trainer(policy).run()


def test_a_tree_that_is_always_right_and_one_that_never_is() -> None:
    ranks = [[0, 0], [0, 0], [0, 0], [0, 0], [0, BEYOND], [BEYOND, BEYOND]]
    assert cycles(ranks, {(0,), (0, 0)}) == 2 and cycles(ranks, {(0,)}) == 3 and cycles(ranks, {(1,)}) == 6

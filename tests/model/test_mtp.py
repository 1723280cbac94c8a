"""The training chain is what the engine drafts, entry by entry; and both stand against the right position."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.bench.memory import peak_bytes
from bebop.config.job import DecodingConfig
from bebop.model import attention
from bebop.model.attention import CausalContext, PackedContext
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, chain
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.slots import Slots, SlotSizes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import SamplingParams
from tests.builders import bare_policy, requests
from tests.cases import slow_but

STEPS, LENGTH = 4, 16
Chain = Callable[[MTPHead, Tensor, Tensor, int], Iterator[Tensor]]


def text(seed: int = 0) -> Tensor:
    return torch.randint(0, 11, (LENGTH,), generator=torch.Generator().manual_seed(seed))


def trained(policy: Policy, ids: Tensor, run: Chain = chain) -> list[Tensor]:
    """Hidden states [T - i, d] of steps i = 1, 2, ... over a text."""
    assert policy.mtp is not None
    hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
    return [u[0] for u in run(policy.mtp, policy.embed(ids[None]), hidden, STEPS)]


def runner_at(policy: Policy, ids: Tensor, anchors: list[int]) -> tuple[DraftVerify, Rows]:
    """One slot an anchor t: tokens 0..t are fed, token t + 1 is the newest, and the drafter stands at step 1."""
    contexts = [ids[: t + 2].tolist() for t in anchors]
    slots = Slots(SlotSizes(slots=len(anchors), length=2 * LENGTH, drafts=STEPS, vocab=12), torch.device("cpu"))
    slots.start(0, [SamplingParams()] * len(anchors), contexts)
    decoder = DraftVerify(policy, slots, DecodingConfig(draft_tokens=STEPS))
    decoder.prefill(0, contexts)
    return decoder, Rows(slots, len(anchors), max(anchors) + 1)


def drafter_of(decoder: DraftVerify) -> MTPDrafter:
    assert isinstance(decoder.drafter, MTPDrafter)
    return decoder.drafter


def drafted(runner: tuple[DraftVerify, Rows], ids: Tensor, anchors: list[int]) -> list[Tensor]:
    """Hidden states [A, d] of steps 1, 2, ... that the engine computes when the text's own tokens are drafted."""
    decoder, rows = runner
    drafter = drafter_of(decoder)
    states = [drafter.hidden.clone()]
    for step in range(STEPS - 1):
        tokens = torch.stack([ids[t + 2 + step] for t in anchors])
        states.append(drafter.step(rows, step, tokens, states[-1]))
    return states


def anchored(policy: Policy, anchors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Hidden states [STEPS, 5, d] of the same five chains, and the gradient of a sum of them for the head's weights."""
    ids, at = text(4), torch.tensor([2, 5, 9, LENGTH - 2, 3])
    assert policy.mtp is not None
    policy.mtp.requires_grad_(True)
    policy.mtp.zero_grad()
    hidden = policy.hidden(ids[None], torch.arange(LENGTH)[None], CausalContext()).detach()
    steps = list(chain(policy.mtp, policy.embed(ids[None]), hidden, STEPS, anchors))
    if anchors is None:  # the fourth chain has no step after the first
        steps = [torch.cat([u[0], u.new_zeros(STEPS, u.shape[-1])])[at] for u in steps]
    else:
        steps = [u[0, :5] for u in steps]
    found = torch.stack(steps)
    found[1:, 3] = 0
    (found * torch.arange(found.numel()).reshape(found.shape).sin()).sum().backward()
    return found.detach(), torch.cat([p.grad.flatten() for p in policy.mtp.parameters() if p.grad is not None])


def test_few_chains_are_those_of_all_chains() -> None:
    """Anchors beyond the end of the text, as shorter rows have, change neither states nor gradients."""
    policy = bare_policy()
    for start in (torch.tensor([[2, 5, 9, LENGTH - 2, 3]]), torch.tensor([[2, 5, 9, LENGTH - 2, 3, LENGTH, 99]])):
        for all_chains, few in zip(anchored(policy, None), anchored(policy, start), strict=True):
            torch.testing.assert_close(few, all_chains, rtol=1e-4, atol=1e-5)


class Wrapped(torch.nn.Module):
    """A head that shows nothing of its layer, as one of megatron-core does."""

    def __init__(self, head: MTPHead) -> None:
        super().__init__()
        self._head = (head,)

    def forward(self, *given: Any) -> Tensor:
        return self._head[0](*given)


def test_a_head_of_another_library_runs_all_of_its_layer() -> None:
    policy, at = bare_policy(), torch.tensor([[2, 5]])
    assert policy.mtp is not None
    ids = text(4)
    hidden = policy.hidden(ids[None], torch.arange(LENGTH)[None], CausalContext())
    given = policy.embed(ids[None]), hidden, STEPS, at
    for own, other in zip(chain(policy.mtp, *given), chain(Wrapped(policy.mtp), *given), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(own[:, :2], other[:, :2], rtol=1e-4, atol=1e-5)


def gaps(policy: Policy, run: Chain) -> list[float]:
    """Largest difference between training and drafting, step by step, over all anchors that have all steps."""
    ids, anchors = text(), list(range(LENGTH - STEPS))
    engine = drafted(runner_at(policy, ids, anchors), ids, anchors)
    return [float((a - b[anchors]).abs().max()) for a, b in zip(engine, trained(policy, ids, run), strict=True)]


def depthwise(head: MTPHead, embeddings: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """The inputs of step i at all anchors form one causal sequence (SPEC 0.5, variant a)."""
    for step in range(1, steps + 1):
        anchors = embeddings.shape[1] - step
        positions = (torch.arange(anchors) + step - 1)[None]
        hidden = head(embeddings[:, step:], hidden[:, :anchors], positions, CausalContext())
        yield hidden


def unmoved(head: MTPHead, embeddings: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """Recursive steps keep the anchor's position id."""

    class Unmoved(MTPHead):
        def forward(self, e: Tensor, h: Tensor, positions: Tensor, context: object) -> Tensor:
            return head(e, h, positions - positions[:, :1], context)  # type: ignore[arg-type]

    stub = Unmoved.__new__(Unmoved)
    torch.nn.Module.__init__(stub)
    yield from chain(stub, embeddings, hidden, steps)


def early(head: MTPHead, embeddings: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
    """Every step reads the token that it already read: off by one."""
    yield from chain(head, torch.cat([embeddings[:, :1], embeddings[:, :-1]], 1), hidden, steps)


@pytest.mark.parametrize("seed", [0, 1])
@torch.no_grad()
def test_the_training_chain_is_what_the_engine_drafts(seed: int) -> None:
    assert max(gaps(bare_policy(seed=seed), chain)) < 1e-5


@pytest.mark.parametrize(("run", "first"), [(depthwise, 1), (unmoved, 1), (early, 0)])
@torch.no_grad()
def test_broken_chains_are_caught(run: Chain, first: int) -> None:
    errors = gaps(bare_policy(), run)
    assert max(errors[:first], default=0.0) < 1e-5 and min(errors[first:]) > 1e-3


def second_cycle(policy: Policy, follow: bool) -> list[float]:
    """The same after a cycle in which row b kept b of its drafts and the text went on otherwise than drafted."""
    ids, anchors = text(5), [1, 4, 2, 6, 3]
    kept = torch.tensor([0, 1, 2, 3, STEPS])
    decoder, rows = runner_at(policy, ids, anchors)
    drafter, slots = drafter_of(decoder), rows.slots
    true = torch.stack([ids[t + 2 : t + 2 + STEPS] for t in anchors])
    drafts = torch.where(torch.arange(STEPS) < kept[:, None], true, (true + 1) % 11)
    state = drafter.hidden
    for step in range(STEPS - 1):
        state = drafter.step(rows, step, drafts[:, step], state)
    last = torch.stack([ids[t + 1 : t + 2] for t in anchors])
    hidden, *_ = decoder.target.verify(rows, torch.cat([last, drafts], 1))
    out = TargetOutput(hidden=hidden, logits=hidden, probs=hidden)
    tokens = torch.cat([drafts, drafts[:, -1:]], 1)
    right = torch.stack([ids[t + 2 + k] for t, k in zip(anchors, kept, strict=True)])
    tokens.scatter_(1, kept[:, None], right[:, None])
    if follow:
        drafter.commit(rows, out, tokens, kept + 1)
    else:  # entries of the chain stay in the cache, and the last draft's state is gone on with
        drafter.hidden[:] = state
    slots.fed[:] += kept + 1
    now = [t + int(k) + 1 for t, k in zip(anchors, kept, strict=True)]
    engine, train = drafted((decoder, Rows(slots, len(now), max(now) + 1)), ids, now), trained(policy, ids)
    return [float((a - b[now]).abs().max()) for a, b in zip(engine, train, strict=True)]


@torch.no_grad()
def test_after_a_cycle_the_drafter_stands_on_real_hidden_states() -> None:
    policy = bare_policy(seed=2)
    assert max(second_cycle(policy, follow=True)) < 1e-5
    assert min(second_cycle(policy, follow=False)) > 1e-3


def successor_policy(reads: str = "embedding") -> Policy:
    """Backbone and head with hand-set weights: the backbone's distribution after token v is v + 1, whatever came
    before.

    The head says (the token it is fed) + 1, so that step i at anchor t, fed token t + i, gives exactly the backbone's
    distribution at position t + i. Reading the hidden state instead, it says what it should have said one step earlier.
    """
    policy = bare_policy()
    assert policy.mtp is not None
    size, vocab = 32, 12
    with torch.no_grad():
        for layer in (*policy.backbone.get_decoder().layers, policy.mtp.layer):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        policy.backbone.get_input_embeddings().weight.copy_(torch.eye(vocab, size))
        policy.backbone.lm_head.weight.copy_(20 * torch.eye(vocab, size).roll(1, 0))
        project = policy.mtp.project.weight.zero_()
        columns = slice(0, size) if reads == "embedding" else slice(size, 2 * size)
        project[:, columns] = torch.eye(size)
    policy.mtp.zero_first = False
    return policy


@torch.no_grad()
def test_step_i_at_anchor_t_stands_against_position_t_plus_i() -> None:
    policy, ids = successor_policy(), text(7)
    hidden = policy.hidden(ids[None], torch.arange(LENGTH)[None], PackedContext(torch.tensor([LENGTH])))[0]
    target = policy.logits(hidden).softmax(-1)
    assert torch.equal(target.argmax(-1), (ids + 1) % 12)
    for i, u in enumerate(trained(policy, ids), start=1):
        draft = policy.logits(u).softmax(-1)
        assert draft.shape[0] == LENGTH - i
        assert torch.allclose(draft, target[i:], atol=1e-6)
        overlap = torch.minimum(draft[1:], target[i : LENGTH - 1]).sum(-1)  # one position early
        assert overlap.mean() < 0.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_holds_each_draft_against_the_same_position(temperature: float) -> None:
    asked = requests([[4, 3], [5, 1, 9], [2, 7]], temperature=temperature, max_new_tokens=16)
    system = DecodingConfig(system="bebop", draft_tokens=3)
    for answer in generate(TorchEngine(successor_policy(), system, slots=3, max_length=32), asked):
        assert answer.stats.cycles == 4 and answer.stats.accepted.tolist() == [4, 4, 4]
        assert (answer.token_ids[1:] == (answer.token_ids[:-1] + 1) % 12).all()
    for answer in generate(TorchEngine(successor_policy("hidden"), system, slots=3, max_length=32), asked):
        assert answer.stats.accepted.sum() == 0


# ---- memory


@pytest.mark.parametrize("anchored", slow_but([], [False, True]))
def test_chains_in_chunks_are_those_of_one_pass_in_less_memory(anchored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """States and gradients of 3 steps; the scores of one step, [4 heads, 400, 400] in fp32, take 2.6 MB."""
    policy, length = bare_policy(), 400
    assert policy.mtp is not None
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, length, 32, generator=generator, requires_grad=True) for _ in range(2)]
    anchors = torch.arange(0, length - 4)[None] if anchored else None
    found: list[list[Tensor]] = []

    def learned() -> None:
        steps = list(chain(policy.mtp, *inputs, 3, anchors))
        loss = sum((u * torch.linspace(-1, 1, u.numel()).view_as(u)).sum() for u in steps)
        found.append([*steps, *torch.autograd.grad(loss, [*inputs, *policy.mtp.parameters()])])

    whole = peak_bytes(learned)
    monkeypatch.setattr(attention, "SCORES", {"cpu": 4 * 30 * length})  # 14 chunks of 30 anchors or fewer
    chunked = peak_bytes(learned)
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert float((ours - wanted).detach().norm()) < 1e-5 * float(wanted.detach().norm())
    assert whole > 4 * 2.6e6, "scores, weights and their gradients"
    assert chunked < whole / 3

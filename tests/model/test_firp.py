"""Pseudo hidden states: what real states and pseudo states depend on, and what they can reach at best (SPEC 3.5).

Beside text that was read before, states and gradients are those of a pass in which both are.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from bebop.errors import UserError
from bebop.model.attention import ATTENTION, AttentionContext, CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import gather_rows
from bebop.systems import firp
from bebop.systems.firp.network import (
    PseudoContext,
    PseudoStates,
    RealText,
    hidden_with_pseudo,
    pseudo_beside,
    read_text,
    size_of_text,
)
from tests.builders import bare_policy, letters
from tests.cases import slow_but

LENGTH, SIZE, STEPS, LAYERS = 10, 32, 3, (2, 3, 3)
ANCHORS = torch.tensor([[0, 2, 3, 5], [5, 4, 1, 0]])  # with true tokens three places later


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = bare_policy(8, seed=4, layers=5, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


def network(
    masked: bool = False, layers: Sequence[int] = LAYERS, kind: type[PseudoStates] = PseudoStates
) -> PseudoStates:
    """Matrices that are not the identity."""
    made = kind(hidden_size=SIZE, layers=layers, masked=masked).double()
    numbers = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in made.maps:
            one.weight.add_(0.3 * torch.randn(SIZE, SIZE, generator=numbers, dtype=torch.float64))  # type: ignore[operator]
    return made


def texts(seed: int = 0) -> Tensor:
    return torch.randint(0, 8, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def passed(
    policy: Policy,
    own: PseudoStates,
    ids: Tensor | None = None,
    context: type[PseudoContext] = PseudoContext,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Real states [2, L, d] and pseudo states [2, A, K, d]; ``offset``: added to every position id."""
    ids = texts() if ids is None else ids
    positions = torch.arange(LENGTH).expand(2, -1) + offset
    return hidden_with_pseudo(policy, own, ids, positions, ANCHORS, context.training(ANCHORS, LENGTH, own.masked))


def frozen(policy: Policy, ids: Tensor, offset: int = 0) -> Tensor:
    return policy.hidden(ids, torch.arange(LENGTH).expand(2, -1) + offset, CausalContext())


class Leaks(PseudoContext):
    """The last real state takes in what a pseudo state has seen."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = super().attend(layer, query, key, value, scaling)
        last = self.width - 1
        return torch.cat([out[:, :last], out[:, last : last + 1] + out[:, -1:], out[:, last + 1 :]], 1)


# ---- F1: real states


def test_real_logits_are_those_of_the_model_alone(policy: Policy) -> None:
    alone = policy.logits(frozen(policy, texts()))
    for masked in (False, True):
        real, _ = passed(policy, network(masked))
        assert (policy.logits(real) - alone).abs().max() < 1e-10
    real, _ = passed(policy, network(), context=Leaks)
    assert (policy.logits(real) - alone).abs().max() > 1e-3


# ---- F2: the mask


def changed(policy: Policy, own: PseudoStates, place: int, context: type[PseudoContext] = PseudoContext) -> Tensor:
    """Which pseudo states [2, A] change, in any step, with the token at ``place``."""
    ids = texts()
    ids[:, place] = (ids[:, place] + 3) % 8
    difference = passed(policy, own, ids, context)[1] - passed(policy, own, None, context)[1]
    return difference.abs().amax((-2, -1)) > 1e-9


class SeesOneMore(PseudoContext):
    """An anchor sees the token after it."""

    def __init__(self, real: AttentionContext, width: int, seen: Tensor, masked: bool = False) -> None:
        super().__init__(real, width, torch.nn.functional.pad(seen, (1, 0), value=True)[..., :-1], masked)


class SeesOthers(PseudoContext):
    """A pseudo state sees those of other anchors."""

    def own(self, count: int) -> Tensor:
        return torch.ones_like(super().own(count))


@pytest.mark.parametrize("masked", slow_but([False], [False, True]))
def test_a_pseudo_state_depends_on_the_text_up_to_its_anchor_and_no_further(policy: Policy, masked: bool) -> None:
    for place in range(LENGTH):
        assert torch.equal(changed(policy, network(masked), place), place <= ANCHORS)
    for broken in (SeesOneMore, SeesOthers):
        found = [changed(policy, network(masked), place, broken) for place in range(LENGTH)]
        assert any(not torch.equal(one, place <= ANCHORS) for place, one in enumerate(found))


class Moved(PseudoStates):
    """Step 1 makes other states for its first anchor."""

    def pseudo(self, step: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        made = super().pseudo(step, hidden, anchors)
        return made if step else torch.cat([made[:, :1] + 1, made[:, 1:]], 1)


@pytest.mark.parametrize("masked", [False, True])
def test_later_steps_see_earlier_ones_of_their_anchor_unless_masked(policy: Policy, masked: bool) -> None:
    before, after = (passed(policy, network(masked, kind=kind))[1] for kind in (PseudoStates, Moved))
    moved = (before - after).abs().amax(-1) > 1e-9  # [2, A, K]
    wanted = torch.zeros(2, 4, STEPS, dtype=torch.bool)
    wanted[:, 0] = torch.tensor([True, not masked, not masked])
    assert torch.equal(moved, wanted)


# ---- F3, F5: positions, and the best that can be


class Oracle(PseudoStates):
    """The true state of token i + k instead of a guess; ``late``: that of a token further on."""

    late = 0

    def pseudo(self, step: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        return gather_rows(hidden, anchors + step + 1 + self.late)


class LateOracle(Oracle):
    late = 1


def oracle_errors(policy: Policy, own: PseudoStates, context: type[PseudoContext] = PseudoContext) -> list[float]:
    """How far the logits of each step are from the model's own at position i + k."""
    _, pseudo = passed(policy, own, context=context)
    wanted = policy.logits(frozen(policy, texts()))
    return [
        float((policy.logits(pseudo[:, :, k]) - gather_rows(wanted, ANCHORS + k + 1)).abs().max())
        for k in range(pseudo.shape[2])
    ]


@pytest.mark.parametrize("layers", [LAYERS, (1, 1, 1), (1, 4, 5)])
def test_true_states_give_the_true_distributions(policy: Policy, layers: tuple[int, ...]) -> None:
    """Without a mask this holds for every step: the earlier ones are the tokens in between."""
    assert max(oracle_errors(policy, network(layers=layers, kind=Oracle))) < 1e-10
    late = oracle_errors(policy, network(layers=layers, kind=LateOracle))
    assert min(late) > 1e-3


def test_masked_steps_miss_the_tokens_in_between(policy: Policy) -> None:
    first, *others = oracle_errors(policy, network(masked=True, kind=Oracle))
    assert first < 1e-10 and min(others) > 1e-3
    assert oracle_errors(policy, network(kind=Oracle), SeesOneMore)[0] > 1e-3


def test_position_ids_follow_the_anchor(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are relative: an offset of all changes nothing, one of the pseudo states alone does."""
    before = passed(policy, network())[1]
    assert (passed(policy, network(), offset=7)[1] - before).abs().max() < 1e-5  # rotations are fp32
    whole = firp.network._longer

    def late(decoder, settings, later, rotary):  # type: ignore[no-untyped-def]
        return whole(decoder, settings, later, decoder.rotary_emb(rotary[0], later + 1))

    monkeypatch.setattr(firp.network, "_longer", late)
    assert (passed(policy, network())[1] - before).abs().max() > 1e-3
    assert min(oracle_errors(policy, network(layers=(2, 2, 2), kind=Oracle))) > 1e-3


# ---- F8, F9: parameters


def gradients(policy: Policy, own: PseudoStates) -> None:
    passed(policy, own)[1].square().sum().backward()  # type: ignore[no-untyped-call]


def test_gradients_reach_the_matrices_alone(policy: Policy) -> None:
    own = network()
    gradients(policy, own)
    assert all(one.weight.grad.abs().sum() > 0 for one in own.maps)  # type: ignore[union-attr, operator]
    assert all(p.grad is None for p in policy.backbone.parameters())
    open_policy = bare_policy(8, seed=4, layers=5, dtype=torch.float64)
    gradients(open_policy, network())
    reached = {name.split(".")[2] for name, p in open_policy.backbone.named_parameters() if p.grad is not None}
    assert {"2", "3", "4"} <= reached, "a backbone that is not frozen gets some"


def test_there_are_k_d_squared_parameters_and_they_begin_as_the_identity() -> None:
    own = PseudoStates(hidden_size=SIZE, layers=LAYERS)
    assert sum(p.numel() for p in own.parameters()) == STEPS * SIZE**2
    assert all(torch.equal(p, torch.eye(SIZE)) for p in own.parameters())


# ---- what does not fit


@pytest.mark.parametrize("layers", [(), (0, 1), (3, 2)])
def test_layers_that_are_not_possible(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="do not fall"):
        PseudoStates(hidden_size=SIZE, layers=layers)


def test_models_that_do_not_fit(policy: Policy) -> None:
    network().check(policy)
    with pytest.raises(UserError, match=r"after layer 6, and the model has layers 1\.\.5"):
        network(layers=(6,)).check(policy)
    config = GPTNeoXConfig(
        vocab_size=8, hidden_size=SIZE, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation=ATTENTION,
    )  # fmt: skip
    other = Policy(backbone=GPTNeoXForCausalLM(config), tokenizer=letters(8), mtp=None, layout="mimo")
    with pytest.raises(UserError, match="GPTNeoXModel differs"):
        network(layers=(1,)).check(other)


# ---- beside text that was read before


TEXTS = [(1, 2, 3, 4, 5, 1, 0), (3, 2, 2), (5, 1, 1, 2, 3, 4, 4, 1, 2)]
TEXT_ANCHORS = torch.tensor([[1, 4, 5], [2, 0, 1], [8, 3, 0]])
TEXT_LAYERS = [(1, 2, 2), (2, 2, 4), (3, 5, 5)]


def together(policy: Policy, own: PseudoStates) -> tuple[Tensor, Tensor]:
    """Real states and pseudo states of one pass."""
    ids = pad_sequence([torch.tensor(text) for text in TEXTS], batch_first=True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    context = PseudoContext.training(TEXT_ANCHORS, ids.shape[1], own.masked)
    return hidden_with_pseudo(policy, own, ids, positions, TEXT_ANCHORS, context)


def apart(policy: Policy, own: PseudoStates, read: list[RealText] | None = None, late: int = 0) -> Tensor:
    """``late``: what is seen of the text, but not position ids, is that of anchors so much later."""
    read = read_text(policy, own.layers, TEXTS, batch=2) if read is None else read
    real = RealText.beside(read)
    if late:
        pad = real.held[..., -late:, :]
        held = torch.cat([real.held[..., late:, :], pad], -2)
        real = RealText(hidden=real.hidden, entering=real.entering, held=held)
    return pseudo_beside(policy, own, real, TEXT_ANCHORS, len(own.layers))[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", TEXT_LAYERS)
def test_states_are_those_of_one_pass(policy: Policy, layers: tuple[int, ...], masked: bool) -> None:
    own = network(masked, layers)
    real, wanted = together(policy, own)
    assert (apart(policy, own) - wanted).abs().max() < 1e-10
    alone = [one.hidden[0] for one in read_text(policy, layers, TEXTS)]
    assert max(float((a - real[i, : len(a)].detach()).abs().max()) for i, a in enumerate(alone)) < 1e-10
    if min(layers) < 5:
        assert (apart(policy, own, late=1) - wanted).abs().max() > 1e-3
        assert ((apart(policy, network(not masked, layers)) - wanted).abs().max() > 1e-3) == (layers[1] < 5)


def gradients_of_last(states: Tensor, own: PseudoStates, taking: int) -> list[Tensor | None]:
    """Of a function of the last ``taking`` steps."""
    own.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=states.dtype)
    (states * weights)[:, :, -taking:].sum().backward()  # type: ignore[no-untyped-call]
    return [one.weight.grad for one in own.maps]  # type: ignore[misc]


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_one_pass(policy: Policy, masked: bool) -> None:
    """Those into earlier matrices go through the keys and values that later steps see."""
    own = network(masked, (1, 2, 2))
    wanted = [g.clone() for g in gradients_of_last(together(policy, own)[1], own, 1) if g is not None]
    found = [g for g in gradients_of_last(apart(policy, own), own, 1) if g is not None]
    if masked:  # then nothing goes there: no gradient, or one of zeros
        wanted, found = wanted[-1:], found[-1:]
    assert len(wanted) == len(found) == (1 if masked else 3)
    assert all(float((a - b).abs().max()) < 1e-10 < float(a.abs().max()) for a, b in zip(wanted, found, strict=True))
    other = network(not masked, (1, 2, 2))
    last = gradients_of_last(apart(policy, other), other, 1)[-1]
    assert last is not None and (last - found[-1]).abs().max() > 1e-3


def test_what_is_kept_takes_as_much_as_is_said(policy: Policy) -> None:
    for layers in TEXT_LAYERS:
        for text, one in zip(TEXTS, read_text(policy, layers, TEXTS), strict=True):
            tensors = [one.hidden, *one.entering.values(), one.held]
            assert sum(x.numel() * x.itemsize for x in tensors) == len(text) * size_of_text(policy, layers)


@pytest.mark.parametrize("layers", TEXT_LAYERS)
def test_what_was_read_for_many_layers_serves_a_network_of_some(policy: Policy, layers: tuple[int, ...]) -> None:
    many, own = read_text(policy, (1, 2, 3, 4, 5), TEXTS), network(layers=layers)
    some = [text.only(layers) for text in many]
    assert torch.equal(apart(policy, own, some), apart(policy, own))
    alone = read_text(policy, layers, TEXTS)
    assert all(
        a.held.equal(b.held) and a.entering.keys() == b.entering.keys() for a, b in zip(some, alone, strict=True)
    )
    assert not many[0].only(()).entering and not len(many[0].only(()).held)
    shifted = [RealText(hidden=a.hidden, entering=a.entering, held=b.held) for a, b in zip(some, many, strict=True)]
    assert ((apart(policy, own, shifted) - apart(policy, own)).abs().max() > 1e-3) == (min(layers) > 1)


def test_after_the_last_layer_a_pseudo_state_is_a_linear_head(policy: Policy) -> None:
    """F4: no layer follows, so that it sees nothing but its own anchor."""
    own = network(layers=(5,))
    real = RealText.beside(read_text(policy, (5,), TEXTS))
    drafts, _ = pseudo_beside(policy, own, real, TEXT_ANCHORS, 1)
    state = real.entering[5].gather(1, TEXT_ANCHORS[..., None].expand(-1, -1, 32))
    wanted = policy.backbone.get_decoder().norm(state @ own.maps[0].weight.T)  # type: ignore[operator]
    assert (drafts[:, :, 0] - wanted).abs().max() < 1e-10
    assert (drafts[:, :, 0] - policy.backbone.get_decoder().norm(state)).abs().max() > 1e-3


def test_what_a_step_is_after_each_layer(policy: Policy) -> None:
    own = network(layers=(2, 4, 5))
    real = RealText.beside(read_text(policy, own.layers, TEXTS))
    drafts, passed = pseudo_beside(policy, own, real, TEXT_ANCHORS, 3, taps=True)
    assert [len(one) for one in passed] == [4, 2, 1]
    last = policy.backbone.get_decoder().norm(torch.stack([one[-1] for one in passed], 2))
    assert torch.equal(last, drafts)

"""Pseudo states beside text that was read before, against a pass in which both are: the same states and gradients."""

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.model.backbone import Policy
from bebop.systems.firp.network import (
    PseudoContext,
    PseudoStates,
    RealText,
    hidden_with_pseudo,
    pseudo_beside,
    read_text,
    size_of_text,
)
from tests.builders import bare_policy

TEXTS = [(1, 2, 3, 4, 5, 1, 0), (3, 2, 2), (5, 1, 1, 2, 3, 4, 4, 1, 2)]
ANCHORS = torch.tensor([[1, 4, 5], [2, 0, 1], [8, 3, 0]])
LAYERS = [(1, 2, 2), (2, 2, 4), (3, 5, 5)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = bare_policy(8, seed=4, layers=5, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


def network(layers: tuple[int, ...], masked: bool = False) -> PseudoStates:
    made = PseudoStates(hidden_size=32, layers=layers, masked=masked).double()
    numbers = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in made.parameters():
            one.add_(0.3 * torch.randn(32, 32, generator=numbers, dtype=torch.float64))
    return made


def together(policy: Policy, own: PseudoStates) -> tuple[Tensor, Tensor]:
    """Real states and pseudo states of one pass."""
    ids = pad_sequence([torch.tensor(text) for text in TEXTS], batch_first=True)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    context = PseudoContext.training(ANCHORS, ids.shape[1], own.masked)
    return hidden_with_pseudo(policy, own, ids, positions, ANCHORS, context)


def apart(policy: Policy, own: PseudoStates, read: list[RealText] | None = None, late: int = 0) -> Tensor:
    """``late``: what is seen of the text, but not position ids, is that of anchors so much later."""
    read = read_text(policy, own.layers, TEXTS, batch=2) if read is None else read
    real = RealText.beside(read)
    if late:
        pad = real.held[..., -late:, :]
        held = torch.cat([real.held[..., late:, :], pad], -2)
        real = RealText(hidden=real.hidden, entering=real.entering, held=held)
    return pseudo_beside(policy, own, real, ANCHORS, len(own.layers))[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("layers", LAYERS)
def test_states_are_those_of_one_pass(policy: Policy, layers: tuple[int, ...], masked: bool) -> None:
    own = network(layers, masked)
    real, wanted = together(policy, own)
    assert (apart(policy, own) - wanted).abs().max() < 1e-10
    alone = [one.hidden[0] for one in read_text(policy, layers, TEXTS)]
    assert max(float((a - real[i, : len(a)].detach()).abs().max()) for i, a in enumerate(alone)) < 1e-10
    if min(layers) < 5:
        assert (apart(policy, own, late=1) - wanted).abs().max() > 1e-3
        assert ((apart(policy, network(layers, not masked)) - wanted).abs().max() > 1e-3) == (layers[1] < 5)


def gradients(states: Tensor, own: PseudoStates, taking: int) -> list[Tensor | None]:
    """Of a function of the last ``taking`` steps."""
    own.zero_grad()
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1), dtype=states.dtype)
    (states * weights)[:, :, -taking:].sum().backward()  # type: ignore[no-untyped-call]
    return [one.weight.grad for one in own.maps]  # type: ignore[misc]


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_one_pass(policy: Policy, masked: bool) -> None:
    """Those into earlier matrices go through the keys and values that later steps see."""
    own = network((1, 2, 2), masked)
    wanted = [g.clone() for g in gradients(together(policy, own)[1], own, 1) if g is not None]
    found = [g for g in gradients(apart(policy, own), own, 1) if g is not None]
    if masked:  # then nothing goes there: no gradient, or one of zeros
        wanted, found = wanted[-1:], found[-1:]
    assert len(wanted) == len(found) == (1 if masked else 3)
    assert all(float((a - b).abs().max()) < 1e-10 < float(a.abs().max()) for a, b in zip(wanted, found, strict=True))
    other = network((1, 2, 2), not masked)
    last = gradients(apart(policy, other), other, 1)[-1]
    assert last is not None and (last - found[-1]).abs().max() > 1e-3


def test_what_is_kept_takes_as_much_as_is_said(policy: Policy) -> None:
    for layers in LAYERS:
        for text, one in zip(TEXTS, read_text(policy, layers, TEXTS), strict=True):
            tensors = [one.hidden, *one.entering.values(), one.held]
            assert sum(x.numel() * x.itemsize for x in tensors) == len(text) * size_of_text(policy, layers)


@pytest.mark.parametrize("layers", LAYERS)
def test_what_was_read_for_many_layers_serves_a_network_of_some(policy: Policy, layers: tuple[int, ...]) -> None:
    many, own = read_text(policy, (1, 2, 3, 4, 5), TEXTS), network(layers)
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
    own = network((5,))
    real = RealText.beside(read_text(policy, (5,), TEXTS))
    drafts, _ = pseudo_beside(policy, own, real, ANCHORS, 1)
    state = real.entering[5].gather(1, ANCHORS[..., None].expand(-1, -1, 32))
    wanted = policy.backbone.get_decoder().norm(state @ own.maps[0].weight.T)  # type: ignore[operator]
    assert (drafts[:, :, 0] - wanted).abs().max() < 1e-10
    assert (drafts[:, :, 0] - policy.backbone.get_decoder().norm(state)).abs().max() > 1e-3


def test_what_a_step_is_after_each_layer(policy: Policy) -> None:
    own = network((2, 4, 5))
    real = RealText.beside(read_text(policy, own.layers, TEXTS))
    drafts, passed = pseudo_beside(policy, own, real, ANCHORS, 3, taps=True)
    assert [len(one) for one in passed] == [4, 2, 1]
    last = policy.backbone.get_decoder().norm(torch.stack([one[-1] for one in passed], 2))
    assert torch.equal(last, drafts)

"""The network of pairs: what it begins as, what its states depend on, and what its confidence head trains."""

from itertools import pairwise
from typing import get_args

import pytest
import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.model.attention import CausalContext, SlotContext
from bebop.systems.pipo.network import Compression, Compressor, PairModel, as_pairs, settings_for, spaced_layers
from tests.builders import tiny_pairs, tiny_policy

POLICY = tiny_policy(dtype=torch.float64)


def text(pairs: int, batch: int = 2, seed: int = 0) -> Tensor:
    """Random pairs [B, n, 2] without the pad token."""
    return torch.randint(1, 12, (batch, pairs, 2), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", get_args(Compression))
def test_a_compressor_begins_as_the_sum_unless_it_is_an_ablation(kind: Compression) -> None:
    a, b = torch.randn(2, 5, 32, dtype=torch.float64)
    made = Compressor(32, kind).double()(a, b)
    if kind == "mlp":
        assert torch.equal(made, a + b)
    else:
        assert float((made - a - b).detach().abs().max()) > 0.1


def test_text_without_second_tokens_is_read_as_the_policy_reads_it() -> None:
    """Whose embedding of the pad token is 0: f(a, PAD) = a at the start, and a position holds one token."""
    policy = tiny_policy(dtype=torch.float64)
    with torch.no_grad():
        policy.embed(torch.tensor([0])), policy.backbone.get_input_embeddings().weight[0].zero_()
    settings = {"backbone": settings_of(), "pad": 0}
    network = PairModel(**settings).double()
    network.start_from(policy)
    tokens = text(9)[..., 0]
    h, _ = network.read(policy, torch.stack([tokens, torch.zeros_like(tokens)], -1))
    positions = torch.arange(8).expand(2, -1)
    torch.testing.assert_close(h, policy.hidden(tokens[:, :-1], positions, CausalContext()))
    whole, _ = network.read(policy, torch.stack([tokens, tokens.flip(1)], -1))
    assert float((whole - h).abs().max().detach()) > 1e-2


@pytest.mark.slow  # the quick part of this file has a budget
def test_a_network_of_fewer_layers_begins_with_evenly_spaced_ones_of_the_policy() -> None:
    assert spaced_layers(30, 12)[:3] == [0, 3, 5] and spaced_layers(30, 12)[-1] == 29
    assert spaced_layers(4, 4) == [0, 1, 2, 3] and spaced_layers(4, 1) == [0]
    policy = tiny_policy(dtype=torch.float64, layers=3, with_parts=False)
    network = PairModel(backbone={**settings_of(), "num_hidden_layers": 2}, pad=0).double()
    network.start_from(policy)
    own = [layer.mlp.up_proj.weight for layer in policy.backbone.get_decoder().layers]
    found = [layer.mlp.up_proj.weight for layer in network.decoder.layers]
    assert len(found) == 2 and torch.equal(found[0], own[0]) and torch.equal(found[1], own[2])
    with pytest.raises(UserError, match=r"options\.layers=4 is not possible: the model has 3 layers"):
        policy.tokenizer.pad_token = "a"
        settings_for(policy, layers=4)


@pytest.mark.slow  # as above
def test_a_token_may_be_named_that_fills_half_pairs() -> None:
    policy = tiny_policy()
    assert settings_for(policy, pad=3)["pad"] == 3
    for pad, message in ((11, "that token ends completions"), (12, "give a number from 0 to 11")):
        with pytest.raises(UserError, match=f"options.pad={pad} is not possible: {message}"):
            settings_for(policy, pad=pad)


def settings_of() -> dict[str, object]:
    config = POLICY.backbone.config
    return {**config.to_diff_dict(), "model_type": config.model_type}


def reached(change: tuple[int, int], network: PairModel) -> tuple[list[int], list[int]]:
    """Which entries of h and of u another token at (pair, place) changes."""
    pairs = text(6, batch=1)
    other = pairs.clone()
    other[0, change[0], change[1]] = other[0, change[0], change[1]] % 11 + 1
    before, after = network.read(POLICY, pairs), network.read(POLICY, other)
    h, u = (((x - y).abs().amax(-1) > 1e-9)[0].nonzero()[:, 0].tolist() for x, y in zip(before, after, strict=True))
    return h, u


class Late(PairModel):
    """The MTP block is given the token that it should predict."""

    def read(self, policy, pairs):  # type: ignore[no-untyped-def]
        return super().read(policy, pairs.flip(-1))


def late() -> Late:
    network = Late(backbone=settings_of(), pad=0).double()
    network.load_state_dict(tiny_pairs(POLICY).state_dict())
    return network


def indices_are_right(network: PairModel) -> bool:
    """Entry i sees pairs 0..i; the second token's, the first of pair i + 1 besides, and nothing later."""
    first, second = reached((3, 0), network), reached((3, 1), network)
    return first == ([3, 4], [2, 3, 4]) and second == ([3, 4], [3, 4])


def test_states_depend_on_the_pairs_before_and_drafts_on_the_first_token() -> None:
    assert indices_are_right(tiny_pairs(POLICY))
    assert not indices_are_right(late())


@pytest.mark.parametrize("length", range(1, 10))
def test_pair_by_pair_it_is_the_full_forward(length: int) -> None:
    """Prompts of 1 to 9 tokens, then three pairs one at a time into a cache; the MTP block has the last layer of it."""
    network, rest = tiny_pairs(POLICY), text(4, batch=1, seed=1)
    prompt = as_pairs(text(length, batch=1)[0, :, 0].tolist(), network.pad)
    pairs = torch.cat([torch.tensor([prompt]), rest], 1)
    h, u = network.read(POLICY, pairs)
    cache = SlotContext.for_model(network.config, 1, 16, h, layers=network.layers)
    embeddings = POLICY.embed(pairs)
    ends = [0, *range(len(prompt), pairs.shape[1])]
    for start, end in pairwise(ends):
        positions = torch.arange(start, end)[None]
        cache.place(positions, end)
        states = network.states(network.compress(embeddings[:, start:end]), positions, cache)
        drafted = network.draft_states(embeddings[:, start + 1 : end + 1, 0], states, positions, cache)
        torch.testing.assert_close(states, h[:, start:end])
        torch.testing.assert_close(drafted, u[:, start:end])


def test_the_pad_token_is_never_predicted() -> None:
    network = tiny_pairs(POLICY)
    for states in network.read(POLICY, text(4)):
        logits = network.logits(POLICY, states)
        assert torch.isneginf(logits[..., 0]).all() and logits[..., 1:].isfinite().all()


def test_an_odd_text_is_filled_up_and_an_even_one_is_not() -> None:
    assert as_pairs([5, 6, 7], 0) == [(5, 6), (7, 0)] and as_pairs([5, 6], 0) == [(5, 6)]


def test_the_confidence_head_trains_itself_alone() -> None:
    network = tiny_pairs(POLICY).requires_grad_(True)
    h, u = network.read(POLICY, text(4))
    network.confidence(h, u).sum().backward()
    trained = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
    assert trained == {"head"}
    (h.sum() + u.sum()).backward()
    trained = {name.split(".")[0] for name, p in network.named_parameters() if p.grad is not None}
    assert trained == {"head", "decoder", "mtp", "compressor"}, "nothing else is detached"


@pytest.mark.parametrize(("pad", "message"), [(None, "no pad token"), ("<eos>", "a pad token that ends completions")])
def test_a_model_without_a_pad_token_of_its_own_is_refused(pad: str | None, message: str) -> None:
    policy = tiny_policy()
    policy.tokenizer.pad_token = pad
    with pytest.raises(UserError, match=message):
        settings_for(policy)

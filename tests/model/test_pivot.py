"""The pivot classifier: what it sees, and that its features are standardised by numbers that it keeps."""

import pytest
import torch

from bebop.systems.pad.network import PivotNetwork, default_layer


def features(rows: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 8, generator=generator) * torch.arange(1, 9) * 10 + 5
    return hidden, torch.rand(rows, generator=generator), 3 * torch.rand(rows, generator=generator)


def network(**settings: object) -> PivotNetwork:
    torch.manual_seed(0)
    return PivotNetwork(size=8, layer=1, inner=6, middle=4, **settings)  # type: ignore[arg-type]


def test_it_keeps_what_its_features_are_standardised_by() -> None:
    net, (hidden, p, entropy) = network(), features()
    raw = net(hidden, p, entropy)
    net.standardise(hidden, p, entropy)
    moved = net(hidden, p, entropy)
    assert not torch.allclose(raw, moved)
    other = network()
    other.load_state_dict(net.state_dict())
    assert torch.equal(other(hidden, p, entropy), moved)
    plain = network()
    parts = torch.stack([entropy, p, p.log()], -1)
    by_hand = (hidden - hidden.mean(0)) / hidden.std(0, unbiased=False)
    scalars = (parts - parts.mean(0)) / parts.std(0, unbiased=False)
    encoded = plain.of_hidden(by_hand).relu()
    assert torch.allclose(plain.out(plain.of_both(torch.cat([encoded, scalars], -1)).relu()), moved, atol=1e-5)


def test_a_constant_feature_does_no_harm() -> None:
    net, (hidden, p, entropy) = network(), features()
    hidden[:, 0] = 3.0
    net.standardise(hidden, torch.full_like(p, 0.5), entropy)
    assert bool(net(hidden, torch.full_like(p, 0.5), entropy).isfinite().all())
    assert bool(net(hidden, torch.zeros_like(p), entropy).isfinite().all()), "a candidate that is impossible"


@pytest.mark.parametrize(("features_seen", "sees"), [("all", (True, True)), ("hidden", (True, False)),
                                                     ("scalars", (False, True))])  # fmt: skip
def test_an_ablation_sees_what_it_says(features_seen: str, sees: tuple[bool, bool]) -> None:
    net, (hidden, p, entropy) = network(features=features_seen), features()
    with torch.no_grad():
        net.of_both.bias.fill_(1.0)
    base = net(hidden, p, entropy)
    assert (not torch.equal(net(hidden + 30.0, p, entropy), base)) == sees[0]
    assert (not torch.equal(net(hidden, p / 2, entropy), base)) == sees[1]


def test_candidates_of_one_position_share_its_state() -> None:
    """D7: the state is encoded once, however many candidates there are; scores are probabilities."""
    net, (hidden, p, entropy) = network(), features()
    encoded = net.encode(hidden)
    scores = torch.stack([net.score(encoded, p * share, entropy) for share in (1.0, 0.5)])
    direct = torch.stack([net(hidden, p * share, entropy).softmax(-1)[:, 1] for share in (1.0, 0.5)])
    assert torch.allclose(scores, direct) and bool(((scores > 0) & (scores < 1)).all())


@pytest.mark.parametrize(("layers", "layer"), [(1, 0), (2, 1), (4, 2), (8, 5), (36, 26)])
def test_the_layer_is_three_quarters_up(layers: int, layer: int) -> None:
    assert default_layer(layers) == layer

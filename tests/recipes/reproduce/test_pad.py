"""The study of PAD: controls, the choice of tau, what the rule takes down, numbers by hand."""

import numpy as np
import pytest
import torch

from bebop.config import DecodingConfig
from bebop.kernels.pivot import bias
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from recipes.reproduce.pad.analysis import every, length_less, share_lost, utility_less
from recipes.reproduce.pad.classifiers import PROMPTS, HeldOut, agreement
from recipes.reproduce.pad.controls import CONTROLS, Recorded, control
from recipes.reproduce.pad.decoding import TAUS, Decoded, best_tau, change, compared_tau, thresholds
from recipes.reproduce.study import SEEDS
from tests.builders import requests
from tests.rollout.pad_distribution import P_MIN, STOP, TAU, PadDistribution, policy, random_network

MODEL = policy()


def decoded(success: list[float], cycles: float = 4.0) -> Decoded:
    n = len(success)
    blank = np.ones((n, 3))
    return Decoded(
        success=np.array(success), tokens=np.full(n, 12.0), cycles=np.full(n, cycles), truncated=np.zeros(n),
        reached=blank, accepted=blank, bias=blank, offered=10, overridden=4, next_tested=3, next_accepted=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> tuple[Recorded, PadDistribution]:
    """The rule's record of answers to one prompt, and the distributions worked out for them."""
    distribution = PadDistribution(MODEL, random_network("pred", MODEL))
    MODEL.parts["pivot"] = distribution.network
    config = DecodingConfig(system="pad", draft_tokens=2, options={"tau": TAU, "p_min": P_MIN})
    engine = TorchEngine(MODEL, config, slots=500, max_length=16)
    assert isinstance(engine.decoder, DraftVerify)
    rule = Recorded(MODEL, engine.slots, config, distribution.network)
    rule.stops = torch.tensor([STOP])
    engine.decoder.rule = rule
    generate(engine, requests([[3, 3, 1, 0]] * 3000, max_new_tokens=1, stop_token_ids=(STOP,)))
    return rule, distribution


def test_what_the_rule_takes_down(recorded: tuple[Recorded, PadDistribution]) -> None:
    """One cycle an answer: how often the first and the second draft are on offer and overridden is worked out."""
    rule, distribution = recorded
    one, two, _ = distribution.cycle([3, 3, 1, 0])
    possible = (one.p >= P_MIN) & (torch.arange(5) != STOP)
    excess, again = (one.q - one.p).clamp_min(0), (two.q - two.p).clamp_min(0)
    goes_on = one.stays()[0] * (torch.arange(5) != STOP)
    offered = (excess * possible).sum() + (
        goes_on * (again * (two.p >= P_MIN) * (torch.arange(5) != STOP)).sum(-1)
    ).sum()
    kept = bias(one.p, one.q, one.members).sum() + (goes_on * bias(two.p, two.q, two.members)).sum()
    count = 3000
    assert rule.totals["offered"] / count == pytest.approx(float(offered), abs=0.03)
    assert rule.totals["overridden"] / count == pytest.approx(float(kept), abs=0.03)
    asked = torch.cat(rule.asked)
    assert len(asked) == rule.totals["offered"] and int((asked[:, 0] < TAU).sum()) == rule.totals["overridden"]
    overridden = (one.members * excess)[0]
    assert rule.totals["next_tested"] / count == pytest.approx(float(overridden.sum()), abs=0.03)
    accepted = (overridden * two.stays().sum(-1)).sum()
    assert rule.totals["next_accepted"] / count == pytest.approx(float(accepted), abs=0.03)


def test_controls_override_as_many_and_others() -> None:
    network = random_network("pred", MODEL)
    torch.manual_seed(0)
    states = network.hidden_mean + 0.2 * network.hidden_scale * torch.randn(4000, 32)  # scores that are not all 0 or 1
    p, doubt = torch.rand(4000) * 0.5, torch.rand(4000)
    encoded = network.encode(states)
    own = network.score(encoded, p, doubt)
    asked = torch.stack([own, p, doubt], -1).detach().double().numpy()
    tau = float(np.quantile(asked[:, 0], 0.3))
    bounds = thresholds(asked, tau)
    chosen = {name: control(name, network, 1).score(encoded, p, doubt) < bounds[name] for name in CONTROLS}
    assert {name: pytest.approx(float(c.double().mean()), abs=0.03) for name, c in chosen.items()} == dict.fromkeys(
        CONTROLS, 0.3
    )
    assert not bool((chosen["inverted"] & (own < tau)).any()), "the other end"
    assert float(p[chosen["probability"]].min()) > float(p[~chosen["probability"]].max()) - 1e-6
    assert float(doubt[chosen["entropy"]].min()) > float(doubt[~chosen["entropy"]].max()) - 1e-6
    assert abs(float((chosen["random"] & (own < tau)).double().mean()) - 0.09) < 0.02, "does not look"
    assert control("classifier", network, 1) is network


def test_tau_is_the_longest_of_those_that_cost_little() -> None:
    assert best_tau({0.1: (0.0, 0.1), 0.2: (-0.02, 0.3), 0.3: (-0.03, 0.9)}) == 0.2
    assert best_tau({0.1: (-0.2, 0.1), 0.2: (-0.1, 0.3)}) == 0.1
    changes = {0.1: (0.0, 0.1), 0.2: (-0.02, 0.3), 0.3: (-0.03, 0.9)}
    assert [compared_tau(changes, tau) for tau in TAUS[:3]] == [0.2, 0.2, 0.3] and 0.0 not in TAUS
    assert compared_tau({0.1: (0.0, 0.1), 0.2: (0.0, 0.2)}, 0.1) == 0.2
    assert change(decoded([1, 0, 0, 1], 3.0), decoded([1, 1, 1, 1])) == (-0.5, 1.0)


def test_differences_by_hand() -> None:
    one, plain = [decoded([1, 0, 1, 0], 3.0)] * 3, [decoded([1, 1, 1, 0])] * 3
    assert len(every(one, "success")) == 12
    assert utility_less(one, plain).value == pytest.approx(-0.25)
    assert length_less(one, plain).value == pytest.approx(4 - 3)
    assert share_lost(one, plain).value == pytest.approx(1 / 3)


def test_areas_and_kappa_are_resampled_by_prompt() -> None:
    prompts, labels = np.arange(40.0), np.arange(40) % 2 == 0
    test = HeldOut(
        scores=dict.fromkeys(SEEDS, labels.astype(float)), labels=dict.fromkeys(SEEDS, labels),
        prompts=dict.fromkeys(SEEDS, prompts),
    )  # fmt: skip
    assert test.area().value == 1.0 and test.seed_area(0) == 1.0
    weights = np.ones((1, PROMPTS))
    weights[0, :40:2] = 0  # no pivots are drawn
    assert np.isnan(test.areas(weights)).all()
    assert agreement(labels, labels, prompts).value == 1.0
    noise = agreement(labels, np.arange(40) % 4 < 2, prompts)
    assert noise.low < 0 < noise.high

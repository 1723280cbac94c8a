"""The studies of PAD, decoding and training on its completions: controls, tau, what is taken down, numbers by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.job import DecodingConfig, JobConfig
from bebop.kernels.pivot import bias
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.pad.options import PadOptions
from bebop.trajectory import DecodeStats
from recipes.reproduce.pad.analysis import every, length_less, share_lost, utility_less
from recipes.reproduce.pad.classifiers import PROMPTS, HeldOut, agreement
from recipes.reproduce.pad.controls import CONTROLS, Recorded, control
from recipes.reproduce.pad.decoding import TAUS, Decoded, best_tau, change, compared_tau, thresholds
from recipes.reproduce.pad_training import decoded
from recipes.reproduce.pad_training.analysis import Results, arm_row, by_position, numbers, weighted
from recipes.reproduce.pad_training.decoded import Answers, chosen
from recipes.reproduce.pad_training.jobs import ARMS, LARGE, PADS, PLAIN, SMALL, UNWEIGHTED, WHOLE, configuration
from recipes.reproduce.study import SEEDS
from tests.builders import requests
from tests.recipes.reproduce.synthetic import check_names
from tests.rollout.pad_distribution import P_MIN, STOP, TAU, PadDistribution, policy, random_network

MODEL = policy()


def of_success(success: list[float], cycles: float = 4.0) -> Decoded:
    n = len(success)
    blank = np.ones((n, 3))
    return Decoded(
        success=np.array(success), tokens=np.full(n, 12.0), cycles=np.full(n, cycles), truncated=np.zeros(n),
        reached=blank, accepted=blank, bias=blank, offered=10, overridden=4, next_tested=3, next_accepted=2,
    )  # fmt: skip


@pytest.fixture(scope="module")
def recorded() -> tuple[Recorded, PadDistribution]:
    """The rule's record of completions to one prompt, and the distributions worked out for them."""
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
    """One cycle a completion: how often the first and the second draft are on offer and overridden is worked out."""
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
    assert change(of_success([1, 0, 0, 1], 3.0), of_success([1, 1, 1, 1])) == (-0.5, 1.0)


def test_differences_by_hand() -> None:
    one, plain = [of_success([1, 0, 1, 0], 3.0)] * 3, [of_success([1, 1, 1, 0])] * 3
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


# ---- training on its completions

CHOSEN = {SMALL: 0.2, LARGE: 0.7}
ONE = Answers(
    reward=np.array([1.0, 0.0, 1.0, 0.0]),
    log_weight=np.log([0.5, 1.0, 2.0, 4.0]),
    tokens=40,
    truncated=0.0,
    seconds=2.0,
    stats=DecodeStats(reached=np.array([6.0, 4.0]), counts={"bias": np.array([0.3, 0.1])}),
    unweighable=0,
)
ROW = {"reward/mean": 0.5, "rollout/accept_length": 3.0, "response/length": 70.0, "response/truncated": 0.0,
       "train/clip_frac": 0.0, "train/tis_mean": 0.5, "train/tis_ess": 0.25, "train/tis_ess_answers": 0.1,
       "train/tis_capped": 0.0, "rollout/bias/1": 0.1, "rollout/bias/2": 0.3}  # fmt: skip


def results() -> Results:
    keys = [(arm, seed) for arm in ARMS for seed in SEEDS]
    return Results(
        taus=CHOSEN,
        rows={key: [dict(ROW), dict(ROW)] for key in keys},
        held_out={(arm, seed): 0.1 * ARMS.index(arm) + 0.01 * seed for arm, seed in keys},
        start=dict.fromkeys(SEEDS, 0.2),
        decoded={(arm, seed): replace(ONE, seconds=2.0 + seed) for arm in (PLAIN, SMALL, LARGE) for seed in SEEDS},
    )


def test_every_number_that_a_rule_asks_for_is_computed() -> None:
    by_name = numbers(results())
    check_names("pad_training", by_name)
    assert by_name[f"{LARGE} - plain"].value == pytest.approx(0.2)
    assert by_name["weights - no weights"].value == pytest.approx(-0.2)
    assert by_name["weighted small tau"].value == pytest.approx((0.5 + 2.0) / 4 - 0.5)


@pytest.mark.slow
def test_arms_differ_by_what_their_name_says() -> None:
    configs = {arm: configuration(arm, 1, CHOSEN) for arm in ARMS}
    assert configs[PLAIN].decoding.system == "bebop"
    for arm in PADS:
        assert configs[arm].decoding.of(PadOptions).tau == CHOSEN[SMALL if arm == SMALL else LARGE]
    assert [arm for arm in ARMS if configs[arm].algorithm.tis_level == "sequence"] == [WHOLE]
    assert [arm for arm in ARMS if configs[arm].algorithm.rescore] == [UNWEIGHTED]
    plain = configs[PLAIN]
    same = [replace(c, decoding=plain.decoding, algorithm=plain.algorithm) for c in configs.values()]
    assert all(config == plain for config in same)
    assert configuration(PLAIN, 2, CHOSEN).task.seed != plain.task.seed


@pytest.mark.slow
def test_tau_is_the_smallest_that_moves_the_distribution_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(policy: Any, config: JobConfig, count: int, seed: int) -> Answers:
        tau = config.decoding.of(PadOptions).tau
        return replace(ONE, stats=replace(ONE.stats, counts={"bias": np.array([tau, 0.0])}))  # R_N is tau / 10

    monkeypatch.setattr(decoded, "answers", one)

    def config(tau: float) -> JobConfig:
        return configuration(SMALL, 0, {SMALL: tau})

    policy: Any = None
    assert chosen(policy, config, [0.025, 0.045]) == [0.3, 0.5]
    assert chosen(policy, config, [0.05]) == [0.5]
    assert chosen(policy, config, [0.001, 0.002]) == [0.1, 0.1]
    assert chosen(policy, config, [0.05, 0.5]) == [0.5, 1.0], "the largest, where none moves it so far"


def test_numbers_of_completions_and_steps_by_hand() -> None:
    assert ONE.per_draft("bias") == pytest.approx(0.04) and ONE.per_draft("overridden") == 0
    assert weighted(ONE) == pytest.approx(2.5 / 4)
    assert by_position(ROW, "bias") == pytest.approx(0.2) and by_position(ROW, "overridden") == 0
    row = arm_row(results(), LARGE)
    assert row["weight variance"].value == pytest.approx(0.5**2 * 3)
    assert arm_row(results(), UNWEIGHTED)["sample size"] == ""

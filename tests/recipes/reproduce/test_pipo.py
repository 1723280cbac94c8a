"""The study of networks of pairs: what arms are told, which questions are asked, what is computed from completions."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bebop.systems.pipo.options import PipoTraining
from recipes.reproduce.pipo import arms
from recipes.reproduce.pipo.analysis import area, bias, compared, numbers, reliability, reward, tables
from recipes.reproduce.pipo.arms import ABLATIONS, ARMS, DEFAULT, NO_PADS, RANDOM, config, held_out
from recipes.reproduce.pipo.decoding import Answers
from recipes.reproduce.pipo.jobs import BY_CHANCE, MAIN, PROBED, SHARES, SWEPT, Measured, jacobian_share
from recipes.reproduce.study import SEEDS
from tests.builders import tiny_pairs, tiny_policy
from tests.recipes.reproduce.synthetic import check_names

ONE = Answers(
    reward=np.array([1.0, 0.0, 1.0, 1.0]),
    tokens=np.array([60.0, 60.0, 100.0, 90.0]),
    pairs=np.array([40.0, 50.0, 60.0, 50.0]),
    pads=0,
    drafts=190,
    tau=0.5,
    confidence=np.array([0.95, 0.95, 0.15, 0.15]),
    accepted=np.array([1.0, 1.0, 0.0, 1.0]),
    overlap=np.array([0.9, 0.8, 0.4, 0.2]),
    variation=0.1,
    divergence=0.2,
    entropies=(0.5, 0.4),
)


def measured(seed: int) -> Measured:
    wide = [(arm, share) for arm in (*SWEPT, BY_CHANCE) for share in SHARES]
    keys = [key for key in wide if key[0] != BY_CHANCE or key[1] in SHARES[1:-1]]
    keys += [(arm, MAIN) for arm in ARMS if arm not in SWEPT]
    worse = {BY_CHANCE: 0.0, NO_PADS: 0.5, RANDOM: 0.25}
    return Measured(
        answers={key: replace(ONE, reward=ONE.reward * worse.get(key[0], 1.0)) for key in keys},
        shipped=ONE,
        plain=(ONE.reward, ONE.tokens),
        first=np.array([[0.4, 0.2], [0.5, 0.2], [0.6, 0.1]]),
        short=(seed, 3000),
        probes={arm: {"Jacobian share of the first": 0.5} for arm in PROBED},
    )


def test_every_number_that_a_rule_asks_for_is_computed() -> None:
    found = numbers([measured(seed) for seed in SEEDS])
    check_names("pipo", found)
    assert found["confidence - random"].value == 0.75
    assert found[f"{DEFAULT} - {NO_PADS}, whole answers"].value == 0.375
    assert found["OPD - SFT, equal pairs"].value == 0 and found["pads"].value == 3, "one PAD too many is seen"
    assert found["answers"].value == 9000 + 3 * 4 * (len(measured(0).answers) + 1)
    assert found["first token"].value == 2.5
    assert {arm for pair in compared() for arm in pair} == set(ARMS)
    for rows in tables([measured(seed) for seed in SEEDS]).values():
        assert rows and all(row.keys() == rows[0].keys() for row in rows)


def test_a_budget_counts_completions_that_end_within_it() -> None:
    assert reward(ONE) == 0.75 and reward(ONE, "equal pairs") == 0.5 and reward(ONE, "equal tokens") == 0.5
    assert ONE.tokens_per_pair == 310 / 200 and ONE.pad_ratio == pytest.approx(0.45)
    assert ONE.kept == pytest.approx(110 / 190)


def test_confidence_is_held_against_acceptance() -> None:
    assert area(ONE) == pytest.approx((3 * 1 - 1 + 0.5) / 3)
    assert area(replace(ONE, confidence=1 - ONE.confidence)) == pytest.approx(1 - area(ONE))
    assert bias(ONE) == pytest.approx(0.55 - 0.575)
    many = [replace(ONE, confidence=np.repeat(ONE.confidence, 10), overlap=np.repeat(ONE.overlap, 10))]
    assert [row[2] for row in reliability(many)] == [20, 20]
    assert [row[1] for row in reliability(many)] == pytest.approx([0.3, 0.85])


@pytest.mark.slow
def test_arms_differ_by_what_their_name_says() -> None:
    options = {arm: config(1, *ABLATIONS.get(arm, ())).of(PipoTraining) for arm in (DEFAULT, *ABLATIONS)}
    assert options[RANDOM] == replace(options[DEFAULT], compressor="random")
    assert options[NO_PADS] == replace(options[DEFAULT], rho=0)
    assert options[DEFAULT].compressor == "mlp" and options[DEFAULT].rho > 0


@pytest.mark.slow
def test_no_question_was_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each seed has its own; one that occurs among those of training is left out."""
    from bebop.adaptation.corpus import question_streams

    monkeypatch.setattr(arms, "SHIPPED", 40)
    asked = [held_out(seed, 6) for seed in (0, 1)]
    training = {p.token_ids for p in question_streams(config(0, "data.sequences=40"), arms.policy())[0]}
    assert all(len(prompts) == 6 for prompts in asked)
    assert not {p.token_ids for prompts in asked for p in prompts} & training
    assert not {p.token_ids for p in asked[0]} & {p.token_ids for p in asked[1]}

    def overlapping(given, model):  # type: ignore[no-untyped-def]
        """Where the first held-out question is one of training."""
        training, fresh = question_streams(given, model)
        return ([*training, asked[0][0]], fresh)

    monkeypatch.setattr(arms, "question_streams", overlapping)
    assert asked[0][0].token_ids not in {p.token_ids for p in held_out(0, 6)}


def test_the_share_of_the_first_token_is_half_where_both_count_alike() -> None:
    policy = tiny_policy(dtype=torch.float64)
    network = tiny_pairs(policy)
    pair = policy.embed(torch.tensor([3, 4]))
    assert jacobian_share(network, pair) != pytest.approx(0.5, abs=1e-3)
    torch.nn.init.zeros_(network.compressor.outer.weight)
    assert jacobian_share(network, pair) == pytest.approx(0.5)

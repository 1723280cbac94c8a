import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config import TrainerConfig
from bebop.errors import UserError
from bebop.metrics import values
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.schedule import learning_rate
from bebop.trajectory import Batch, Trajectory
from tests.trainer.builders import batch, job, plain, plain_logprobs, policy, weights_of


def changed(made: Batch, **fields: object) -> Batch:
    """The batch with fields of its first completion replaced."""
    group = made.groups[0]
    one = dataclasses.replace(group.trajectories[0].completion, **fields)  # type: ignore[arg-type]
    first = Trajectory.single(one, group.trajectories[0].reward)
    trajectories = (first, *group.trajectories[1:])
    return Batch(groups=(dataclasses.replace(group, trajectories=trajectories), *made.groups[1:]))


@pytest.mark.parametrize("minibatches", [1, 2])
def test_on_policy_ratio_is_one(minibatches: int) -> None:
    trainer = PolicyTrainer(policy(), job(algorithm={"minibatches": minibatches}))
    metrics = values(trainer.update(batch()))
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/ratio_error_max"] < 1e-4  # fp32, two attention implementations
    assert metrics["train/tis_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/lr"] == pytest.approx(5e-3)  # the first of two warm-up updates
    assert trainer.version == 1


def test_first_update_by_hand() -> None:
    """Loss and entropy of the first step against the formulas, row by row."""
    source = policy()
    made, model = batch(source), plain(source)
    trainer = PolicyTrainer(source, job(algorithm={"advantage": "mean_only"}))
    metrics = values(trainer.update(made))
    total, tokens = 0.0, 0
    for group in made.groups:
        rewards = [t.reward for t in group.trajectories]
        for t in group.trajectories:
            length = len(t.completion.token_ids)
            total -= (t.reward - sum(rewards) / len(rewards)) * length
            tokens += length
    assert metrics["train/loss"] == pytest.approx(total / tokens, abs=1e-5)
    with torch.no_grad():
        entropies = []
        for group in made.groups:
            for t in group.trajectories:
                ids = torch.tensor([[*group.prompt.token_ids, *t.completion.token_ids.tolist()]])
                sampling = torch.distributions.Categorical(logits=model(ids).logits[0] / 0.8)
                entropies.append(sampling.entropy()[len(group.prompt.token_ids) - 1 : -1])
    assert metrics["policy/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)


def test_proximal_is_the_start_of_the_update_for_every_minibatch() -> None:
    """With two minibatches the second step's ratio is not 1; taking current log-probs as proximal would give 1."""
    source = policy()
    config = job(algorithm={"minibatches": 2}, trainer={"lr": 0.05, "lr_warmup_steps": 0})
    metrics = values(PolicyTrainer(source, config).update(batch(source)))
    assert metrics["train/clip_frac"] > 0.05
    once = values(PolicyTrainer(policy(), job()).update(batch()))
    assert once["train/clip_frac"] == 0.0


def test_updates_raise_the_log_probs_of_what_was_rewarded() -> None:
    source = policy()
    made = batch(source)
    trainer = PolicyTrainer(source, job())
    before = plain(source)
    for _ in range(3):
        trainer.update(made)
    after, gain = plain(source), {0.0: 0.0, 1.0: 0.0}
    with torch.no_grad():
        for group in made.groups:
            if len({t.reward for t in group.trajectories}) == 1:
                continue
            for t in group.trajectories:
                row = (group.prompt.token_ids, t.completion.token_ids.tolist())
                gain[t.reward] += float((plain_logprobs(after, *row) - plain_logprobs(before, *row)).sum())
    assert gain[1.0] > 0 > gain[0.0]


def test_micro_batch_size_does_not_change_the_update() -> None:
    results = []
    for max_tokens in (16, 10_000):
        trainer = PolicyTrainer(policy(dtype=torch.float64), job(trainer={"max_tokens": max_tokens}))
        metrics = values(trainer.update(batch()))
        results.append((metrics["train/loss"], metrics["train/grad_norm"]))
    assert results[0] == pytest.approx(results[1], abs=1e-9)


@pytest.mark.parametrize(("minibatches", "passes", "dropped"), [(1, 1, True), (2, 1, True), (2, 9, False)])
def test_an_update_is_dropped_as_long_as_it_has_taken_no_step(minibatches: int, passes: int, dropped: bool) -> None:
    """Told to stop after so many passes; with two minibatches the passes over the second one come first."""
    source = policy()
    config = job(algorithm={"minibatches": minibatches}, trainer={"max_tokens": 24})
    trainer, other = PolicyTrainer(source, config), PolicyTrainer(policy(), config)
    made, before, score = batch(source), weights_of(source), trainer.scorer.forward

    def counted(rows: Any) -> Any:
        nonlocal passes
        passes -= 1
        if passes == 0:
            trainer.stopping.set()
        return score(rows)

    trainer.scorer.forward = counted  # type: ignore[method-assign]
    metrics = trainer.update(made)
    assert passes < 1 and (metrics == {}) == dropped and trainer.version == (0 if dropped else 1)
    assert all(torch.equal(w, before[name]) for name, w in weights_of(source).items()) == dropped
    assert not dropped or all(p.grad is None for p in source.weights().values())
    trainer.stopping.clear()
    if dropped:
        trainer.update(made)
    other.update(made)
    assert all(torch.allclose(w, other.policy.weights()[name], atol=1e-5) for name, w in source.weights().items())


def test_only_the_backbone_learns() -> None:
    source = policy()
    before = weights_of(source)
    trainer = PolicyTrainer(source, job(trainer={"weight_decay": 0.1}))
    trainer.update(batch(source))
    after = trainer.weights(mtp=True)
    assert list(after) == list(before)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor) == name.startswith("mtp."), name
    assert not any(name.startswith("mtp.") for name in trainer.weights())


def test_published_weights_are_copies() -> None:
    source = policy()
    trainer = PolicyTrainer(source, job())
    published = trainer.weights()
    kept = {name: tensor.clone() for name, tensor in published.items()}
    trainer.update(batch(source))
    assert all(torch.equal(published[name], kept[name]) for name in kept)


def test_bfloat16_keeps_fp32_masters_and_publishes_bfloat16() -> None:
    source = policy(dtype=torch.bfloat16)
    trainer = PolicyTrainer(source, job(model={"dtype": "bfloat16"}, trainer={"lr": 1e-5, "lr_warmup_steps": 0}))
    before = weights_of(source)["backbone.lm_head.weight"]
    metrics = values(trainer.update(batch()))
    after = source.weights()["backbone.lm_head.weight"]
    assert after.dtype == torch.float32
    # Steps this small vanish in bfloat16: the reason for fp32 masters.
    assert (after != before).float().mean() > 0.9
    assert (after.bfloat16() != before.bfloat16()).float().mean() < 0.1
    assert all(tensor.dtype == torch.bfloat16 for tensor in trainer.weights(mtp=True).values())
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.02)


def test_inexact_answers_need_rescoring() -> None:
    made = changed(batch(), exact=False)
    with pytest.raises(UserError, match=r"algorithm\.rescore=true"):
        PolicyTrainer(policy(), job()).update(made)
    wrong = changed(made, logprobs=made.groups[0].trajectories[0].completion.logprobs - 1)
    metrics = values(PolicyTrainer(policy(), job(algorithm={"rescore": True})).update(wrong))
    assert metrics["train/ratio_mean"] == 1.0 and metrics["train/tis_mean"] == 1.0


def test_inexact_answers_that_say_what_was_drawn_from_are_weighted_by_it() -> None:
    """The comparison with the engine goes on with log p."""
    plain, found = batch(), []
    for sampled in (None, 0.0, 0.5):
        made = plain
        if sampled is not None:
            logprobs = plain.groups[0].trajectories[0].completion.logprobs + np.float32(sampled)
            made = changed(plain, exact=False, sampled_logprobs=logprobs)
        found.append(values(PolicyTrainer(policy(), job()).update(made)))
    looked_at = found[1].keys() - found[0].keys()
    assert {name: found[1][name] for name in found[0]} == found[0]
    assert looked_at == {"train/tis_ess", "train/tis_capped", "train/tis_ess_answers"}
    assert found[1]["train/tis_ess"] == pytest.approx(1, abs=1e-9) and found[1]["train/tis_capped"] == 0
    assert found[2]["train/tis_ess_answers"] < found[2]["train/tis_ess"] < 1 - 1e-3
    tokens = [len(t.completion.token_ids) for g in plain.groups for t in g.trajectories]
    lost = (1 - math.exp(-0.5)) * tokens[0] / sum(tokens)
    assert found[2]["train/tis_mean"] == pytest.approx(1 - lost, abs=1e-4)
    assert found[2]["train/ratio_error_max"] == found[0]["train/ratio_error_max"] < 1e-4


def test_kl_starts_at_zero_grows_and_holds_the_policy_back() -> None:
    drift = {}
    for coefficient in (1e-6, 5.0):
        source = policy()
        trainer = PolicyTrainer(source, job(algorithm={"kl_coefficient": coefficient}))
        kls = [values(trainer.update(batch()))["train/kl"] for _ in range(4)]
        assert kls[0] == pytest.approx(0, abs=1e-9) and kls[1] > 1e-6
        drift[coefficient] = kls[-1]
    assert drift[5.0] < 0.5 * drift[1e-6]
    assert "train/kl" not in PolicyTrainer(policy(), job()).update(batch())


def test_steps_without_a_finite_gradient_are_skipped_and_the_third_in_a_row_is_an_error() -> None:
    source = policy()
    good = batch(source)
    nan = good.groups[0].trajectories[0].completion.logprobs * math.nan
    bad = changed(good, logprobs=nan)
    trainer = PolicyTrainer(source, job())
    before = weights_of(source)
    for _ in range(2):
        assert values(trainer.update(bad))["train/skipped"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in source.weights().items())
    assert values(trainer.update(good))["train/skipped"] == 0.0  # the count starts anew
    trainer.update(bad)
    trainer.update(bad)
    with pytest.raises(UserError, match="loss is not finite"):
        trainer.update(bad)


def test_learning_rate_by_hand() -> None:
    def rates(schedule: str) -> list[float]:
        config = TrainerConfig(lr=1.0, lr_warmup_steps=2, steps=6, lr_schedule=schedule)  # type: ignore[arg-type]
        return [learning_rate(config, version) for version in range(7)]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates("cosine") == pytest.approx([0.5, 1, 1, 0.8535534, 0.5, 0.1464466, 0])
    assert learning_rate(TrainerConfig(lr=1.0, lr_warmup_steps=0), 0) == 1.0

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bebop.config.job import TrainerConfig
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.trainer.optim import learning_rate
from bebop.trainer.packing import Row, pack
from bebop.trainer.policy import PolicyTrainer, TracedLogprobs
from bebop.trajectory import Batch, Trajectory
from tests.cases import slow_but
from tests.trainer.builders import batch, job, plain, plain_logprobs, policy, traced, weights_of


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


def test_the_reference_on_transformers_attention_keeps_rows_apart() -> None:
    """A layer with a running sum, as in linear attention, reads the rows before where they are laid end to end."""
    source = dataclasses.replace(policy(), stock=True)
    source.backbone.set_attn_implementation("sdpa")
    source.backbone.get_decoder().layers[0].mlp.register_forward_hook(lambda _module, _inputs, out: out.cumsum(1))
    trainer = PolicyTrainer(source, job(algorithm={"kl_coefficient": 0.1}))
    assert values(trainer.update(batch()))["train/kl"] == pytest.approx(0, abs=1e-9)


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


# ---- What an optimizer step may do: the norm it clips to, what it decays, and that it starts from no gradient


def gradient_norm(source: object) -> float:
    """Of what the last update has left in the policy."""
    found = [p.grad for p in source.weights().values() if p.grad is not None]  # type: ignore[attr-defined]
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in found))


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_the_gradient_is_clipped_to_its_norm(clip: float) -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"max_grad_norm": clip}))
    before = values(trainer.update(batch()))["train/grad_norm"]
    assert 0.02 < before < 1e5
    assert gradient_norm(source) == pytest.approx(min(clip, before), rel=1e-3)


def test_a_step_knows_nothing_of_the_gradient_before() -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"lr": 0.0, "max_grad_norm": 1e6}))
    norms = [values(trainer.update(batch()))["train/grad_norm"] for _ in range(3)]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_matrices_decay_and_norms_do_not() -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"lr": 0.5, "lr_warmup_steps": 0, "weight_decay": 0.1}))
    before = weights_of(source)
    for parameter in trainer.scorer.parameters():
        parameter.grad = torch.zeros_like(parameter)  # Adam takes no step of its own: decay is all that happens
    trainer._descend()
    for name, parameter in source.weights().items():
        shrunk = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), shrunk * before[name], msg=name)


# ---- The trainer's log-probs of traced answers are those of the weights before the update, answer by answer


@torch.no_grad()
def wanted(made: Batch, source: Any) -> dict[int, NDArray[np.float64]]:
    """Of every answer, by transformers' own forward in fp64, one row by itself."""
    model = plain(source).double()
    asked = [
        (group.prompt.token_ids, t.completion.token_ids.tolist()) for group in made.groups for t in group.trajectories
    ]
    return {place: plain_logprobs(model, *pair).numpy() for place, pair in enumerate(asked)}


def distance(ours: dict[int, NDArray[np.float32]], truth: dict[int, NDArray[np.float64]]) -> float:
    assert all(ours[place].shape == truth[place].shape and ours[place].dtype == np.float32 for place in ours)
    return float(np.max([np.abs(ours[place] - truth[place]).max() for place in ours]))  # NaN stays


UPDATES: list[tuple[dict[str, Any], int]] = [
    ({}, 64),
    ({}, 1000),
    ({"minibatches": 2}, 64),
    ({"minibatches": 4}, 20),
    ({"minibatches": 2, "rescore": True}, 64),
]


@pytest.mark.parametrize(("algorithm", "tokens"), slow_but([UPDATES[0], UPDATES[3], UPDATES[4]], UPDATES, several=True))
def test_they_are_those_before_the_update(algorithm: dict[str, Any], tokens: int) -> None:
    source, made = policy(), traced(batch())
    with torch.no_grad():
        source.backbone.lm_head.weight *= 1.2  # the engine had other weights
    truth = wanted(made, source)
    trainer = PolicyTrainer(source, job(algorithm=algorithm, trainer={"max_tokens": tokens, "lr_warmup_steps": 0}))
    trainer.update(made)
    found = trainer.traced.found
    assert sorted(found) == [place for place, t in enumerate(made.trajectories) if t.completion.trace is not None]
    assert distance(found, truth) < 1e-5
    # What could be taken for them is told apart: the engine's, those after the update, and those of another answer.
    assert min(np.abs(made.trajectories[place].completion.logprobs - found[place]).max() for place in found) > 1e-2
    assert distance(found, wanted(made, source)) > 1e-2
    same_length = [(a, b) for a in found for b in truth if a != b and len(found[a]) == len(truth[b])]
    assert same_length and min(np.abs(found[a] - truth[b]).max() for a, b in same_length) > 0.1


def test_they_are_of_the_latest_update_and_of_traced_answers_alone() -> None:
    trainer = PolicyTrainer(policy(), job())
    trainer.update(traced(batch(), every=3))
    assert sorted(trainer.traced.found) == [0, 3, 6, 9]
    trainer.update(traced(batch(seed=1), every=5))
    assert sorted(trainer.traced.found) == [0, 5, 10]
    trainer.update(batch(seed=2))
    assert trainer.traced.found == {}


def test_rows_that_were_not_given_are_nobodys() -> None:
    made = traced(batch())
    first = made.trajectories[0].completion
    rows = [Row(prompt=(1,), completion=first, advantage=0.0, weight=0.0)]
    kept = TracedLogprobs(made.trajectories)
    for part in pack(rows, 64, world=3):  # two of them are blank, their only row number -1
        kept.add(1, part, torch.zeros(len(part.targets)))
    assert kept.found == {}, "answer 1 is not traced"
    for part in pack(rows, 64, world=3):
        kept.add(2, part, torch.arange(float(len(part.targets))))
    assert list(kept.found) == [2] and kept.found[2].tolist() == list(range(len(first.token_ids)))


# ---- What a trainer's state holds beside weights and moments, and that it is a copy


def trained(updates: int = 1) -> PolicyTrainer:
    trainer = PolicyTrainer(policy(), job())
    for seed in range(updates):
        trainer.update(batch(seed=seed))
    return trainer


def test_random_numbers_go_on_where_they_stood() -> None:
    trainer = trained()
    torch.manual_seed(17)
    torch.rand(3)
    state = trainer.state_dict()
    wanted = torch.rand(5)
    torch.manual_seed(99)
    PolicyTrainer(policy(), job()).load_state_dict(state)
    assert torch.equal(torch.rand(5), wanted)


def test_every_rank_goes_on_with_its_own_random_numbers() -> None:
    state = trained().state_dict()
    own = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        own.append({"cpu": torch.get_rng_state(), "cuda": []})
    torch.manual_seed(2)
    wanted = torch.rand(5)
    second = PolicyTrainer(policy(), job())
    second.rank = 1
    second.load_state_dict(state | {"rng": own})
    assert torch.equal(torch.rand(5), wanted)


def test_a_loaded_state_is_not_changed_by_what_is_learned_from_it() -> None:
    state = trained().state_dict()
    kept = {name: moment.clone() for name, moment in state["optimizer"].items()}
    one = PolicyTrainer(policy(), job())
    one.load_state_dict(state)
    one.update(batch(seed=5))
    assert all(torch.equal(state["optimizer"][name], kept[name]) for name in kept)


def test_a_trainer_that_learned_already_forgets_it() -> None:
    """Moments that the state does not have would otherwise be those of another run."""
    fresh = PolicyTrainer(policy(), job()).state_dict()
    assert not fresh["optimizer"]
    used = trained(2)
    used.load_state_dict(fresh)
    assert not used.state_dict()["optimizer"] and used.version == 0


def test_steps_skipped_in_a_row_are_counted_across_a_resume() -> None:
    good = batch()
    bad = changed(good, logprobs=good.groups[0].trajectories[0].completion.logprobs * math.nan)
    first = PolicyTrainer(policy(), job())
    first.update(bad)
    first.update(bad)
    again = PolicyTrainer(policy(), job())
    again.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="not finite"):
        again.update(bad)


def test_checkpointing_computes_each_layer_again_and_learns_the_same() -> None:
    """To the bit on a CPU: the same operations on the same numbers."""
    found = []
    for checkpointing in (False, True):
        source = policy()
        trainer = PolicyTrainer(source, job(trainer={"checkpointing": checkpointing}))
        passes = [0]
        part = source.backbone.get_decoder().layers[0].self_attn
        part.register_forward_hook(lambda *_, passes=passes: passes.__setitem__(0, passes[0] + 1))
        trainer.update(batch())
        found.append((weights_of(source), passes[0]))
    (kept, once), (again, twice) = found
    assert twice == 2 * once > 0
    assert all(torch.equal(again[name], tensor) for name, tensor in kept.items())
    assert any(not torch.equal(tensor, kept[name]) for name, tensor in weights_of(policy()).items())

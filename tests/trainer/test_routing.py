"""Mixtures of experts in the trainer: they learn, replay the engine's routing, and balance their experts."""

import dataclasses
import itertools
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.metrics.metrics import values
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.routing import FAMILIES
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.run_dir import state_codec
from bebop.trainer.checkpoint import KINDS
from bebop.trainer.packing import Row, pack
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Prompt, Trajectory
from tests.builders import bare_policy, requests
from tests.model.families import experts_of, mixture, refused
from tests.trainer.builders import TEMPERATURE, job
from tests.trainer.one_rank import steady

pytestmark = pytest.mark.slow  # a family's import and passes over it take seconds
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11, 12], [3, 1]]
GROUP = 3


def config(dtype: str = "float32", **settings: Any) -> Any:
    own = {"groups_per_step": len(PROMPTS), "group_size": GROUP, "max_tokens": 128, "routing_replay": True, **settings}
    return job(model={"dtype": dtype}, trainer=own)


@cache
def sampled(dtype: torch.dtype = torch.float32) -> Batch:
    """Completions of the engine with their routing; drafts of the head were verified."""
    # In bfloat16 weights of a usual size: large ones round so much that other experts matter little.
    policy = mixture(dtype, initializer_range=0.2) if dtype == torch.bfloat16 else mixture(dtype)
    engine = TorchEngine(
        policy, DecodingConfig(system="bebop", draft_tokens=3), slots=5, max_length=64, record_routing=True
    )
    tasks = requests([prompt for prompt in PROMPTS for _ in range(GROUP)], max_new_tokens=40, temperature=TEMPERATURE)
    done, groups = generate(engine, tasks), []
    for index, prompt in enumerate(PROMPTS):
        own = done[index * GROUP : (index + 1) * GROUP]
        trajectories = tuple(Trajectory.single(one, float(place % 2)) for place, one in enumerate(own))
        asked = Prompt(index=index, task="test", text="", token_ids=tuple(prompt), item={})
        groups.append(Group(prompt=asked, trajectories=trajectories))
    return Batch(groups=tuple(groups))


def rows(batch: Batch) -> list[Row]:
    return [
        Row(prompt=group.prompt.token_ids, completion=t.completion, advantage=1.0, weight=1.0)
        for group in batch.groups
        for t in group.trajectories
    ]


def without_routing(batch: Batch) -> Batch:
    def bare(group: Group) -> Group:
        own = [dataclasses.replace(t.completion, routing=None) for t in group.trajectories]
        return dataclasses.replace(group, trajectories=tuple(Trajectory.single(c, 1.0) for c in own))

    return Batch(groups=tuple(bare(group) for group in batch.groups))


def used(policy: Policy) -> list[Tensor]:
    """What the experts of each layer are given in every pass from now on: [N, k], sorted."""
    found: list[Tensor] = []
    for module in policy.backbone.modules():
        if type(module).__name__.endswith("Experts"):
            module.register_forward_pre_hook(lambda _module, given: found.append(given[1].sort(-1).values))
    return found


def update(policy: Policy, batch: Batch, **settings: Any) -> dict[str, float]:
    dtype = str(policy.backbone.dtype).removeprefix("torch.")
    return values(steady(PolicyTrainer(policy, config(dtype, **settings))).update(batch))


def test_in_fp32_replay_leaves_rounding_alone() -> None:
    found = update(mixture(), sampled())
    assert 0 < found["train/ratio_error_max"] <= 1e-5
    tokens = sum(row.length for row in rows(sampled()))
    assert found["train/routing_recorded"] == pytest.approx(1 - len(rows(sampled())) / tokens), "all but the last"
    assert found["train/routing_agreement"] == 1.0


def test_in_bfloat16_replay_takes_out_the_experts_that_differ() -> None:
    """The largest error of a ratio is at most a quarter of that without replay; over seeds it was an eighth or less."""
    batch = sampled(torch.bfloat16)
    replayed = update(mixture(torch.bfloat16, initializer_range=0.2), batch)
    free = update(mixture(torch.bfloat16, initializer_range=0.2), batch, routing_replay=False)
    assert replayed["train/ratio_error_max"] < 0.25 * free["train/ratio_error_max"]
    assert replayed["rollout/logprob_diff"] < 0.8 * free["rollout/logprob_diff"]
    assert replayed["train/routing_agreement"] < 1.0, "the trainer's own routers would choose others"
    assert "train/routing_agreement" not in free


@pytest.mark.parametrize("checkpointing", [False, True])
def test_with_replay_trainer_and_engine_use_the_same_experts_for_every_token(checkpointing: bool) -> None:
    """Also where layers are computed again in the backward pass; without replay some tokens have others."""
    batch = sampled(torch.bfloat16)
    [packed] = pack(rows(batch), 4096)
    assert packed.routing is not None
    known, wanted = packed.routing[:, 0, 0] >= 0, packed.routing.long().sort(-1).values
    for replay in (True, False):
        policy = mixture(torch.bfloat16, initializer_range=0.2)
        trainer = PolicyTrainer(
            policy, config("bfloat16", routing_replay=replay, checkpointing=checkpointing, max_tokens=4096)
        )
        found = used(policy)
        trainer.update(batch)
        assert len(found) == 2 * (1 + checkpointing), "once, and once more in the backward pass from the last layer on"
        layers = [0, 1, 1, 0][: len(found)]
        share = [
            float((own[known] == wanted[known, layer]).all(-1).float().mean())
            for own, layer in zip(found, layers, strict=True)
        ]
        assert share == [1.0] * len(found) if replay else max(share) < 1.0, share


def test_weights_of_replayed_experts_are_the_routers_own_and_take_gradients() -> None:
    """Experts that no router chose are weighted as the router's family does it, from the logits of now."""
    policy = mixture()
    scorer = PolicyTrainer(policy, config()).scorer
    [packed] = pack(rows(sampled()), 4096)
    assert packed.routing is not None
    moved = torch.where(packed.routing >= 0, (packed.routing + 3) % 8, packed.routing)
    router = policy.backbone.model.layers[0].mlp.gate
    seen: list[tuple[Tensor, ...]] = []
    router.register_forward_hook(lambda _module, _given, out: seen.append(out))
    # The hook sees what the wrapped forward returns: logits, weights, experts.
    logp, _ = scorer(dataclasses.replace(packed, routing=moved))
    logits, weights, experts = seen[0]
    known = moved[:, 0, 0] >= 0
    assert torch.equal(experts[known], moved[known, 0].long())
    chosen = logits.softmax(-1).gather(1, experts)
    assert float((weights - chosen / chosen.sum(-1, keepdim=True)).detach().abs().max()) < 1e-6
    logp.sum().backward()
    assert float(router.weight.grad.abs().max()) > 0
    plain, _ = scorer(packed)
    assert float((plain - logp).abs().max()) > 0.1


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_routing_that_is_off_by_one_token_is_seen(shift: int) -> None:
    def moved(group: Group) -> Group:
        def one(completion: Completion) -> Completion:
            assert completion.routing is not None
            return dataclasses.replace(completion, routing=np.roll(completion.routing, shift, 0))

        own = [Trajectory.single(one(t.completion), t.reward) for t in group.trajectories]
        return dataclasses.replace(group, trajectories=tuple(own))

    batch = Batch(groups=tuple(moved(group) for group in sampled().groups))
    found = update(mixture(), batch)
    assert found["train/ratio_error_max"] > 0.1 and found["train/routing_agreement"] < 0.9


def test_what_was_not_recorded_is_routed_by_the_trainer() -> None:
    first, *others = sampled().groups
    mixed = Batch(groups=(*without_routing(Batch(groups=(first,))).groups, *others))
    found = update(mixture(), mixed)
    assert found["train/ratio_error_max"] <= 1e-5 and 0.5 < found["train/routing_recorded"] < 0.9
    bare = update(mixture(), without_routing(sampled()))
    assert bare["train/ratio_error_max"] <= 1e-5 and "train/routing_recorded" not in bare


def test_reference_and_proximal_passes_replay_too() -> None:
    own = config()
    kl = dataclasses.replace(own, algorithm=dataclasses.replace(own.algorithm, kl_coefficient=0.1))
    trainer = PolicyTrainer(mixture(), kl)
    assert trainer.reference is not None
    [packed] = pack(rows(sampled()), 4096)
    assert packed.routing is not None
    known = packed.routing[:, 0, 0] >= 0
    moved = torch.where(packed.routing >= 0, (packed.routing + 3) % 8, packed.routing)  # that no router would choose
    asked = dataclasses.replace(packed, routing=moved)
    found = [used(trainer.policy), used(trainer.reference.policy)]
    trainer._logprobs([asked])
    trainer._reference_logprobs(asked)
    for passes in found:
        assert len(passes) == 2
        for layer, experts in enumerate(passes):
            assert torch.equal(experts[known], moved[known, layer].long().sort(-1).values)


def test_balance_is_transformers_loss_over_the_tokens_of_a_minibatch() -> None:
    policy = mixture()
    trainer = PolicyTrainer(policy, config(router_aux_loss=0.1, max_tokens=4096, lr=0.0))
    found = values(trainer.update(sampled()))
    [packed] = pack(rows(sampled()), 4096)
    plain, logits = mixture(), []
    for layer in plain.backbone.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _given, out: logits.append(out[0]))
    with torch.no_grad():
        for row in torch.split(packed.token_ids, packed.lengths.tolist()):
            plain.hidden(row[None], torch.arange(len(row))[None], CausalContext())
    layers = [torch.cat(logits[place::2]) for place in range(2)]
    # By hand: experts x sum of (share of tokens that an expert is given) x (its mean probability), over both layers.
    probs = torch.cat([own.softmax(-1) for own in layers])
    given = torch.zeros_like(probs).scatter_(1, probs.topk(2).indices, 1.0).mean(0)
    assert found["train/router_aux_loss"] == pytest.approx(8 * float((given * probs.mean(0)).sum()), rel=1e-5)
    loads = torch.stack([own.topk(2).indices.flatten().bincount(minlength=8) for own in layers])
    assert found["train/expert_load_max"] == pytest.approx(float(loads.max()) / float(loads[0].sum()))


def test_balance_levels_the_experts() -> None:
    """With its weight large, and every advantage 0, updates even out how often experts are chosen."""
    policy, batch = mixture(), without_routing(sampled())
    trainer = PolicyTrainer(policy, config(router_aux_loss=10.0, routing_replay=False, lr_warmup_steps=0))
    found = [values(trainer.update(batch)) for _ in range(8)]
    assert found[-1]["train/router_aux_loss"] < found[0]["train/router_aux_loss"] - 0.3
    still = PolicyTrainer(mixture(), config(routing_replay=False, lr_warmup_steps=0))
    before = {name: p.detach().clone() for name, p in still.policy.weights().items()}
    still.update(batch)
    assert all(torch.equal(before[name], p) for name, p in still.policy.weights().items()), "nothing else moves weights"


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_that_is_named_records_and_replays(kind: str) -> None:
    own: dict[str, Any] = {
        "glm4_moe": {
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        },
        "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_layer_start_index": 0},
        "hunyuan_v1_moe": {"moe_topk": 2},
        "qwen2_moe": {"shared_expert_intermediate_size": 16},
    }.get(kind, {})
    policy = mixture(kind=kind, **own)
    engine = TorchEngine(
        policy, DecodingConfig(system="bebop", draft_tokens=2), slots=2, max_length=40, record_routing=True
    )
    tasks = requests([[1, 2, 3]] * GROUP, max_new_tokens=20, temperature=TEMPERATURE)
    done = generate(engine, tasks)
    for task, one in zip(tasks, done, strict=True):
        assert one.routing is not None
        text = [*task.token_ids, *one.token_ids.tolist()]
        assert np.array_equal(np.sort(one.routing[:-1], -1), experts_of(policy, text)[:-1])
    asked = Prompt(index=0, task="test", text="", token_ids=(1, 2, 3), item={})
    group = Group(prompt=asked, trajectories=tuple(Trajectory.single(one, float(i % 2)) for i, one in enumerate(done)))
    found = update(policy, Batch(groups=(group,)), groups_per_step=1)
    assert found["train/ratio_error_max"] <= 2e-5 and found["train/routing_agreement"] == 1.0


def test_models_without_such_routers_are_refused_in_one_line() -> None:
    dense = refused(lambda: PolicyTrainer(bare_policy(), config()))
    assert dense.startswith("trainer.routing_replay=True is not possible: a qwen2 model without experts has no routing")
    stock = refused(lambda: PolicyTrainer(dataclasses.replace(mixture(), stock=True), config()))
    assert stock.endswith("layers of qwen3_moe models run as transformers has them; give none")
    balanced = refused(lambda: PolicyTrainer(bare_policy(), config(routing_replay=False, router_aux_loss=0.5)))
    assert balanced.startswith("trainer.router_aux_loss=0.5 is not possible: a qwen2 model without experts")
    mixer = mixture(kind="phimoe")
    assert "the routers of phimoe models are not known" in refused(lambda: PolicyTrainer(mixer, config()))
    plain = PolicyTrainer(mixer, config(routing_replay=False))  # but it trains as before
    assert plain.scorer.routers is None
    sigmoid = {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    glm = mixture(kind="glm4_moe", **sigmoid)
    words = refused(lambda: PolicyTrainer(glm, config(router_aux_loss=0.5)))
    assert "transformers has no load balancing loss for glm4_moe models" in words


def test_completions_keep_their_routing_in_a_checkpoint(tmp_path: Path) -> None:
    state_codec.save(list(sampled().groups), tmp_path / "loop", KINDS)
    again = list(itertools.chain.from_iterable(g.trajectories for g in state_codec.load(tmp_path / "loop", KINDS)))
    for before, after in zip(sampled().trajectories, again, strict=True):
        mine, kept = before.completion.routing, after.completion.routing
        assert mine is not None and kept is not None and kept.dtype == mine.dtype and np.array_equal(mine, kept)
    assert not math.isnan(update(mixture(), Batch(groups=sampled().groups))["train/loss"])

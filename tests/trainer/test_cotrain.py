"""Co-training: the policy does not notice it, and the engine gets what was learned."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.model.backbone import Policy
from bebop.model.fingerprint import fingerprint
from bebop.model.mtp import chain, gather_rows
from bebop.model.parts import load_part
from bebop.monitor.certified import chosen
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.eagle3.training import unroll_drafter
from bebop.trainer import checkpoint
from bebop.trainer.certify import Certifier
from bebop.trainer.objectives import Objective, Steps
from bebop.trainer.policy import PolicyTrainer
from tests.builders import tiny_eagle3
from tests.cases import slow_but
from tests.trainer.builders import VOCAB, batch, job, policy

HEAD = {"objective": "tv", "depth": 3, "lr": 1e-2, "lr_warmup_steps": 0, "max_tokens": 64}


def source_of(dtype: str = "float32", part: str = "") -> Policy:
    """The tiny policy, with an EAGLE-3 drafter in the place of its head if that is asked for."""
    source = policy(dtype=getattr(torch, dtype))
    if part:
        source.parts[part], source.drafting = tiny_eagle3(VOCAB).to(getattr(torch, dtype)), part
    return source


def trainer(
    mode: str, dtype: str = "float32", head: dict[str, Any] | None = None, part: str = "", **settings: Any
) -> PolicyTrainer:
    source = source_of(dtype, part)
    config = job(model={"dtype": dtype}, cotrain={"mode": mode, "head": {**HEAD, **(head or {})}}, **settings)
    return PolicyTrainer(source, config)


def learned(one: PolicyTrainer, cotrain: bool, updates: int = 2, scale: float = 1.0) -> list[dict[str, float]]:
    rows = []
    for seed in range(updates):
        made = batch(seed=seed, groups=2)
        groups = [
            dataclasses.replace(
                g, trajectories=tuple(dataclasses.replace(t, reward=scale * t.reward) for t in g.trajectories)
            )
            for g in made.groups
        ]
        rows.append(values(one.update(dataclasses.replace(made, groups=tuple(groups)), cotrain)))
    return rows


def backbone(one: PolicyTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in one.policy.weights().items()}


def head(one: PolicyTrainer) -> dict[str, Tensor]:
    assert one.policy.head is not None
    return {name: p.detach().clone() for name, p in one.policy.head.named_parameters()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("minibatches", "part"), slow_but([(2, "")], [(1, ""), (2, ""), (2, "eagle3")], True))
def test_the_policy_is_the_same_to_the_bit_with_and_without(minibatches: int, part: str) -> None:
    off, on = (trainer(mode, part=part, algorithm={"minibatches": minibatches}) for mode in ("off", "always"))
    plain, both = learned(off, cotrain=True), learned(on, cotrain=True)  # off: there is nothing to train
    assert equal(backbone(off), backbone(on))
    assert equal(gradients(off), gradients(on))
    for a, b in zip(plain, both, strict=True):
        assert set(b) - set(a) == {"head/loss", "head/grad_norm", "head/lr", "head/skipped"}
        assert a == {name: b[name] for name in a}
    assert not equal(head(on), head(off)) and equal(head(off), head(trainer("off", part=part)))


def gradients(one: PolicyTrainer) -> dict[str, Tensor]:
    """What the last update has left in the policy: anything of the head's loss would be among it."""
    return {name: p.grad.clone() for name, p in one.policy.weights().items() if p.grad is not None}


def leaky(head: Any, embeddings: Tensor, hidden: Tensor, weight: Tensor, rows: Any, sampling: Any) -> Steps:
    """``unroll`` with the language-model head left in the graph."""
    depth, last = int(rows.steps.max()), hidden.shape[1] - 1
    return Steps(
        draft=torch.stack(list(chain(head, embeddings, hidden, depth, rows.anchors)), 2),
        target=torch.stack([gather_rows(hidden, (rows.anchors + s).clamp_max(last)) for s in range(1, depth + 1)], 2),
        weight=weight,
        tokens=torch.stack([rows.tokens(step) for step in range(1, depth + 1)], 2),
        mask=rows.mask(depth),
        sampling=sampling,
    )


def plain_loss(steps: Steps) -> Tensor:
    """An objective in plain autograd, which sends a gradient wherever it may go."""
    draft, target = (x[steps.mask] @ steps.weight.T for x in (steps.draft, steps.target))
    if steps.head is not None:
        draft, target = steps.draft[steps.mask] @ steps.head.weight.T, target[:, steps.head.tokens]
    return torch.nn.functional.kl_div(
        draft.log_softmax(-1), target.log_softmax(-1), log_target=True, reduction="batchmean"
    )


def leaky_drafter(network: Any, embeddings: Tensor, states: Tensor, weight: Tensor, *more: Any) -> Steps:
    """``unroll`` of an EAGLE-3 drafter with the policy's language-model head left in the graph."""
    return dataclasses.replace(unroll_drafter(network, embeddings, states, weight, *more), weight=weight)


@pytest.mark.parametrize(
    ("leak", "part"),
    slow_but([(False, ""), (True, "")], [(leak, part) for leak in (False, True) for part in ("", "eagle3")], True),
)
def test_no_gradient_of_the_head_s_loss_reaches_the_policy(
    monkeypatch: pytest.MonkeyPatch, leak: bool, part: str
) -> None:
    """The same objective with and without the detached head: the comparison sees the difference."""
    monkeypatch.setattr("bebop.trainer.heads.make_objective", lambda name: Objective(plain_loss))
    if leak:
        monkeypatch.setattr("bebop.trainer.head_backend.unroll", leaky)
        monkeypatch.setattr("bebop.systems.eagle3.training.unroll_drafter", leaky_drafter)
    off, on = trainer("off", part=part), trainer("always", part=part)
    for one in (off, on):
        learned(one, cotrain=True, updates=1)
    assert equal(gradients(off), gradients(on)) is not leak


def test_clipping_of_one_does_not_depend_on_the_other() -> None:
    """Losses of the other side a thousand times larger change neither norm nor weights of this one."""
    small, large = (
        trainer("always", head={"lr": lr, "max_grad_norm": clip}) for lr, clip in ((1e-2, 1.0), (10.0, 1e3))
    )
    rows = [learned(one, cotrain=True, updates=2) for one in (small, large)]
    for a, b in zip(*rows, strict=True):
        assert a["train/grad_norm"] == b["train/grad_norm"]
    assert equal(backbone(small), backbone(large)) and not equal(head(small), head(large))
    calm, loud = (trainer("always", algorithm={"advantage": "mean_only"}, trainer={"lr": 0.0}) for _ in range(2))
    quiet, shouted = (learned(one, True, 2, scale) for one, scale in ((calm, 1.0), (loud, 1000.0)))
    assert shouted[0]["train/grad_norm"] > 100 * quiet[0]["train/grad_norm"]
    assert [r["head/grad_norm"] for r in quiet] == [r["head/grad_norm"] for r in shouted]
    assert equal(head(calm), head(loud))


def test_a_certificate_is_read_beside_a_drafter_that_reads_layers() -> None:
    one = trainer("always", part="eagle3")
    certifier = Certifier(one.scorer, one.old_policies, one.config)
    assert certifier.read(chosen(batch(seed=0, groups=2).groups), 0, one.version) is not None
    assert one.scorer.taps and one.scorer.kept is None


@pytest.mark.slow  # test_heads.py has a head that learns in the quick suite
@pytest.mark.parametrize("part", ["", "eagle3"])
def test_the_head_learns_to_draft_for_the_policy_of_now(part: str) -> None:
    one = trainer("always", part=part, trainer={"lr": 0.0})
    losses = [values(one.update(batch(seed=1, groups=2), True))["head/loss"] for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gets_the_trained_head(dtype: str) -> None:
    one = trainer("always", dtype)
    engine = TorchEngine(policy(dtype=getattr(torch, dtype)), DecodingConfig(draft_tokens=2), max_length=64)
    assert engine.head == one.head_fingerprint() and not one.head_changed
    learned(one, cotrain=True, updates=1)
    assert one.head_changed and engine.head != one.head_fingerprint()
    engine.load_weights(one.weights(mtp=one.head_changed), one.version)
    assert engine.head == one.head_fingerprint()
    served = {name: t.detach() for name, t in engine.policy.weights(mtp=True).items()}
    assert equal(served, one.weights(mtp=True)) and served["mtp.project.weight"].dtype == getattr(torch, dtype)
    with torch.no_grad():
        engine.policy.weights(mtp=True)["mtp.project.weight"].zero_()
    engine.load_weights(one.weights(mtp=False), one.version)
    assert engine.head != one.head_fingerprint()  # a head spoiled on the way shows at the next load


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gets_the_trained_drafter(dtype: str, tmp_path: Path) -> None:
    """Its weights are those of a checkpoint's folder, which another engine loads."""
    one = trainer("always", dtype, part="eagle3")
    source, decoding = source_of(dtype, "eagle3"), DecodingConfig(system="eagle3", draft_tokens=2)
    engine = TorchEngine(source, decoding, max_length=64)
    assert engine.head == one.head_fingerprint() and not one.head_changed
    learned(one, cotrain=True, updates=1)
    assert one.head_changed and engine.head != one.head_fingerprint()
    engine.load_weights(one.weights(mtp=one.head_changed), one.version)
    assert engine.head == one.head_fingerprint()
    kind = getattr(torch, dtype)
    checkpoint.write(tmp_path / "step_000001", one.policy, one.state_dict(), {}, kind)
    stored = load_part("eagle3", tmp_path / "step_000001" / "policy" / "eagle3", source).to(kind)
    assert fingerprint(dict(stored.named_parameters())) == engine.head
    assert torch.equal(stored.state_dict()["d2t"], source.parts["eagle3"].state_dict()["d2t"])


def test_a_frozen_head_is_not_sent() -> None:
    one = trainer("off")
    learned(one, cotrain=True, updates=1)
    assert not one.head_changed and not any(name.startswith("mtp.") for name in one.weights(one.head_changed))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "eagle3"])
def test_resume_is_exact_and_checkpoints_hold_the_trained_head(tmp_path: Path, part: str) -> None:
    whole, first = trainer("always", "bfloat16", part=part), trainer("always", "bfloat16", part=part)
    learned(whole, True, 3)
    learned(first, True, 2)
    state = first.state_dict()
    checkpoint.write(tmp_path / "step_000002", first.policy, state, {}, torch.bfloat16)
    kept = checkpoint.load(tmp_path / "step_000002").trainer
    again = trainer("always", "bfloat16", part=part)
    again.load_state_dict(kept)
    assert again.head_changed and again.head_fingerprint() == first.head_fingerprint()
    again.update(batch(seed=2, groups=2), True)
    assert equal(backbone(whole), backbone(again)) and equal(head(whole), head(again))
    # A run that freezes the head from here on drafts with what was learned, and sends it.
    frozen = trainer("off", "bfloat16", part=part)
    frozen.load_state_dict(kept)
    assert frozen.head_changed and frozen.head_fingerprint() == first.head_fingerprint()
    assert frozen.state_dict()["head"] is not None
    mark = fingerprint({name.removeprefix("mtp."): t for name, t in frozen.weights(True).items() if "mtp." in name})
    assert mark == first.head_fingerprint()


@pytest.mark.parametrize("mtp", [True, False])
def test_a_run_that_drafts_without_the_trained_drafter_keeps_it(mtp: bool) -> None:
    """Decoding changed in a resume: the model drafts with its own MTP head, or without any."""
    first = trainer("always", part="eagle3")
    learned(first, True, 1)
    source = source_of()
    source.mtp = source.mtp if mtp else None
    other = PolicyTrainer(source, job(cotrain={"mode": "off"}))
    own = other.head_fingerprint()
    other.load_state_dict(first.state_dict())
    assert not other.head_changed and other.head_fingerprint() == own
    again = trainer("always", part="eagle3")
    again.load_state_dict(other.state_dict())
    assert again.head_fingerprint() == first.head_fingerprint() and again.state_dict()["head"]["version"] == 1


def test_a_head_learns_the_distribution_that_rollouts_are_verified_against() -> None:
    """Truncated, as rollouts are: the policy is the same with and without, since log-probs are computed anew."""
    cut, whole = (
        trainer("always", rollout={"sampling": {"temperature": 0.9, "max_new_tokens": 20, "top_k": top_k}},
                algorithm={"rescore": True})
        for top_k in (2, 0)
    )  # fmt: skip
    learned(cut, cotrain=True), learned(whole, cotrain=True)
    assert not equal(head(cut), head(whole))


def test_a_head_that_diverges_names_the_setting_of_the_job() -> None:
    one = trainer("always")
    assert one.policy.head is not None
    with torch.no_grad():
        next(one.policy.head.parameters()).fill_(torch.nan)
    assert one.head_trainer is not None
    for master in one.head_trainer.backend.named.values():
        master.data.fill_(torch.nan)
    with pytest.raises(UserError, match=r"^cotrain\.head\.lr="):
        learned(one, cotrain=True, updates=4)

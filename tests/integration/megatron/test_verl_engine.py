"""verl's own Megatron engine on a CPU, with the head beside the policy; where verl is there too.

Everything is verl's but the making of the model: its bridges need Transformer Engine, so the GPTModel is ours, wrapped
in Megatron's gradient buffers at the place where the bridge would do it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

os.environ.setdefault("VERL_PLATFORM", "cpu")  # read when verl is imported
pytest.importorskip("verl")
pytest.importorskip("tensordict")

from bebop.config.job import HeadConfig, ModelConfig
from bebop.errors import UserError
from bebop.megatron_job.parallel import ParallelConfig, Place, joined
from bebop.megatron_job.source import Checkpoint
from bebop.verl_job.settings import VARIABLE, VerlConfig, to_variable
from tests.integration.megatron.builders import checkpoint, rows, trainer
from tests.integration.megatron.policy import NoCuda

HEAD = HeadConfig(objective="e2e_tv", depth=3, lr=2e-3, lr_warmup_steps=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("verl") / "checkpoint")


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with joined(ParallelConfig(), "cpu") as found:
        yield found


@pytest.fixture(scope="module")
def verl_engine() -> Any:
    """verl's class with our changes; made once, as the plug-in makes them in each process."""
    import bebop.verl_job.plugin  # noqa: F401  (the platform "cpu")

    os.environ[VARIABLE] = to_variable(VerlConfig(train_head=True, head=HEAD))
    from verl.workers.engine.megatron import transformer_impl

    from bebop.verl_job.megatron_engine import train_beside

    train_beside(transformer_impl)
    return transformer_impl


def made(transformer_impl: Any, saved: Path, place: Place, monkeypatch: pytest.MonkeyPatch, mtp: bool = True) -> Any:
    """An engine as ``initialize`` leaves it."""
    from verl.utils import megatron_utils
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.config.model import MtpConfig

    from tests.integration.megatron.policy import wrapped

    parts = {"mtp": MtpConfig(enable=mtp, enable_train=mtp), "load_tokenizer": False}
    parts |= {"override_config": {"attn_implementation": "eager"}}
    engine = object.__new__(transformer_impl.MegatronEngineWithLMHead)
    engine.model_config = HFModelConfig(path=str(saved), **parts)
    engine.model_config.tokenizer = SimpleNamespace(pad_token_id=0)
    engine.engine_config = McoreEngineConfig(use_distributed_optimizer=False, use_remove_padding=False)
    engine.optimizer_config = McoreOptimizerConfig(lr=1e-2, clip_grad=0.0, total_training_steps=10)
    engine.param_dtype, engine.is_value_model, engine.peft_cls = torch.float32, False, None
    engine.vanilla_bridge, engine.enable_routing_replay, engine.provider = False, False, None
    engine.bridge = SimpleNamespace(load_hf_weights=lambda *_, **__: None)  # the weights are there

    def module(**_: Any) -> tuple[list[Any], Any]:
        model = wrapped(saved, place, left_out=False)
        return [model], model.module.config

    monkeypatch.setattr(megatron_utils, "make_megatron_module", module)
    engine.tf_config = None
    with NoCuda():
        engine.module = engine._build_megatron_module()
        if mtp:
            megatron_utils.patch_engine_mtp(engine.module, engine.model_config)
        engine.optimizer = engine._build_optimizer()
    return engine


def batch(step: int) -> Any:
    """What verl hands to an engine: nested tokens, and a mask of the answers alone."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu

    some = [row for row in rows(step, 5) if row.answer]
    nested = lambda parts: torch.nested.as_nested_tensor([torch.tensor(x) for x in parts], layout=torch.jagged)  # noqa: E731
    masks = [torch.ones(len(row.answer), dtype=torch.long) for row in some]
    data = TensorDict(
        {
            "input_ids": nested([row.token_ids for row in some]),
            "loss_mask": torch.nested.as_nested_tensor(masks, layout=torch.jagged),
            "temperature": torch.full((len(some),), 0.9),
        },
        batch_size=len(some),
    )
    tu.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    return data


def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A stand-in for a policy's loss."""
    return -model_output["log_probs"].values().mean(), {}


def test_verls_engine_trains_the_head_and_leaves_the_policy_alone(
    verl_engine: Any, saved: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = made(verl_engine, saved, place, monkeypatch)
    monkeypatch.setattr("bebop.verl_job.megatron_engine.trains", lambda engine: False)
    stock = made(verl_engine, saved, place, monkeypatch, mtp=False)
    stock.module[0].module.config.mtp_num_layers, stock.module[0].module.mtp_process = None, False
    alone = trainer(saved, ParallelConfig(), place, objective="e2e_tv")
    with NoCuda():
        found, plain = (engine.train_batch(batch(0), loss) for engine in (beside, stock))
    wanted = alone.update([row for row in rows(0, 5) if row.answer])
    numbers = {name: value[0] for name, value in found["metrics"].items() if name.startswith("head/")}
    assert numbers["head/loss"] == pytest.approx(wanted["head/loss"], abs=1e-5)
    assert numbers["head/grad_norm"] == pytest.approx(wanted["head/grad_norm"], rel=1e-4)
    assert not any(name.startswith("head/") for name in plain["metrics"])
    before = {n: p for n, p in made(verl_engine, saved, place, monkeypatch).module[0].module.named_parameters()}
    after, same = (dict(engine.module[0].module.named_parameters()) for engine in (beside, stock))
    for name, parameter in after.items():
        assert not torch.equal(parameter, before[name]), name
        assert name.startswith("mtp.") or torch.equal(parameter, same[name]), name


def test_settings_that_do_not_go_together(
    verl_engine: Any, saved: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"with actor_rollout_ref\.model\.mtp\.enable=true"):
        made(verl_engine, saved, place, monkeypatch, mtp=False)
    assert Checkpoint(ModelConfig(path=str(saved))).layout == "mimo"

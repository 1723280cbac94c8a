"""The MTP head in verl's Megatron engine: trained beside the policy on Bebop's objectives, with its own optimizer.

It replaces verl's ``mtp.enable_train`` (cross-entropy, added to the policy's loss, one optimizer, one gradient norm).
verl still passes tokens and the loss mask to the model, and ``bebop.megatron_job.cotrain`` does the rest. The head is
a part of verl's model, so verl's own checkpoints hold its weights and verl's bridge sends them to the rollout. The
optimizer's state is stored beside them.

Tested: verl's engine on a CPU, from its gradient buffers and optimizer to ``train_batch``, on a GPTModel made here, and
``cotrain`` under every split (tests/integration/megatron: test_verl_engine.py, test_splits.py). Not tested: verl's
bridges and Transformer Engine, which need a GPU, and so a whole verl job on Megatron.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from bebop.errors import UserError
from bebop.model.checkpoint import mtp_layout
from bebop.model.layouts import LAYOUTS
from bebop.verl_job.head import first_temperature, rollout_sampling
from bebop.verl_job.hooks import wrap
from bebop.verl_job.settings import VerlConfig, current

FOLDER = "bebop_head"  # in the folder of verl's actor checkpoint
ENGINE = "bebop_head"  # the attribute of verl's engine
# Maximum of chains a row. Attention of a later step takes chains times tokens numbers a head: 1,024 chains over 64 K
# tokens are some 2 GB in bf16 for 4 heads and 2 later steps, all of them 130 GB.
ANCHORS = 1024


def train_beside(transformer_impl: ModuleType) -> None:
    """Hook verl's Megatron engine, so that it trains, saves and loads the head."""
    config = current()
    assert config is not None
    engine_class = transformer_impl.MegatronEngine

    def build(original: Any, engine: Any) -> Any:
        if not trains(engine):
            return original(engine)
        check(engine)
        with left_out_of_buffers():
            return original(engine)

    def optimizer(original: Any, engine: Any) -> Any:
        if not trains(engine):
            return original(engine)
        from bebop.megatron_job.cotrain import head_left_out

        with head_left_out(engine.module):
            made = original(engine)
        setattr(engine, ENGINE, beside(engine, config))  # after verl's own changes to the model's last step
        return made

    def train(original: Any, engine: Any, data: Any, loss_function: Any) -> Any:
        head = getattr(engine, ENGINE, None)
        if head is None:
            return original(engine, data, loss_function)
        head.discard()
        temperature = first_temperature(data["temperature"])
        head.backend.sampling = dataclasses.replace(head.backend.sampling, temperature=temperature)
        output = original(engine, data, loss_function)
        numbers = head.step()  # every rank takes part
        if engine.is_mp_src_rank_with_outputs():
            output["metrics"] |= {name: [value] for name, value in numbers.items()}
        return output

    def save(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, local_path, *args, **kwargs)
        if (head := getattr(engine, ENGINE, None)) is not None:
            from bebop.megatron_job.checkpoint import save_head

            save_head(Path(local_path) / FOLDER, head.trainer)
        return result

    def load(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        # Before verl's own: it may be told to delete the folder once it has loaded it.
        head = getattr(engine, ENGINE, None)
        if head is None:
            return original(engine, local_path, *args, **kwargs)
        stored = local_path is not None and (Path(local_path) / FOLDER).is_dir()
        if stored:
            from bebop.megatron_job.checkpoint import load_head

            load_head(Path(local_path) / FOLDER, head.trainer)
        result = original(engine, local_path, *args, **kwargs)
        if not stored:  # a head that verl itself has trained
            head.backend.loaded()
        return result

    wrap(engine_class, "_build_megatron_module", build)
    wrap(engine_class, "_build_optimizer", optimizer)
    wrap(engine_class, "train_batch", train)
    wrap(engine_class, "save_checkpoint", save)
    wrap(engine_class, "load_checkpoint", load)


def trains(engine: Any) -> bool:
    """Return whether this engine updates a policy."""
    return not engine.engine_config.forward_only and engine.model_config.model_type == "language_model"


def check(engine: Any) -> None:
    """Raise ``UserError`` for conflicting settings, before the model is made."""
    mtp, megatron = engine.model_config.mtp, engine.engine_config
    if not (mtp.enable and mtp.enable_train):
        raise UserError(
            "bebop.train_head=True: the Megatron engine trains a head with actor_rollout_ref.model.mtp.enable=true "
            "and actor_rollout_ref.model.mtp.enable_train=true"
        )
    hf = getattr(engine.model_config, "hf_config", None)
    if any(getattr(hf, name, 0) for name in ("num_experts", "n_routed_experts", "num_local_experts")):
        raise UserError(
            "bebop.train_head=True: an MTP head with experts is not trained beside a policy on Megatron: adapt it "
            "before (python -m bebop.megatron_job.adapt), and set bebop.train_head=False"
        )
    for name in ("dynamic_context_parallel", "use_megatron_fsdp"):
        if getattr(megatron, name):
            raise UserError(f"bebop.train_head=True: actor.megatron.{name}=true is not possible; set it to false")


def beside(engine: Any, config: VerlConfig) -> Any:
    """Return the cotrainer of one rank's head."""
    from bebop.megatron_job.cotrain import HeadCotrainer

    path = Path(engine.model_config.local_path)
    layout = mtp_layout(path, int(engine.model_config.hf_config.num_hidden_layers))
    if layout is None:
        raise UserError(f"bebop.train_head=True: {path} has no MTP weights of a known layout ({', '.join(LAYOUTS)})")
    zero_first, sampling = LAYOUTS[layout].zero_first, rollout_sampling(config)
    return HeadCotrainer(engine.module, config.head, sampling, zero_first=zero_first, anchors=ANCHORS, logits=True)


@contextmanager
def left_out_of_buffers() -> Iterator[None]:
    """Leave the head out of the gradient buffers that verl's bridge makes in this block."""
    from megatron.core.distributed import DistributedDataParallel

    from bebop.megatron_job.cotrain import head_left_out

    original = DistributedDataParallel.__init__

    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        module = kwargs["module"] if "module" in kwargs else args[2]  # config, ddp_config, module
        with head_left_out([module]):
            original(self, *args, **kwargs)

    DistributedDataParallel.__init__ = make
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = original

"""Checkpoints of a run: written completely or not at all, and verified before they are loaded.

``<run>/checkpoints/step_000020/``::

    policy/                     a Hugging Face folder like that of the model, in its dtype: what engines serve;
                                with ``trainer.lora`` the adapter alone, as peft writes it
    policy/NAME/                a drafter that is trained beside the policy, in its public layout
    trainer.json, .safetensors  fp32 master weights (or adapter), optimizer, version, random generators: what an exact
                                resume needs
    loop.json, .safetensors     what the loop handed in (prompt cursor, buffered groups): opaque here
    manifest.json               size and SHA-256 of each file above

``bebop.run_dir.checkpoints`` publishes, finds and deletes them. The trainer's process fills a hidden folder, and the
process that holds the run folder's lock publishes it. So a trainer that outlives its driver adds nothing to a run that
goes on without it. Reading a checkpoint never runs code that it names (``bebop.run_dir.state_codec``).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from bebop.model.lora import Adapter
from bebop.monitor.probe_set import ProbeText
from bebop.run_dir import state_codec as codec
from bebop.run_dir.checkpoints import POLICY, STEPS, Store, seal, verify
from bebop.systems import PARTS
from bebop.trajectory import Completion, DecodeStats, Group, Prompt, Trace, Trajectory, Turn

# Classes in the loop's state, beside numbers, texts and arrays.
KINDS = (Group, Prompt, Trajectory, Turn, Completion, DecodeStats, Trace, ProbeText)
TRAINER, LOOP = "trainer", "loop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """States in a checkpoint beside the servable policy."""

    trainer: dict[str, Any]  # PolicyTrainer.state_dict()
    loop: dict[str, Any]


def store(run_dir: Path) -> Store:
    """Return the store of a run's checkpoints."""
    return Store(run_dir, STEPS)


def write(
    folder: Path,
    policy: Policy,
    trainer: dict[str, Any],
    loop: dict[str, Any],
    dtype: torch.dtype | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Fill and seal ``folder``, which must not exist (``Store.staging``).

    ``policy/`` gets the backbone's weights from ``trainer``, since those of ``policy`` may be split over processes. For
    ``dtype`` see ``save_policy``. If the policy has an ``adapter``, that is written in its place.
    """
    folder.mkdir(parents=True)
    if adapter is None:
        save_policy(policy, folder / POLICY, dtype, trainer["weights"])
    else:
        adapter.save(folder / POLICY, trainer["weights"])
        policy.tokenizer.save_pretrained(folder / POLICY)
    if policy.head is not None and (layout := PARTS[policy.drafting].folder if policy.drafting else None) is not None:
        layers = policy.backbone.config.num_hidden_layers
        layout().write(policy.head, layers, folder / POLICY / policy.drafting, dtype or policy.backbone.dtype)
    codec.save(trainer, folder / TRAINER)
    codec.save(loop, folder / LOOP, KINDS)
    seal(folder)


def load(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint; raise ``UserError`` that names a missing or corrupt file. Nothing is removed."""
    verify(folder)
    return Checkpoint(trainer=codec.load(folder / TRAINER), loop=codec.load(folder / LOOP, KINDS))

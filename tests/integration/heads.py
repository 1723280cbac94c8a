"""MTP heads of families in another program's own classes: checkpoints, what Bebop computes with them, planted faults.

Each engine's own loader reads the same folders in a process of its own (``tests/integration/*/run_heads.py``), and its
own MTP class runs on the same tokens and hidden states.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bebop.config.job import ModelConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, named_as_served
from bebop.model.layouts import LAYOUTS
from bebop.rollout.served_weights import constants, update
from tests.tiny_families import FAMILIES, write_family
from tests.tree import ROOT

TOKENS = 9
# Both sides compute in float32 and round differently. States are normed, so their entries are about 1; between two
# norms lie sums of at most 128 products. 32 roundings of 2^-24 each, relative to entries of up to 4, are 8e-6; logits
# multiply by a table of spread 6 / 8 over 64 entries, eight times that. A fault moves states by a tenth and more.
STATES, LOGITS, FAULT = 2e-5, 1e-4, 0.05
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A family's checkpoints and what Bebop makes of the first: states [n, d] and logits [n, V]."""

    folder: Path
    other: Path  # of other weights
    faults: Mapping[str, Path]
    states: Tensor
    logits: Tensor

    @property
    def arguments(self) -> list[str]:
        """What the engine's process is told: the folders, the first with the one whose weights it gets later."""
        return [f"{self.folder}:{self.other}", *map(str, self.faults.values())]


def _swapped_halves(weights: Weights, place: Callable[[str], str]) -> Weights:
    name = place("project")
    return weights | {name: torch.cat(weights[name].chunk(2, 1)[::-1], 1).contiguous()}


def _swapped_norms(weights: Weights, place: Callable[[str], str]) -> Weights:
    one, two = place("token_norm"), place("hidden_norm")
    return weights | {one: weights[two], two: weights[one]}


def _swapped_experts(weights: Weights, place: Callable[[str], str]) -> Weights:
    prefix = place("project").rpartition(".weight")[0].rpartition(".")[0]
    mine = {name: tensor for name, tensor in weights.items() if name.startswith(prefix) and ".experts." in name}
    turned = {0: 1, 1: 0}

    def other(found: re.Match[str]) -> str:
        return f".experts.{turned.get(int(found[1]), int(found[1]))}."

    return weights | {re.sub(r"\.experts\.(\d+)\.", other, name): tensor for name, tensor in mine.items()}


FAULTS = {"halves": _swapped_halves, "norms": _swapped_norms, "experts": _swapped_experts}


# DeepSeek-V3 stretches its positions; engines have a class of rotary embeddings for that, and one for plain ones.
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"deepseek_v3": {"rope_parameters": YARN}}


def write(root: Path, name: str, zero_first: bool | None = None) -> Head:
    """Write a family's checkpoints below ``root``. ``zero_first``: as the engine has it, if it is not as ours."""
    settings = SETTINGS.get(name, {})
    folder = write_family(root / name, name, **settings)
    other = write_family(root / f"{name}_b", name, seed=1, **settings)
    inputs = make_inputs(root)
    policy = _policy(folder)
    faults = {fault: _planted(folder, policy, fault) for fault in FAULTS if fault != "experts" or _has_experts(policy)}
    write_update(folder, other)
    states, logits = ours(policy, inputs, zero_first)
    return Head(folder=folder, other=other, faults=faults, states=states, logits=logits)


def write_update(folder: Path, other: Path) -> None:
    """Write what an engine that serves ``folder`` gets when the policy becomes that of ``other``.

    What no trainer changes is made the same in both.
    """
    stored, fixed = load_file(other / "model.safetensors"), constants(folder)
    save_file(stored | fixed, other / "model.safetensors", metadata={"format": "pt"})
    policy = _policy(other)
    layers = policy.backbone.config.num_hidden_layers
    rename = partial(named_as_served, folder)
    load = update(policy.weights(mtp=True), 1, policy.layout, layers, rename, constants=fixed)
    for role in ("target", "draft"):
        tensors = {key: tensor.detach().clone().contiguous() for key, tensor in getattr(load, role).items()}
        save_file(tensors, other.with_name(f"{other.name}_{role}.safetensors"))


def _policy(folder: Path) -> Policy:
    return load_policy(ModelConfig(path=str(folder), device="cpu", check=False), need_head=True, any_backbone=True)


def make_inputs(root: Path) -> Mapping[str, Tensor]:
    """Return tokens [n] and hidden states [n, d], and write them where the engine's process finds them."""
    torch.manual_seed(5)
    inputs = {"tokens": torch.randint(3, 30, (TOKENS,)), "hidden": torch.randn(TOKENS, 64)}
    save_file(inputs, root / "inputs.safetensors")
    return inputs


@torch.no_grad()
def ours(policy: Policy, inputs: Mapping[str, Tensor], zero_first: bool | None = None) -> tuple[Tensor, Tensor]:
    """Return states [n, d] and logits [n, V] of the policy's head."""
    head = policy.mtp
    assert head is not None
    if zero_first is not None:
        head.zero_first = zero_first
    embeddings, hidden = policy.embed(inputs["tokens"])[None], inputs["hidden"][None]
    states = head(embeddings, hidden, torch.arange(TOKENS)[None], CausalContext())
    return states[0], policy.logits(states)[0]


def _has_experts(policy: Policy) -> bool:
    assert policy.mtp is not None
    return any(".experts." in name for name in policy.mtp.state_dict())


def _planted(folder: Path, policy: Policy, fault: str) -> Path:
    """Return a copy of a folder whose head has a fault."""
    other = folder.with_name(f"{folder.name}_{fault}")
    shutil.copytree(folder, other)
    layout = LAYOUTS[policy.layout]
    prefix = layout.prefix.format(L=policy.backbone.config.num_hidden_layers)
    changed = FAULTS[fault](load_file(other / "model.safetensors"), lambda p: f"{prefix}{layout.names[p]}.weight")
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    return other


def run(module: str, root: Path, heads: Mapping[str, Head], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what an engine's process says of every folder."""
    arguments = [argument for head in heads.values() for argument in head.arguments]
    command = [sys.executable, "-m", module, str(root / "inputs.safetensors"), *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return {line["folder"]: line for line in lines}


def check_forward(head: Head, found: Mapping[str, Any]) -> None:
    """Hold an engine's states and logits against Bebop's, and see that the comparison notices every fault."""
    right = found[head.folder.name]
    assert float((torch.tensor(right["states"]) - head.states).abs().max()) < STATES
    assert float((torch.tensor(right["logits"]) - head.logits).abs().max()) < LOGITS
    for fault, folder in head.faults.items():
        moved = (torch.tensor(found[folder.name]["states"]) - head.states).abs()
        assert float(moved.max()) > FAULT, fault


def check_update(head: Head, found: Mapping[str, Any]) -> None:
    """New weights leave the engine's models as if they had been loaded from the other checkpoint."""
    for role in ("target", "draft"):
        result = found[head.folder.name][role]
        assert result["wrong"] == [] and len(result["changed"]) > 5, (role, result)


def compare(before: Mapping[str, Tensor], now: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return which of a model's tensors an update changed, and which are not as they should be; in its process."""
    return {
        "wrong": [name for name in wanted if not torch.equal(now[name], wanted[name])],
        "changed": [name for name in wanted if not torch.equal(now[name], before[name])],
    }


def held(model: torch.nn.Module, draft: bool) -> dict[str, Tensor]:
    """Return copies of a model's parameters; a draft's tables are the target's in a running engine."""
    named = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return {name: tensor for name, tensor in named.items() if not (draft and any(table in name for table in SHARED))}


SHARED = ("embed_tokens", "lm_head", "shared_head.head")
SERVED = tuple(name for name in FAMILIES if name != "llama")  # neither engine has an MTP class for Llama

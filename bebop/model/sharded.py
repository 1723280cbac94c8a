"""Load a backbone onto several ranks, each of which reads its own rows of every weight: no rank holds the whole model.

The model is made on the meta device, which takes no memory, then split (``bebop.trainer.scorer.shard``), then filled
from the checkpoint's files. This needs a checkpoint that names each parameter as the model does. Others, whose weights
transformers renames or stacks, are loaded whole on every rank (``load_backbone``).
"""

import copy
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from bebop.model.skeleton import FLOATS, header, is_mtp

if TYPE_CHECKING:  # each takes seconds of processor time to import
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

SAMPLE_LAYERS = 2  # with embedding and language-model head 5 GB of Qwen3-32B in bfloat16


def on_meta(backbone: nn.Module) -> bool:
    """Return whether the parameters of a model have no memory yet."""
    return next(backbone.parameters()).is_meta


def outline(settings: Any, folder: Path, dtype: torch.dtype) -> "PreTrainedModel | None":
    """Return the causal LM of a folder with its parameters on the meta device; None if ``fill`` cannot fill it.

    Buffers are real: rotary frequencies, which follow from ``settings``. Models with other buffers give None.
    """
    from bebop.model.attention import ATTENTION  # with transformers' modeling code: 4.2 s of processor time

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=ATTENTION)
    stored = {name: of for name, of in header(folder) if not is_mtp(name, settings)}
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    # An output matrix in the file of a tied model is separate, and transformers would leave it untied.
    if {name: shape for name, (_, shape) in stored.items()} != wanted:
        return None
    decoder = model.get_decoder()
    rotary: Any = getattr(decoder, "rotary_emb", None)
    owners = [module for module in model.modules() if any(True for _ in module.buffers(recurse=False))]
    if any(kind not in FLOATS for kind, _ in stored.values()) or owners != [rotary]:
        return None
    decoder.rotary_emb = type(rotary)(decoder.config)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    return model


def sample(settings: Any, dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """Return a random causal LM with these settings, cut to ``SAMPLE_LAYERS`` layers.

    It shows how the whole model computes, which ``outline`` cannot. It is the same on every rank, and the global
    generators are left as they were.
    """
    from bebop.model.attention import ATTENTION  # with transformers' modeling code: 4.2 s of processor time

    settings = copy.deepcopy(settings)
    text = settings.get_text_config()
    # Models read lists over layers, such as ``layer_types``, by index: they may stay longer.
    text.num_hidden_layers = min(text.num_hidden_layers, SAMPLE_LAYERS)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=ATTENTION)
    return model.eval()


@torch.no_grad()
def fill(backbone: nn.Module, folder: Path, device: torch.device) -> None:
    """Allocate every parameter and read its rows from the files in ``folder``; move buffers to ``device``.

    The parameters are split along their first dimension over a mesh of one dimension, as FSDP2 does by default.
    """
    from torch.distributed.tensor import DTensor  # with SymPy

    places: dict[int, list[tuple[nn.Module, str]]] = defaultdict(list)  # of a parameter, which modules may share
    for module in backbone.modules():
        for name, parameter in module.named_parameters(recurse=False):
            places[id(parameter)].append((module, name))
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
    named = dict(backbone.named_parameters())
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in named.keys() & set(opened.keys()):
                empty = named[name]
                assert isinstance(empty, DTensor)
                rows = _rows(empty)
                local = opened.get_slice(name)[rows.start : rows.stop].to(device, empty.dtype)
                whole = DTensor.from_local(
                    local,
                    empty.device_mesh,
                    empty.placements,
                    run_check=False,
                    shape=empty.shape,
                    stride=empty.stride(),
                )
                filled = nn.Parameter(whole, requires_grad=empty.requires_grad)
                for module, own in places[id(empty)]:
                    setattr(module, own, filled)
    assert not on_meta(backbone)


def _rows(parameter: "DTensor") -> slice:
    """Return the rows of a parameter that this rank holds: equal parts except the last ones, as in ``torch.chunk``."""
    count, mesh = parameter.shape[0], parameter.device_mesh
    each = -(-count // mesh.size())
    start = min(mesh.get_local_rank() * each, count)
    return slice(start, min(start + each, count))

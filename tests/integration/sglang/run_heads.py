"""A process of its own: SGLang's MTP classes on checkpoint folders, without a running engine.

``python -m tests.integration.sglang.run_heads INPUTS FOLDER[:OTHER]...`` writes ``RESULT {json}`` for each
folder: states and logits of its head, and what the weights of another folder do to target and draft. SGLang's
own: the configuration of the draft, the class with all of its layers and experts, its ``load_weights``, its logits.
Replaced: attention, which is softmax over all keys here instead of a kernel over a cache.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from torch import Tensor

from tests.integration.heads import compare, held
from tests.integration.sglang.draft_dflash import Attention, batch, load, prepare


@torch.no_grad()
def report(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Any]:
    model, _ = load(prepare(str(folder)), str(folder), draft=True)
    weights = load_file(folder / "model.safetensors")
    model.load_weights(iter(weights.items()))
    # A running engine gives the draft the target's tables, whose rows beyond the vocabulary are padding.
    for module, name in ((model.model.embed_tokens, "model.embed_tokens"), (model.lm_head, "lm_head")):
        module.weight[: model.config.vocab_size] = weights[f"{name}.weight"]
    if isinstance(model, DeepseekV3ForCausalLMNextN):
        # Its attention asks the backend of a running engine what to do (``get_attn_backend`` in deepseek_v2.py).
        return {"class": type(model).__name__}
    tokens, count = inputs["tokens"], len(inputs["tokens"])
    places = batch(tokens, torch.arange(count))
    places.spec_info = SimpleNamespace(hidden_states=inputs["hidden"].clone())
    states: list[Tensor] = []
    model.logits_processor.forward = lambda ids, hidden, *more, **named: states.append(hidden)
    model(tokens, torch.arange(count), places)
    logits = states[0] @ model.lm_head.weight[: model.config.vocab_size].T  # rows beyond are padding
    return {"class": type(model).__name__, "states": states[0].tolist(), "logits": logits.tolist()}


@torch.no_grad()
def updated(folder: Path, other: Path, draft: bool) -> dict[str, Any]:
    """Return what an update does to a model that was loaded from ``folder``, see ``compare``."""
    role = "draft" if draft else "target"
    states = []
    for place in (other, folder):
        model, _ = load(prepare(str(place)), str(place), draft=draft)
        model.load_weights(iter(load_file(place / "model.safetensors").items()))
        states.append(held(model, draft))
    model.load_weights(iter(load_file(other.with_name(f"{other.name}_{role}.safetensors")).items()))
    wanted, before = states
    return compare(before, held(model, draft), wanted)


def replace_attention() -> None:
    """Put softmax over all keys in the place of kernels."""
    attention = Attention()
    RadixAttention.forward = lambda layer, *a, **k: attention(layer, *a, **k)  # type: ignore[method-assign]


def main(inputs_path: str, *folders: str) -> None:
    replace_attention()
    inputs = load_file(inputs_path)
    for argument in folders:
        folder, _, other = argument.partition(":")
        found = {"folder": Path(folder).name, **report(Path(folder), inputs)}
        if other:
            pair = Path(folder), Path(other)
            found |= {"target": updated(*pair, draft=False), "draft": updated(*pair, draft=True)}
        sys.stdout.write("RESULT " + json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A process of its own: SGLang's MTP classes on checkpoint folders, without a running engine.

``python -m tests.integration.sglang.run_heads INPUTS FOLDER...`` writes ``RESULT {json}`` for each folder. SGLang's
own: the configuration of the draft, the class with all of its layers and experts, its ``load_weights``, its logits.
Replaced: attention, which is softmax over all keys here instead of a kernel over a cache.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from tests.integration.sglang.draft_dflash import Attention, batch, load, prepare


@torch.no_grad()
def report(folder: Path, inputs: dict[str, Tensor]) -> dict[str, Any]:
    model, _ = load(prepare(str(folder)), str(folder), draft=True)
    model.load_weights(iter(load_file(folder / "model.safetensors").items()))
    tokens, count = inputs["tokens"], len(inputs["tokens"])
    places = batch(tokens, torch.arange(count))
    places.spec_info = SimpleNamespace(hidden_states=inputs["hidden"].clone())
    states: list[Tensor] = []
    model.logits_processor.forward = lambda ids, hidden, *more, **named: states.append(hidden)
    model(tokens, torch.arange(count), places)
    return {"class": type(model).__name__, "states": states[0].tolist(), "logits": (states[0] @ model.lm_head.weight.T).tolist()}


def main(inputs_path: str, *folders: str) -> None:
    attention = Attention()
    RadixAttention.forward = lambda layer, *a, **k: attention(layer, *a, **k)  # type: ignore[method-assign]
    inputs = load_file(inputs_path)
    for folder in folders:
        try:
            found = report(Path(folder), inputs)
        except Exception as error:
            if os.environ.get("RAISE"): raise
            found = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write("RESULT " + json.dumps({"folder": Path(folder).name, **found}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Prediction for drafts on an H100: roofline arithmetic of the simulator with this model's shape, not measured."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bebop.model.backbone import Policy
from bebop.simulation.costs import Costs
from bebop.simulation.roofline import GPUS, Gpu, Model
from recipes.cluster.roofline import Lengths, Plan, Roofline
from recipes.reproduce.real_pays.rounds import LENGTHS, NEW_TOKENS

# Constants of the day on which the prediction was written. Those of ``bebop.simulation`` were fitted later.
H100 = replace(GPUS["h100"], products=0.5, draft_launch=0.0)
BATCHES = (1, 8, 32, 256)
WORD = "PREDICTION, not measured: an H100 by roofline arithmetic"


def shape(policy: Policy) -> Model:
    """Return the model's shape for the roofline; its head is one layer and a projection, as there."""
    config: Any = policy.backbone.config
    heads = config.num_attention_heads
    return Model(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
    )


def roofline(model: Model, batch: int, prompt: float, gpu: Gpu = H100) -> Roofline:
    """Return the roofline of one GPU with one engine of ``batch`` rows; the trainer's settings play no part."""
    plan = Plan(
        tensor_parallel=1, slots=batch, trainer_gpus=1, sequence_parallel=1, recompute=False, micro_batch=1,
        by_network=False, one_machine=True,
    )  # fmt: skip
    lengths = Lengths(mean=NEW_TOKENS, weighted=NEW_TOKENS, prompt=prompt, longest=round(prompt) + NEW_TOKENS)
    return Roofline(gpu, model, plan, lengths)


def cycle(model: Model, batch: int, prompt: float, drafts: int) -> float:
    """Return the seconds of a cycle of a full engine, or of a plain step with 0 drafts."""
    return Costs(roofline(model, batch, prompt).costs(drafts), drafts).cycle(batch)


def table(model: Model, prompt: float, lengths: Mapping[int, float]) -> list[dict[str, Any]]:
    """Return one line per batch size and number of drafts.

    ``lengths``: the accept length measured here with each number of drafts.
    """
    rows = []
    for batch in BATCHES:
        plain = cycle(model, batch, prompt, 0)
        for k in LENGTHS:
            seconds = cycle(model, batch, prompt, k)
            row = {"kind": "prediction", "batch": batch, "K": k, "plain step, ms": 1e3 * plain}
            row |= {"break-even": seconds / plain, "accept length (measured here)": lengths[k]}
            row |= {"x plain": lengths[k] * plain / seconds}
            launched = seconds + k * H100.launch
            rows.append(row | {"x plain, a launch each draft step": lengths[k] * plain / launched})
    return rows

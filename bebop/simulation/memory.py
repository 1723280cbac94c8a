"""Arithmetic answer to "does an update fit?" for a dense model and some GPUs, with the settings to change if not.

Bytes of one rank, of R that share the model by FSDP2; P are its parameters, b the bytes of a number (2 in bfloat16):

- Weights, gradient and two moments in fp32: 16 P / R.
- Weights for the matrix products. With R > 1 ranks: the embedding, the output matrix and two layers. With one rank in
  bfloat16: all layers, or one with checkpointing.
- A whole gradient in fp32, 4 P, if ranks sum up once a minibatch; else that of two layers in transit.
- Activations that each token leaves for the backward pass: counted, ``Question.token_bytes``; with checkpointing a
  layer's input.
- The larger of two: a chunk of logits with the gradient of the output matrix, or one layer in its backward pass.

Attention is counted with padding, which a GPU in bfloat16 does without. Left out: experts, tensor parallelism, and the
waste of the memory allocator, for which a tenth of the card is set aside.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from bebop.config.job import MAX_BATCH_TOKENS
from bebop.config.simulate import MemoryConfig
from bebop.errors import UserError
from bebop.simulation.roofline import GIGABYTE, GPUS, Gpu, Model, read_config, shape

FULL = 4  # bytes of fp32
ADAM = 4 * FULL  # weight, gradient and two moments
# Activation bytes of a token in a layer, per number of the hidden width, the MLP width, the queries and the keys.
# Counted on Qwen3 layers (``python -m bebop.bench update_memory``); those without norms of queries and keys leave less.
LEFT = {
    "float32": (24.0, 16.0, 20.0, 16.0),
    "autocast": (26.0, 8.0, 12.0, 10.0),
    "bfloat16": (16.0, 8.0, 12.0, 10.0),
}
BACKWARD = 0.5  # gradients during a layer's backward pass, as a share of its activations
CHUNK, LOGIT = 1 << 28, 16  # logits of a chunk on a GPU (trainer/scorer.py), bytes of each in the backward pass
SHARE = 1 / 8  # of the memory: for activations by default, and for a whole gradient
RESERVED = 1.5e9  # of CUDA, its libraries and NCCL
FEWEST_TOKENS = 1024  # of a micro-batch that is proposed
GPUS_OF_A_MACHINE = 8  # all ranks of the trainer lie on one machine
WIDTH = 110  # characters of a line


@dataclass(frozen=True)
class Question:
    """Resolved question: the configuration with its GPU and model shape."""

    config: MemoryConfig
    gpu: Gpu
    model: Model
    name: str  # of the model

    @classmethod
    def of(cls, config: MemoryConfig) -> "Question":
        """Resolve names; raise ``UserError`` if the card or model is unknown, or the model has experts."""
        if config.gpu not in GPUS:
            raise UserError(f"gpu={config.gpu!r} is not possible: choose one of {', '.join(GPUS)}")
        folder = (Path(config.model) / "config.json").is_file()
        try:
            name, model = (config.model, read_config(config.model)) if folder else shape(config.model)
        except UserError as error:
            words = str(error).partition("not possible: ")[2] or str(error)
            words = words if folder else f"give a folder with a config.json, or {words.removeprefix('give ')}"
            raise UserError(f"model={config.model!r} is not possible: {words}") from None
        if model.experts:
            raise UserError(f"model={config.model!r} is not possible: {name} has experts, which are not trained")
        return cls(config, GPUS[config.gpu], model, name)

    def changed(self, **settings: Any) -> "Question":
        """Return the question with some settings replaced."""
        return replace(self, config=replace(self.config, **settings))

    @property
    def bytes_(self) -> int:
        """Return the bytes of a number in the model's data type."""
        return 2 if self.config.dtype == "bfloat16" else FULL

    @property
    def sharded(self) -> bool:
        """Return whether several ranks share the model."""
        return self.config.gpus > 1

    def token_bytes(self, checkpointing: bool) -> float:
        """Return the bytes of a token's activations that a layer keeps for the backward pass."""
        m, mixed = self.model, self.config.dtype == "bfloat16"
        if checkpointing:
            return (2 if mixed and self.sharded else FULL) * m.hidden
        kind = ("bfloat16" if self.sharded else "autocast") if mixed else "float32"
        sizes = (m.hidden, m.intermediate, m.heads * m.head_dim, m.kv_heads * m.head_dim)
        return sum(each * size for each, size in zip(LEFT[kind], sizes, strict=True))

    # ---- settings that the trainer chooses by default (trainer/policy.py)

    @property
    def most_tokens(self) -> int:
        """Return the number of tokens of a micro-batch."""
        if self.config.max_tokens is not None:
            return self.config.max_tokens
        return min(MAX_BATCH_TOKENS, self._tokens(self.checkpointing))

    @property
    def checkpointing(self) -> bool:
        """Return whether layers are recomputed in the backward pass."""
        if self.config.checkpointing is not None:
            return self.config.checkpointing
        return self._tokens(False) < (self.config.max_tokens or MAX_BATCH_TOKENS)

    @property
    def once(self) -> bool:
        """Return whether ranks sum up gradients once a minibatch."""
        if self.config.gradient_sync != "auto":
            return self.config.gradient_sync == "minibatch"
        return FULL * self.model.parameters <= self.gpu.memory * SHARE

    def _tokens(self, checkpointing: bool) -> int:
        """Return the number of tokens whose activations take an eighth of the memory, counted as
        ``model.memory.activation_bytes`` does.
        """
        m = self.model
        layer = (12 * m.hidden + 4 * m.intermediate) * (3 if self.bytes_ == 2 else 4)
        each = m.layers * FULL * m.hidden + layer if checkpointing else m.layers * layer
        return max(1, int(self.gpu.memory * SHARE / each))

    # ---- bytes of one rank

    def parts(self) -> dict[str, float]:
        """Return the bytes of each part of an update, on one GPU."""
        m, c, b = self.model, self.config, self.bytes_
        ends, table = m.parameters - m.layers * m.layer, m.output
        found = {"weights, gradient and Adam": ADAM * m.parameters / c.gpus}
        if self.sharded:
            found["gathered weights"] = b * (ends + 2 * m.layer)
            summed = FULL * m.parameters if self.once else (b + FULL) * 2 * m.layer + b * ends
            found["whole gradient" if self.once else "gradients of layers"] = summed
        elif b != FULL:
            found["weights in bfloat16"] = b * (table + m.layer * (1 if self.checkpointing else m.layers))
        kept = self.most_tokens * m.layers * self.token_bytes(self.checkpointing)
        found["layer inputs" if self.checkpointing else "activations"] = kept
        head = min(CHUNK, self.most_tokens * m.vocabulary) * LOGIT + FULL * table
        layer = self.most_tokens * self.token_bytes(False) * (BACKWARD + self.checkpointing)
        found["logits" if head >= layer else "one layer"] = max(head, layer)
        if c.kl:
            found["reference model"] = m.parameters * (b if self.sharded else FULL) / c.gpus
        if c.cotrain:
            found["head in training"] = ADAM * m.head + 2 * FULL * table
        return found

    @property
    def total(self) -> float:
        """Return the bytes of one GPU that the trainer needs."""
        return sum(self.parts().values()) + RESERVED

    @property
    def room(self) -> float:
        """Return the bytes of one GPU that the trainer may use."""
        return self.gpu.memory * max(0.0, self.gpu.usable - self.config.engine_share)

    @property
    def fits(self) -> bool:
        """Return whether an update fits into the room of one GPU."""
        return self.total <= self.room


def changes(asked: Question) -> list[str] | None:
    """Return the settings to change so that an update fits, the cheapest first; None if no combination is enough."""
    given: dict[str, Any] = {}
    for settings in _steps(asked):
        given |= settings
        if asked.changed(**given).fits:
            return [f"{'' if name == 'gpus' else 'trainer.'}{name}={_shown(value)}" for name, value in given.items()]
    return None


def _steps(asked: Question) -> Iterator[dict[str, Any]]:
    """Yield changes of settings, each on top of the previous ones."""
    if not asked.checkpointing:
        yield {"checkpointing": True}
    if asked.sharded and asked.once:
        yield {"gradient_sync": "micro_batch"}
    tokens = asked.changed(checkpointing=True).most_tokens
    while tokens // 2 >= FEWEST_TOKENS:
        tokens //= 2
        yield {"max_tokens": tokens}
    gpus = asked.config.gpus
    while gpus * 2 <= GPUS_OF_A_MACHINE:
        gpus *= 2
        yield {"gpus": gpus}


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def answer(asked: Question) -> dict[str, Any]:
    """Return all results of the page as a dictionary, for programs; sizes are gigabytes of one GPU."""
    m, c = asked.model, asked.config
    return {
        "predicted": True,
        "model": {"name": asked.name, "parameters": m.parameters, "layers": m.layers, "hidden": m.hidden},
        "card": {"name": c.gpu, "gpus": c.gpus, "memory_gb": asked.gpu.memory / GIGABYTE},
        "max_tokens": asked.most_tokens,
        "checkpointing": asked.checkpointing,
        "gradient_sync": "minibatch" if asked.once else "micro_batch",
        "parts_gb": {name: size / GIGABYTE for name, size in asked.parts().items()},
        "reserved_gb": RESERVED / GIGABYTE,
        "total_gb": asked.total / GIGABYTE,
        "room_gb": asked.room / GIGABYTE,
        "fits": asked.fits,
        "change": [] if asked.fits else changes(asked),
        "host_gb": asked.bytes_ * m.parameters * (1 + c.staleness) / GIGABYTE,
    }


def page(found: dict[str, Any]) -> str:
    """Return an answer as text for a terminal."""
    model, card = found["model"], found["card"]
    several = card["gpus"] > 1
    lines = [
        f"Predicted by arithmetic, not measured: {model['name']}, {model['parameters'] / 1e9:.3g} B parameters, on "
        f"{card['gpus']} {card['name']} of {card['memory_gb']:.0f} GB",
        "",
        f"  trainer.max_tokens={found['max_tokens']} trainer.checkpointing={_shown(found['checkpointing'])}"
        + f" trainer.gradient_sync={found['gradient_sync']}" * several,
        "",
        *(f"  {size:8.1f} GB  {name}" for name, size in found["parts_gb"].items()),
        f"  {found['reserved_gb']:8.1f} GB  CUDA and its libraries",
        f"  {found['total_gb']:8.1f} GB  of {found['room_gb']:.1f} GB that the trainer may use on each GPU",
        f"  {found['host_gb']:8.1f} GB  of the machine's own memory: weights to send, and older versions",
        "",
    ]
    if found["fits"]:
        said = "It fits."
    elif found["change"]:
        said = f"It does not fit. It does with {' '.join(found['change'])}."
    else:
        said = (
            f"It does not fit, and no setting makes it fit on {GPUS_OF_A_MACHINE} GPUs of one machine. Take larger "
            "cards, or train inside verl, whose ranks span machines (recipes/verl)."
        )
    return "\n".join([*lines, *wrap(said, WIDTH)]) + "\n"

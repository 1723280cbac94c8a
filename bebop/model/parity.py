"""Comparison of a loaded model with itself under Hugging Face's own attention: other logits are refused.

Random text goes through the model as the trainer packs it, as it is padded, and as the engine feeds it to its slots.
The reference is transformers' eager attention with the same weights. The allowed effect of rounding is measured too: by
the same pass with every layer's output changed by one unit in its last place.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.model.attention import AttentionContext, CausalContext, PackedContext, SlotContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain

log = logging.getLogger(__name__)
ROWS, WIDTH = 3, 24  # near texts, from position 0 on
PACKED = (24, 7, 16)  # their lengths where they are packed
PREFILLED = (5, 11, 2)  # tokens of each that fill its slot before the steps
STEPS = (4, 1, 6)
FAR = 12  # tokens of one more packed text, at the last positions that the model has
# Allowed error, in multiples of the effect of one unit in the last place of every layer's output. Measured errors: 0.3
# to 1.8 over 33 families in two types.
SLACK = 5.0
# A model is refused only if all of these random texts differ: rounding may send a token to another expert, which is no
# fault of attention.
TRIES = 3


class LayerCalls:
    """A context that records which layers attended, and how often."""

    def __init__(self, inner: AttentionContext) -> None:
        self.inner = inner
        self.layers: list[int] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Record the layer and attend as the inner context does."""
        self.layers.append(layer)
        return self.inner.attend(layer, query, key, value, scaling)


@torch.no_grad()
def check_parity(policy: Policy, path: str) -> None:
    """Raise ``UserError`` where the logits under bebop's contexts differ from Hugging Face's beyond rounding.

    It takes about ten passes over a few dozen tokens. It draws no numbers from the global generators and leaves the
    model unchanged.
    """
    _refuse(policy, path, _difference, refused="", fails="it does not run on bebop's attention")


@torch.no_grad()
def check_stock(policy: Policy, path: str) -> None:
    """Raise ``UserError`` if a backbone on transformers' attention, or its head on bebop's, computes wrong numbers.

    Padded rows must get the logits of rows alone. The head's layer must agree with transformers' eager attention. It
    takes a few passes over a few dozen tokens.
    """
    refused, fails = "its MTP head cannot run: ", "it does not run as adaptation calls it"
    _refuse(policy, path, _stock_difference, refused=refused, fails=fails)


def _refuse(
    policy: Policy, path: str, difference: Callable[[Policy, int], str | None], *, refused: str, fails: str
) -> None:
    """Raise ``UserError`` if ``difference`` reports a problem for each of several seeds, or fails itself.

    ``refused``: prefix of a refusal by a context or by ``bebop.model.attention``; ``fails``: meaning of any other
    error.
    """
    name = f"model.path={path!r}, a {policy.backbone.config.model_type} model: "
    try:
        for seed in range(TRIES):
            problem = difference(policy, seed)
            if problem is None:
                return
    except UserError as error:
        raise UserError(f"{name}{refused}{error}") from error
    except Exception as error:  # third-party model code, called in an unusual way, may raise anything
        reason = " ".join(str(error).split())[:150]
        raise UserError(f"{name}{fails}: {type(error).__name__}: {reason}") from error
    raise UserError(f"{name}{problem}; model.check=false skips this check")


def _stock_difference(policy: Policy, seed: int) -> str | None:
    """Return a description of the differences for random text; None if rounding explains them."""
    ids, _, _ = _texts(policy, seed)
    hidden = policy.hidden(ids, _from(ids, 0), CausalContext())
    eps = torch.finfo(policy.backbone.dtype).eps
    limit = SLACK * max(_error([_perturbed(policy, ids)], [_stock(policy, ids)]), eps)
    if not (error := _error([policy.logits(hidden)], [_stock(policy, ids)])) <= limit:
        return f"its language-model head is not all of its logits, by {error:.2g} of their norm: losses know no caps"
    alone = [_stock(policy, row[None, :n])[0] for row, n in zip(ids, PACKED, strict=True)]
    rows = [policy.logits(row[:n]) for row, n in zip(hidden, PACKED, strict=True)]
    if not (error := _error(rows, alone)) <= limit:
        return f"padded rows get other logits than rows alone, by {error:.2g} of their norm (rounding: {limit:.2g})"
    if policy.mtp is None:
        return None
    embeddings = policy.embed(ids)
    first, _ = chain(policy.mtp, embeddings, hidden, 2)
    with stock_attention(policy.mtp):
        wanted = policy.mtp(embeddings[:, 1:], hidden[:, :-1], _from(ids[:, 1:], 0), CausalContext(), causal=True)
    limit = SLACK * max(limit, 64 * eps)  # one layer; rounding in it was not measured
    if not (error := _error([first], [wanted])) <= limit:
        return f"the MTP head's layer differs from transformers' by {error:.2g} of its norm (rounding: {limit:.2g})"
    return None


def _difference(policy: Policy, seed: int) -> str | None:
    """Return a description of the differences of logits for random text; None if rounding explains them."""
    ways = {"packed rows": packed, "padded rows": padded, "the engine's slots": stepwise}
    near, far, positions = _texts(policy, seed)
    truth = [_stock(policy, near), _stock(policy, far, positions)]
    rounding = _error([_perturbed(policy, near)], truth[:1])
    limit = SLACK * max(rounding, torch.finfo(policy.backbone.dtype).eps)
    for way, run in ways.items():
        error = run(policy, near, far, positions, truth)
        log.debug("%s differ by %.2g of the logits' norm, rounding explains %.2g", way, error, limit)
        if not error <= limit:  # also catches NaN
            return (
                f"{way} get other logits than from Hugging Face's own forward, by {error:.2g} of their norm where "
                f"rounding explains {limit:.2g}: the model needs something that bebop does not compute"
            )
    return None


# ---- the same texts, fed in every way


def packed(policy: Policy, near: Tensor, far: Tensor, positions: Tensor, truth: Sequence[Tensor]) -> float:
    """Return the error of rows end to end; the last lies at far positions, which must not change the others."""
    lengths = torch.tensor([*PACKED, FAR], device=near.device)
    ids = torch.cat([*(row[:n] for row, n in zip(near, PACKED, strict=True)), far[0]])[None]
    places = torch.cat([*(torch.arange(n, device=near.device) for n in PACKED), positions[0]])[None]
    ours = _ours(policy, ids, places, PackedContext(lengths))[0].split([*PACKED, FAR])
    return _error(ours, [*(row[:n] for row, n in zip(truth[0], PACKED, strict=True)), truth[1][0]])


def padded(policy: Policy, near: Tensor, far: Tensor, positions: Tensor, truth: Sequence[Tensor]) -> float:
    """Return the error of rows side by side."""
    return _error([_ours(policy, near, _from(near, 0), CausalContext())], truth[:1])


def stepwise(policy: Policy, near: Tensor, far: Tensor, positions: Tensor, truth: Sequence[Tensor]) -> float:
    """Return the error of texts fed to slots: their beginnings, each its own length, then some tokens at a time."""
    context = SlotContext.for_model(policy.backbone.config, ROWS, WIDTH, policy.embed(near[:1, 0]))
    width = max(PREFILLED)
    context.place(_from(near[:, :width], 0), width)
    out = _ours(policy, near[:, :width], _from(near[:, :width], 0), context)
    ours, wanted = ([x[i, :n] for i, n in enumerate(PREFILLED)] for x in (out, truth[0]))
    fed = torch.tensor(PREFILLED, device=near.device)[:, None]
    for step in STEPS:
        places = fed + torch.arange(step, device=near.device)
        context.place(places, WIDTH)
        out = _ours(policy, near.gather(1, places), places, context)
        ours += out
        wanted += truth[0].gather(1, places[..., None].expand_as(out))
        fed = fed + step
    return _error(ours, wanted)


def _ours(policy: Policy, ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
    """Return logits [B, n, V] as the engine and the trainer compute them; every layer must attend exactly once."""
    calls = LayerCalls(context)
    out = policy.logits(policy.hidden(ids, positions, calls))
    layers = policy.backbone.config.get_text_config().num_hidden_layers
    if sorted(calls.layers) != list(range(layers)):
        counted = f"{len(calls.layers)} calls for {layers} layers"
        raise UserError(f"it has layers that are no plain attention, which bebop does not compute ({counted})")
    return out


def _texts(policy: Policy, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return random ids [ROWS, WIDTH] and [1, FAR], and the positions [1, FAR] of the latter."""
    config, generator = policy.backbone.config.get_text_config(), torch.Generator().manual_seed(seed)
    near = torch.randint(0, policy.vocab_size, (ROWS, WIDTH), generator=generator).to(policy.device)
    far = torch.randint(0, policy.vocab_size, (1, FAR), generator=generator).to(policy.device)
    limit = getattr(config, "max_position_embeddings", None) or 4096
    return near, far, _from(far, max(0, limit - FAR))


def _from(ids: Tensor, start: int) -> Tensor:
    """Return the positions start, start + 1, ... of ids [B, n]."""
    return torch.arange(start, start + ids.shape[1], device=ids.device).expand_as(ids)


def _error(ours: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """Return the norm of all differences over the norm of the reference."""
    parts = [(a.float() - b.float(), b.float()) for a, b in zip(ours, wanted, strict=True)]
    difference, whole = (torch.stack([x.norm() for x in side]).norm() for side in zip(*parts, strict=True))
    return float(difference / whole.clamp_min(1e-30))


# ---- Hugging Face's own forward


def _stock(policy: Policy, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return logits [B, n, V] under transformers' eager attention, with all steps after the language-model head."""
    places = _from(ids, 0) if positions is None else positions
    with stock_attention(policy.backbone):
        out: Tensor = policy.backbone(input_ids=ids, position_ids=places, use_cache=False).logits
    return out


def _perturbed(policy: Policy, ids: Tensor) -> Tensor:
    """Return the logits of ``_stock`` with small errors, up or down, in the embeddings and every layer's output.

    Each error is one unit in the last place.
    """
    generator = torch.Generator().manual_seed(1)
    unit = torch.finfo(policy.backbone.dtype).eps

    def shift(module: nn.Module, inputs: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        signs = torch.randint(0, 2, first.shape, generator=generator).to(first) * 2 - 1
        moved = first * (1 + unit * signs)
        return (moved, *output[1:]) if isinstance(output, tuple) else moved

    places = [policy.backbone.get_input_embeddings(), *getattr(policy.backbone.get_decoder(), "layers", ())]
    with ExitStack() as hooks:
        for place in places:
            hooks.callback(place.register_forward_hook(shift).remove)
        return _stock(policy, ids)


@contextmanager
def stock_attention(backbone: nn.Module, name: str = "eager") -> Iterator[None]:
    """Run a model that was loaded with bebop's attention on one of transformers' own within this block."""
    from bebop.model.attention import ATTENTION  # with transformers' modeling code, which a driver does without

    configs = {id(c): c for m in backbone.modules() if (c := getattr(m, "config", None)) is not None}
    ours = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == ATTENTION]
    for config in ours:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config in ours:
            config._attn_implementation = ATTENTION

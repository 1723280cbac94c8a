"""Declarations of an engine: the meaning of its reported log-probs, and its rule for verifying drafts.

Engines report different log-probs. SGLang reports the softmax at the temperature without truncation, and vLLM reports
the raw softmax by default. The embedded engine reports the distribution that the token was drawn from. The mode can be
declared, or found on a first cohort. Every token then tests whether it holds.

Several rules of verification are exact. ``rejection`` accepts a draft y with min(1, p(y) / q(y)). ``one_hot`` ignores
q: it draws from the target and accepts the draft if it is that token, or it takes p without y for the residual. Both
accept y with p(y), and write a token of p without y otherwise, whatever drafts were drawn from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.precision import FLOOR
from bebop.certify.structure import Finding
from bebop.errors import UserError

Mode = Literal["raw", "temperature", "processed", "none"]
Rule = Literal["rejection", "one_hot", "whole"]  # whole: a cycle at once, as block verification does
TAIL = 6  # standard deviations of a log-prob that one token in 500 may exceed: rounding has heavy tails
ORDER: tuple[Mode, ...] = ("processed", "temperature", "raw")  # preferred name first where modes agree


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Allowed error of a log-prob, and the share of tokens that may exceed it."""

    nats: float
    share: float = 0.0  # share of tokens; if above 0, three tokens are always forgiven

    def met(self, off: Tensor) -> bool:
        """Return whether log-probs with errors ``off`` [N], in nats, are within the tolerance."""
        return self.forgives(int((off > self.nats).sum()), len(off))

    def forgives(self, wrong: int, tokens: int) -> bool:
        """Return whether ``wrong`` of ``tokens`` tokens may exceed the allowed error."""
        return wrong <= (3 + self.share * tokens if self.share else 0)


# Errors in nats between an engine in each precision and a reference in single precision, for an unknown model. Measured
# in bf16: with the built-in model, 9,600 tokens at temperatures 1 and 2, 0.64 at most and over 0.25 for 2 tokens; with
# SmolLM2, whose logits are larger, over 0.25 for one token in 150. Half precision has three more bits than bf16, single
# precision of the built-in model is off by 1.5e-5 at most. ``precision`` estimates the errors of a known model.
TOLERANCES = {
    "float32": Tolerance(nats=2e-3),
    "float16": Tolerance(nats=0.1, share=0.002),
    "bfloat16": Tolerance(nats=0.5, share=0.002),
}


def tolerance(dtype: str) -> Tolerance:
    """Return the tolerance of an engine in a precision; raise ``UserError`` for an unknown precision."""
    if dtype not in TOLERANCES:
        raise UserError(f"dtype={dtype!r}: no tolerance of log-probs is known; choose one of {', '.join(TOLERANCES)}")
    return TOLERANCES[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Mode of the log-probs that an engine reports, as found on a cohort."""

    mode: Mode
    distances: dict[str, float]  # mode -> median over tokens of |reported - log-prob in this mode|, nats
    same: tuple[str, ...] = ()  # modes that coincide at these sampling parameters


def known_rule(rule: Rule) -> Rule:
    """Return the rule; raise ``UserError`` if it is unknown."""
    if rule not in (known := get_args(Rule)):
        raise UserError(f"rule={rule!r} is unknown: give one of {', '.join(known)}")
    return rule


def candidates(block: Block, temperature: float) -> dict[Mode, Tensor]:
    """Return the log-probs [N] of the block's tokens in each mode that the block can compute.

    At a temperature other than 1 the log-prob at the temperature needs the whole row. Only ``processed`` includes a
    repetition penalty, and it is not known where rounding decides what a truncation keeps.
    """
    own = block.logprobs if block.near is None else block.logprobs.masked_fill(block.near, torch.nan)
    found: dict[Mode, Tensor] = {"processed": own}
    raw = block.raw
    if raw is None:  # the claim is the raw softmax itself
        return found | {"temperature": block.logprobs, "raw": block.logprobs}
    known = torch.ones_like(block.cells, dtype=torch.bool)
    if block.ids is not None:
        known = block.ids.gather(1, block.cells[:, None])[:, 0] >= 0  # in the column for all others it is not known
    nan = torch.full_like(block.logprobs, torch.nan)
    at = block.cells[:, None]
    found["raw"] = torch.where(known, raw.gather(1, at)[:, 0].log(), nan)
    if temperature == 1.0:
        found["temperature"] = found["raw"]
    elif block.ids is None:
        found["temperature"] = (raw.log() / temperature).log_softmax(-1).gather(1, at)[:, 0]
    return found


def find_mode(reported: Tensor | None, candidates: Mapping[Mode, Tensor]) -> Found:
    """Return the mode that is nearest to reported log-probs [N] by the median, which tolerates a few wrong tokens."""
    if reported is None or reported.isnan().all():
        return Found(mode="none", distances={})
    distances: dict[str, float] = {}
    for mode in ORDER:
        if mode in candidates and len(near := (reported - candidates[mode]).abs()[_both(reported, candidates[mode])]):
            distances[mode] = float(near.median())
    if not distances:
        return Found(mode="none", distances={})
    mode = min((mode for mode in ORDER if mode in distances), key=lambda mode: distances[mode])
    own = candidates[mode]
    same = tuple(
        other
        for other in distances
        if torch.allclose(candidates[other], own, rtol=0, atol=1e-9, equal_nan=True)  # type: ignore[index]
    )
    return Found(mode=mode, distances=distances, same=same)


def declare(block: Block, mode: Mode, temperature: float) -> Block:
    """Return the block with ``declared`` filled for a mode; raise ``UserError`` if the reference cannot compute it."""
    if mode == "none" or block.reported is None:
        return replace(block, reported=None, declared=None)
    known = candidates(block, temperature)
    if mode not in known:
        raise UserError(
            f"logprobs={mode!r} at temperature={temperature:g} cannot be checked where the reference knows the "
            "likeliest tokens alone: use reference=model, or logprobs=none"
        )
    spread = block.spread
    if spread is not None and mode == "raw":
        spread = temperature * spread  # ``spread`` belongs to the sampled distribution: the raw one's over temperature
    return replace(block, declared=known[mode], spread=spread)


def tolerated(block: Block, nats: float) -> Tensor:
    """Return the allowed error of each log-prob [N]: from the reference's rounding estimate, or else ``nats``."""
    if block.spread is None:
        return torch.full_like(block.logprobs, nats)
    return TAIL * block.spread.clamp_min(FLOOR)


def check_reported(block: Block, dtype: str, most: int = 20) -> list[Finding]:
    """Return the first ``most`` tokens of a cohort whose reported log-prob is not the declared one.

    ``dtype``: the engine's precision. Beyond the forgiven number of wrong tokens, all of them are findings.
    """
    if block.reported is None or block.declared is None:
        return []
    allowed = tolerance(dtype)
    both = _both(block.reported, block.declared)
    off = (block.reported - block.declared).abs()
    wrong = both & (off > tolerated(block, allowed.nats))
    if allowed.forgives(int(wrong.sum()), int(both.sum())):
        return []
    return [
        Finding(
            request=int(block.request[i]),
            position=int(block.position[i]),
            sentence=f"its log-prob is reported as {block.reported[i]:.4f}, but is {block.declared[i]:.4f}",
        )
        for i in wrong.nonzero()[:most, 0].tolist()
    ]


def _both(reported: Tensor, declared: Tensor) -> Tensor:
    return ~(reported.isnan() | declared.isnan())

"""Adapters from other engines' draft reports to decoding statistics: SGLang's ``meta_info`` and vLLM's counters.

SGLang's names changed several times; every generation is read. Its accept length counts the token after the accepted
drafts, as here. vLLM's counters are cumulative: two readings make a step. Neither engine reports overlap or entropies.
Those come from ``bebop_verify``, which the plugin for SGLang adds to ``meta_info``, one entry a verification step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bebop.errors import UserError
from bebop.monitor.estimate import Array
from bebop.trajectory import MEASURED, STRETCH, DecodeStats

ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num", "spec_accepted_tokens")
PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
HISTOGRAM = ("spec_correct_drafts_histogram", "spec_accept_histogram", "spec_acceptance_histogram")
VLLM = "vllm:spec_decode_num_"


def sglang_stats(meta: Mapping[str, Any]) -> DecodeStats | None:
    """Return one request's statistics from its ``meta_info``; None if nothing was verified."""
    if verified := verified_entries(meta):
        return DecodeStats.total(stats for _, stats in sglang_stretches(verified))
    tokens, cycles, accepted = (
        _number(meta, "completion_tokens"),
        _number(meta, "spec_verify_ct"),
        _number(meta, *ACCEPTED),
    )
    proposed = _number(meta, *PROPOSED)
    if accepted is None and proposed is not None and (rate := _number(meta, "spec_accept_rate")) is not None:
        accepted = rate * proposed
    if cycles is None and tokens is not None and (length := _number(meta, "spec_accept_length")):
        cycles = tokens / length
    if cycles is None or (accepted is None and tokens is None):
        names = ", ".join(sorted(key for key in meta if "spec" in key)) or "none"
        raise UserError(
            f"meta_info has no draft statistics that can be read (spec fields: {names}); give spec_verify_ct"
        )
    if cycles <= 0:
        return None
    histogram = next((meta[key] for key in HISTOGRAM if meta.get(key)), None)
    if histogram is not None:
        return _from_histogram(np.asarray(histogram, dtype=float), round((proposed or 0) / cycles))
    emitted = cycles + accepted if accepted is not None else tokens
    assert emitted is not None
    return DecodeStats(cycles=round(cycles), tokens=round(emitted))


def verified_entries(meta: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the entries of ``bebop_verify`` without nulls.

    SGLang writes null for each token of a completion without an entry if one message also holds completions with
    entries.
    """
    return [entry for entry in meta.get("bebop_verify") or [] if entry is not None]


def sglang_stretches(verified: Sequence[Mapping[str, Any]]) -> list[tuple[int, DecodeStats]]:
    """Return ``bebop_verify`` as statistics of stretches: (first token, statistics), cut at tokens 64, 128, 256, ..."""
    stretches: list[tuple[int, DecodeStats]] = []
    token, cut = 0, STRETCH
    for entry in verified:
        stats = _verified(entry)
        if not stretches or token >= cut:
            while token >= cut:
                cut *= 2
            stretches.append((token, stats))
        else:
            stretches[-1] = (stretches[-1][0], stretches[-1][1] + stats)
        token += stats.tokens
    return stretches


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmCounters:
    """Values of vLLM's counters at one moment, summed over engines.

    >>> VllmCounters(drafts=100, draft_tokens=300, accepted=180, per_position=(80, 60, 40))  # doctest: +SKIP
    """

    drafts: float
    draft_tokens: float
    accepted: float
    per_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "VllmCounters":
        """Read counters by name; positions are a list under ``..._per_pos``, or single keys, ``..._per_pos:k``."""
        values = {key.replace("_total", ""): value for key, value in values.items() if key.startswith(VLLM)}
        listed = values.get(f"{VLLM}accepted_tokens_per_pos")
        if listed is None:
            listed = []
            while (value := values.get(f"{VLLM}accepted_tokens_per_pos:{len(listed)}")) is not None:
                listed.append(value)
        try:
            return cls(
                drafts=float(values[f"{VLLM}drafts"]),
                draft_tokens=float(values[f"{VLLM}draft_tokens"]),
                accepted=float(values[f"{VLLM}accepted_tokens"]),
                per_position=tuple(float(v) for v in listed),
            )
        except KeyError as error:
            raise UserError(f"vLLM's {error.args[0]} is missing: is speculative decoding on?") from None

    def since(self, before: "VllmCounters | None") -> DecodeStats | None:
        """Return the statistics since ``before``; None if nothing was drafted. A restarted server counts from zero."""
        restarted = before is None or self.drafts < before.drafts
        zero = VllmCounters(drafts=0, draft_tokens=0, accepted=0)
        base = zero if restarted or before is None else before
        drafts, accepted = self.drafts - base.drafts, self.accepted - base.accepted
        if drafts <= 0:
            return None
        cycles, tokens = round(drafts), round(drafts + accepted)
        count = len(self.per_position)
        if not count or self.draft_tokens - base.draft_tokens < 0.99 * count * drafts:
            return DecodeStats(
                cycles=cycles, tokens=tokens
            )  # drafts of several lengths: the counters do not say how many reached a position
        was = np.array(base.per_position or [0.0] * count)
        passed = np.array(self.per_position) - was
        reached = np.concatenate([[drafts], passed[:-1]])
        return DecodeStats.with_drafts(count, cycles=cycles, tokens=tokens, accepted=passed, reached=reached)


def _verified(entry: Mapping[str, Any]) -> DecodeStats:
    """Return the statistics of one verification step."""
    accepted = _number(entry, "accepted")
    if accepted is None or entry.get("overlap") is None:
        raise UserError(f"an entry of bebop_verify has {sorted(entry)}: it takes accepted and overlap")
    drafts = len(entry["overlap"])
    steps = np.arange(drafts)
    reached = (steps <= accepted).astype(float)
    sums: dict[str, Any] = {}
    for name in MEASURED:
        given = [np.nan] * drafts if entry.get(name) is None else entry[name]
        if np.ndim(given) != 1 or len(given) < drafts:
            raise UserError(f"{name} in an entry of bebop_verify is {str(given)[:60]}: give {drafts} numbers or more")
        # The target's entropies may include the position after the last draft.
        sums[name] = np.where(reached > 0, np.asarray(given, dtype=float)[:drafts], 0.0)
    return DecodeStats(
        cycles=1, tokens=int(accepted) + 1, reached=reached, accepted=(steps < accepted).astype(float), **sums
    )


def _from_histogram(histogram: Array, drafts: int) -> DecodeStats:
    """Return statistics from ``histogram``, [a] = verification steps that accepted a drafts; it may lack trailing
    zeros.
    """
    drafts = max(drafts, len(histogram) - 1)
    counts = np.pad(histogram, (0, drafts + 1 - len(histogram)))
    tail = counts[::-1].cumsum()[::-1]  # tail[a]: at least a
    return DecodeStats.with_drafts(
        drafts,
        cycles=round(float(tail[0])),
        tokens=round(float(tail.sum())),
        reached=tail[:-1],
        accepted=tail[1:],
    )


def _number(source: Mapping[str, Any], *names: str) -> float | None:
    """Return the value of the first of ``names`` that is a number."""
    values = (source.get(name) for name in names)
    return next((float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)), None)

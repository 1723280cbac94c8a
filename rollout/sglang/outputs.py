"""Parsing of SGLang's outputs into parts of completions: tokens, log-probs, versions and statistics.

Statistics are read by the names of every SGLang version.
"""

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.model.routing import Routers, of_server
from bebop.monitor.adapters import sglang_stats, verified_entries
from bebop.rollout.detokenize import completed_at
from bebop.rollout.served_engine import OutputChunk
from bebop.trajectory import DecodeStats, FinishReason, SamplingParams

SHARED = ("embed_tokens", "lm_head")  # the draft uses the target's


def output_chunk(
    output: Mapping[str, Any], params: SamplingParams, drafts: int, written: Sequence[int] = (), tokenizer: Any = None
) -> OutputChunk:
    """Return SGLang's output for a request, decoded after the tokens ``written``, as a chunk.

    ``drafts`` is 0 for plain decoding; ``tokenizer`` finds stop strings, and may be None if there are none.
    """
    meta, ids = output["meta_info"], np.asarray(output["output_ids"], dtype=np.int64)
    reason = _reason(meta)
    if reason == "abort" or (params.stop and len(written)):
        # Of a stop string that an update cut in two, SGLang sees the second half alone.
        count, found = end_of_cut(ids.tolist(), params, written, tokenizer)
        if reason == "abort" or count < len(ids):
            ids, reason = ids[:count], found
    return OutputChunk(
        token_ids=ids,
        logprobs=_logprobs(meta, ids, params),
        versions=_versions(meta, len(ids)),
        reason=reason,
        stats=request_stats(meta, len(ids), drafts),
        why=meta,
    )


def end_of_cut(
    ids: Sequence[int], params: SamplingParams, written: Sequence[int], tokenizer: Any
) -> tuple[int, FinishReason]:
    """Return how many tokens of an aborted request belong to its completion, and why the completion ended.

    SGLang lets an aborted request take one more step and does not look for its end there: a stop token, a stop string
    or the limit may lie among the tokens, and others behind it (docs/upstream.md).
    """
    room = params.max_new_tokens - len(written)
    ends = [place + 1 for place, token in enumerate(ids) if token in params.stop_token_ids][:1]
    if params.stop and (count := completed_at(tokenizer, [*written, *ids], params.stop)) > len(written):
        ends.append(count - len(written))
    if ends and min(ends) <= room:
        return min(ends), "stop"
    return (room, "length") if len(ids) >= room else (len(ids), "abort")


def refused(output: Mapping[str, Any]) -> str | None:
    """Return SGLang's reason to refuse a request; None if it was served, or aborted for another reason."""
    reason = output["meta_info"].get("finish_reason") or {}
    bad = reason.get("type") == "abort" and int(reason.get("status_code") or 0) == 400
    return str(reason.get("message")) if bad else None


def _reason(meta: Mapping[str, Any]) -> FinishReason:
    reason = (meta.get("finish_reason") or {}).get("type")
    assert reason in ("stop", "length", "abort"), f"finish_reason {reason!r}"
    return reason


def _logprobs(meta: Mapping[str, Any], ids: NDArray[np.int64], params: SamplingParams) -> NDArray[np.float32]:
    """Return log p of each token. SGLang gives log softmax(logits / T); a greedy token has log p = 0 instead."""
    if params.temperature == 0:
        return np.zeros(len(ids), dtype=np.float32)
    rows = (meta.get("output_token_logprobs") or [])[: len(ids)]
    assert [row[1] for row in rows] == ids.tolist(), "log-probs belong to other tokens"
    return np.array([row[0] for row in rows], dtype=np.float32)


def _versions(meta: Mapping[str, Any], count: int) -> NDArray[np.int64]:
    """Return the weight version of each token, from spans; a server without spans has one version for all."""
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": count}]
    versions = np.zeros(count, dtype=np.int64)
    for span in spans:
        if not str(span["version"]).isdigit():
            raise UserError(f"a token has weight version {span['version']!r}: it must be a number, set by this job")
        versions[span["start"] :] = int(span["version"])
    return versions


def request_stats(meta: Mapping[str, Any], tokens: int, drafts: int) -> DecodeStats:
    """Return counts of all verification steps, and overlap and entropies estimated from the measured steps.

    Position k's sum is over the steps that the plugin measured and that reached it. Each counts times the number of
    steps that it represents, so that sum / reached estimates the mean. With adaptive steps ``reached`` counts shorter
    drafts as rejected. The accept length counts tokens in the completion. SGLang also counts drafts beyond its end,
    which cannot be recognised. They remain in the rates per position, as they were tested like the others.
    """
    if not drafts:
        return DecodeStats(cycles=tokens, tokens=tokens, target_forwards=tokens)
    if tokens <= 1 and not meta.get("spec_verify_ct"):  # the prefill's token, and no step yet
        return DecodeStats(tokens=tokens, prefilled=tokens)
    counts = sglang_stats({name: value for name, value in meta.items() if name != "bebop_verify"})
    if counts is None:
        return DecodeStats(tokens=tokens, prefilled=tokens)
    # SGLang's counts may go beyond the completion's end, in its last step. A prefill gives a token, and another one
    # after a retraction.
    emitted = max(0, min(counts.tokens, tokens - 1))
    counts.tokens, counts.prefilled = tokens, tokens - emitted
    counts.target_forwards, counts.draft_forwards = counts.cycles, counts.cycles * drafts
    for entry in verified_entries(meta):
        reached = min(int(entry["accepted"]) + 1, len(entry["overlap"]), len(counts.reached))
        counts.add_measured(entry, reached, entry.get("weight", 1))
    return counts


def parse_routing(meta: Mapping[str, Any], chunk: OutputChunk, routers: Routers) -> NDArray[np.int8 | np.int16] | None:
    """Return the experts [N, R, k] of all tokens read and written, with the last token's unknown.

    SGLang gives int32 [N - 1, layers, k] in base64, with rows of zeros for layers without experts. It may give nothing
    for a completion that was cut; the result is None then.

    Raises:
        UserError: A server was started without recording the experts.
    """
    if (given := meta.get("routed_experts")) is None:
        if chunk.reason == "abort":
            return None
        raise UserError("SGLang records no routing: start its servers with --enable-return-routed-experts")
    told = int(meta["prompt_tokens"]) + int(meta["completion_tokens"]) - 1
    known = int(meta["prompt_tokens"]) + len(chunk.token_ids) - 1  # fewer, if it was cut behind its end
    table = np.frombuffer(b64decode(given), dtype=np.int32).reshape(told, -1, routers.chosen)
    return of_server(table[:known], routers)


def by_role(reply: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return checksums over all ranks by role; tensors that the draft shares with the target count as the target's."""
    roles: dict[str, dict[str, str]] = {"target": {}}
    for rank, entry in enumerate(reply.get("ranks") or []):
        for name, value in entry["checksums"].items():
            draft = name.startswith("draft")
            if draft and any(shared in name for shared in SHARED):
                continue
            roles.setdefault("draft" if draft else "target", {})[f"{rank}.{name}"] = value
    return roles

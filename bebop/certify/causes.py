"""From the directions that won to what is likely wrong, in a sentence that says where to look."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bebop.certify.evidence import Evidence


@dataclass(frozen=True, slots=True)
class Cause:
    """What is likely wrong."""

    name: str  # wrong_row, draft_leak, sharpness, ...
    sentence: str


CAUSES: Mapping[str, str] = {
    "structure": "An answer breaks a rule that no sampler may break: look at what follows a stop token, at finish "
    "reasons, lengths and versions.",
    "wrong_row": "Tokens follow the row of another position: look at how verification indexes the target's rows (the "
    "bonus token comes from row K + 1), and at the slots that rows of a batch belong to.",
    "draft_leak": "Tokens lean towards the draft: look at the acceptance test and at the residual max(0, p - q), and "
    "whether q is the very distribution that drafts were drawn from, temperature and filters included.",
    "sharpness": "Tokens come from a sharper or flatter distribution: look at the temperature, where it is applied "
    "(to the target and to the draft), and at the precision of logits.",
    "truncation": "The likely or the unlikely tokens come too often: look at top-k, top-p, min-p and penalties, and at "
    "whether a default of the server adds one.",
    "stop_token": "Answers stop too often or too rarely: look at how stop tokens are filtered from drafts, suppressed "
    "by a minimum length, or forced.",
    "shared_randomness": "Tokens share their randomness with others: look at how seeds reach the slots of a batch, and "
    "at the generator's offset from one step to the next.",
    "override": "Some token comes more often than claimed, whatever the context: look at what writes tokens outside of "
    "the sampler: logit biases, forced or padding tokens, races on the output buffer.",
    "context": "Tokens follow another context than the one there is: look at the cache (rollback after a rejection, "
    "prefix reuse, evicted blocks), at position ids, and at penalties that depend on the context.",
    "reported_logprobs": "Tokens are right, but some of their log-probs are not: look at which row and which "
    "distribution the reported log-prob is taken from, for accepted, recovered and bonus tokens alike.",
    "weights": "Log-probs differ a little at most tokens, and in no simple direction: look at the weights that are "
    "loaded (version, precision, quantisation, an update that did not arrive) and at kernels of low precision.",
    "draws": "Drafts, or tokens after them, are not drawn from what verification takes them to be drawn from: look at "
    "the uniforms that verification uses twice, and at the order of draws.",
    "draft_draw": "Drafts are not drawn from the q that is recorded with them: look at temperature and filters of the "
    "draft's sampler, and at its precision.",
    "acceptance": "Drafts are accepted with another probability than min(1, p / q): look at the acceptance test, its "
    "uniforms, its rows of p and q, and at thresholds.",
    "recovered": "Tokens after a rejection do not follow the residual max(0, p - q): look at how it is made, from "
    "which rows, whether it is normalised, and at its uniform.",
    "bonus": "Tokens after a fully accepted draft do not follow the target's last row: look at the row's index.",
    "unknown": "Tokens do not follow the claimed distribution, but in no direction with a name: look at the positions "
    "that told most.",
}
"""Name -> where to look."""
# Direction, without its place in the cycle -> cause.
NAMED: Mapping[str, str] = {
    **dict.fromkeys(("row_before", "neighbour"), "wrong_row"),
    **dict.fromkeys(("hotter", "much_hotter", "colder", "much_colder"), "sharpness"),
    **dict.fromkeys(("argmax", "nucleus", "tail", "second", "uniform", "unprocessed", "pit"), "truncation"),
    **dict.fromkeys(("low_ids", "high_ids", "pit_ids"), "draws"),
    **dict.fromkeys(("stop", "no_stop", "draft_no_stop"), "stop_token"),
    **dict.fromkeys(("bigram", "seen", "unseen", "repeat", "learned_tilt"), "context"),
    **dict.fromkeys(("draft", "overlap", "residual", "draft_top", "no_draft_top", "residual_is_target"), "draft_leak"),
    **dict.fromkeys(("draft_hotter", "draft_colder", "draft_greedy", "accept_more", "accept_less"), "draft_leak"),
    **dict.fromkeys(("residual_high_ids", "residual_low_ids", "residual_unnormalised"), "draws"),
    **dict.fromkeys(("copies", "shared_uniform", "repeated_uniform", "pit_serial", "pit_rows"), "shared_randomness"),
    "ids": "override",
    "reported_hot": "sharpness",
    "reported_cold": "sharpness",
}
WHITE_BOX = ("draft_draw", "acceptance", "recovered", "bonus")  # groups of what was seen inside verification
OWN_WORD = math.log(20)  # of a sampled direction, weight included: it explains wrong log-probs, and not the reverse
VAGUE = ("tail", "uniform", "second", "much_hotter", "pit", "learned_tilt")  # tokens of whatever other distribution
FEW = 0.04  # of tokens: a wrong log-prob is an exception
FAR = 0.1  # of the evidence of log-probs that are off at all, for some that are far off
LEAN, LEAN_OF_FEW = 0.05, 0.5  # difference of evidence for log-probs too high and too low, over its sum


def cause(evidence: Sequence[Evidence], *, structure: bool = False) -> Cause:
    """What is likely wrong, given that something is; ``structure``: a rule was broken that no sampler may break.

    The strongest direction names it. Where tokens say only that they are off, and not how, reported log-probs may.
    """
    if structure:
        return _named("structure")
    if not evidence:
        return _named("unknown")
    strongest = sorted(evidence, key=lambda one: -one.merged)
    sampled = [one for one in strongest if one.group != "reported"]
    reported = [one for one in strongest if one.group == "reported"]
    clear = sampled and sampled[0].merged >= OWN_WORD
    if reported and reported[0].merged >= OWN_WORD and (not clear or _base(sampled[0]) in VAGUE):
        return _named(_of_reports(reported))
    return _named(_of_direction((sampled or reported)[0], strongest))


def _named(name: str) -> Cause:
    return Cause(name, CAUSES[name])


def _base(one: Evidence) -> str:
    """The direction without its place in the cycle."""
    return one.name.partition("@")[0]


def _of_direction(one: Evidence, all_of_them: Sequence[Evidence]) -> str:
    if one.group in WHITE_BOX:
        return one.group
    name = NAMED.get(_base(one), "unknown")
    temperature = max((other.log_e for other in all_of_them if NAMED.get(other.name) == "sharpness"), default=0.0)
    return (
        "sharpness" if one.name == "unprocessed" and temperature > one.log_e / 2 else name
    )  # a temperature not applied


def _of_reports(evidence: Sequence[Evidence]) -> str:
    """Tokens drawn from what is reported have it too high, tokens drawn from p too low; small errors are of weights.

    A distribution that was truncated in secret is higher at all that is left of it.
    """
    log_e = {one.name: max(one.log_e, 0.0) for one in evidence}
    high, low = log_e["reported_high"], log_e["reported_low"]
    if max(log_e["reported_hot"], log_e["reported_cold"]) > log_e["reported"]:
        return "sharpness"
    if low == 0 and high > log_e["reported"]:
        return "truncation"
    if log_e["reported_far"] < FAR * log_e["reported"]:
        return "weights"
    lean, share = (high - low) / max(high + low, 1.0), {one.name: one.share or 1.0 for one in evidence}["reported"]
    return "context" if lean > (LEAN_OF_FEW if share < FEW else LEAN) else "reported_logprobs"

"""From evidence to a certificate: the finding, its likely cause and advice; as JSON and as an exit code."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bebop.certify.evidence import Evidence, Visible
from bebop.command import writing
from bebop.run_dir.checkpoints import write_text

Verdict = Literal["pass", "fail", "inconclusive"]
EXIT_CODES: Mapping[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3}  # 2 is a mistake of the user's
FILE = "certificate.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Cause:
    """Likely cause of a fault."""

    name: str  # wrong_row, draft_leak, sharpness, ...
    sentence: str


class NotCertified(AssertionError):
    """Raised by ``require_pass``; its text is the certificate's sentence and advice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position with much evidence, and the text before it."""

    request: int
    position: int
    token: str
    context: str  # the end of prompt and completion before it
    gain: float  # what it added to ln E of the winning direction


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """Results at one setting of the sampling parameters."""

    name: str  # "as asked" or "stress"
    sampling: dict[str, Any]
    weight: float  # share of its evidence in the total
    answers: int
    unfinished: int  # unfinished completions, which count like the others
    tokens: int
    log_e: float
    history: tuple[tuple[int, float], ...]  # tokens, ln E
    evidence: tuple[Evidence, ...]
    visible: tuple[Visible, ...] = ()
    untested: dict[str, str] = field(default_factory=dict)  # direction -> why not
    places: tuple[Place, ...] = ()
    acceptance: float | None = None  # drafts accepted over drafts tested

    @property
    def bound(self) -> float | None:
        """Return the largest bound of the total variation per token over all directions; None: nothing is bounded."""
        bounds = [one.tv for one in self.evidence if one.tv is not None]
        return max(bounds, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a live engine samples from the distribution that it claims, as far as the examined tokens can tell."""

    verdict: Verdict
    sentence: str  # what was found
    advice: str  # what to do about it
    log_e: float  # merged evidence against the claim: ln of an e-value
    alpha: float
    limit_tv: float
    engine: dict[str, Any]
    reference: dict[str, Any]
    settings: tuple[SettingResult, ...]
    white_box: tuple[Evidence, ...] = ()
    white_box_weight: float = 0.0
    cause: Cause | None = None
    ranked: tuple[tuple[str, float], ...] = ()  # causes with ln of their likelihood, the likeliest first
    structure: tuple[str, ...] = ()  # broken rules that no sampler may break: a sentence each
    logprobs: dict[str, Any] = field(default_factory=dict)  # reported ones: mode, tolerance, largest distance
    seeds: dict[str, Any] = field(default_factory=dict)
    scope: tuple[str, ...] = ()  # faults that the examined tokens can and cannot show: a sentence each
    not_tested: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)  # versions of the software that made it

    @property
    def exit_code(self) -> int:
        """Return 0 for pass, 1 for fail and 3 for inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all settings."""
        return sum(one.tokens for one in self.settings)

    @property
    def bound(self) -> float | None:
        """Return the largest total variation per token that no setting excludes; None: nothing is bounded."""
        bounds = [one.bound for one in self.settings]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if known and len(known) == len(bounds) else None

    def require_pass(self) -> "Certificate":
        """Return the certificate; raise ``NotCertified`` unless it is a pass. Tests of other projects call it."""
        if self.verdict != "pass":
            raise NotCertified(f"{self.sentence} {self.advice}")
        return self

    def to_json(self) -> str:
        """Return the content of ``certificate.json``; values that JSON lacks (an infinite e-value) become null."""
        content = {"format": FORMAT, **_finite(dataclasses.asdict(self))}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """Write ``certificate.json`` into an existing folder, and return its path."""
        path = folder / FILE
        with writing(path):
            write_text(path, self.to_json())
        return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value


# ---- likely causes

CAUSES: Mapping[str, str] = {
    "structure": "A completion breaks a rule that no sampler may break: look at what follows a stop token, at finish "
    "reasons, lengths and versions.",
    "wrong_row": "Tokens follow the row of another position: look at how verification indexes the target's rows (the "
    "bonus token comes from row K + 1), and at the slots that rows of a batch belong to.",
    "draft_leak": "Tokens lean towards the draft: look at the acceptance test and at the residual max(0, p - q), and "
    "whether q is the very distribution that drafts were drawn from, temperature and filters included.",
    "sharpness": "Tokens come from a sharper or flatter distribution: look at the temperature, where it is applied "
    "(to the target and to the draft), and at the precision of logits.",
    "truncation": "The likely or the unlikely tokens come too often: look at top-k, top-p, min-p and penalties, and at "
    "whether a default of the server adds one.",
    "stop_token": "Completions stop too often or too rarely: look at how stop tokens are filtered from drafts, "
    "suppressed by a minimum length, or forced.",
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
    "shared_noise": "A draft, its acceptance test and the token after a rejection share their random numbers: look at "
    "the seeds, positions and streams that key the noise of each, and give every draw a stream of its own.",
    "draft_draw": "Drafts are not drawn from the q that is recorded with them: look at temperature and filters of the "
    "draft's sampler, and at its precision.",
    "acceptance": "Drafts are accepted with another probability than min(1, p / q): look at the acceptance test, its "
    "uniforms, its rows of p and q, and at thresholds.",
    "recovered": "Tokens after a rejection do not follow the residual max(0, p - q): look at how it is made, from "
    "which rows, whether it is normalised, and at its uniform.",
    "verification": "The acceptance test and the residual are both off: verification is given another p or q than the "
    "recorded ones: look at their temperature, rows, slots and cycle.",
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
    **dict.fromkeys(("bigram", "seen", "unseen", "repeat", "no_repeat", "learned_tilt"), "context"),
    **dict.fromkeys(("draft", "overlap", "residual", "draft_top", "no_draft_top", "residual_is_target"), "draft_leak"),
    **dict.fromkeys(("draft_hotter", "draft_colder", "draft_greedy", "accept_more", "accept_less"), "draft_leak"),
    "accept_or_match": "draft_leak",
    **dict.fromkeys(("residual_high_ids", "residual_low_ids", "residual_unnormalised"), "draws"),
    **dict.fromkeys(("copies", "shared_uniform", "repeated_uniform", "pit_serial", "pit_rows"), "shared_randomness"),
    "ids": "override",
    "reported_hot": "sharpness",
    "reported_cold": "sharpness",
}
WHITE_BOX = (
    "draft_draw",
    "acceptance",
    "recovered",
    "bonus",
    "shared_noise",
)  # groups of evidence from inside verification
OWN_WORD = math.log(20)  # merged evidence of a sampled direction that also explains wrong log-probs
VAGUE = ("tail", "uniform", "second", "much_hotter", "pit", "learned_tilt")  # directions that fit many faults
FEW = 0.04  # share of tokens below which wrong log-probs are exceptions
FAR = 0.1  # least evidence for log-probs far off, relative to that for log-probs off at all
FOLLOWED = 2.0  # limit of claimed over reported probability, in the mean, for tokens drawn from the reported one
PRIOR = 20.0  # a priori odds of one fault against two at once, and of a specific direction against a vague one
LEAN, LEAN_OF_FEW = 0.05, 0.5  # difference of evidence for log-probs too high and too low, over its sum


def rank_causes(
    evidence: Sequence[Evidence], *, structure: bool = False, odds: float | None = None
) -> tuple[tuple[str, float], ...]:
    """Return causes with ln of their likelihood over the claim's, the likeliest first.

    A cause is as likely as the best of its directions, each a mixture over shares. The weights of the family play no
    part: they decide which direction first proves a fault, not which one is true. Draws inside verification are
    independent. A cause of two of them has the product of both likelihoods, but is a priori less likely than either.

    Args:
        evidence: evidence of every direction, either of the tokens or of the draws inside verification.
        structure: whether a completion broke a rule that no sampler may break.
        odds: mean of claimed over reported probability where these differ, see ``Reported.odds``.
    """
    if structure:
        return (("structure", math.inf),)
    sampled = [one for one in evidence if one.group != "reported"]
    reported = [one for one in evidence if one.group == "reported"]
    found: dict[str, float] = {}
    for one in sampled:
        likely = one.log_e - (math.log(PRIOR) if _base(one) in VAGUE else 0.0)
        name = _of_direction(one, sampled)
        found[name] = max(found.get(name, -math.inf), likely)
    if min(found.get("acceptance", 0.0), found.get("recovered", 0.0)) >= OWN_WORD:
        found["verification"] = found["acceptance"] + found["recovered"] - math.log(PRIOR)
    top = max(sampled, key=lambda one: one.merged, default=None)
    clear = top is not None and top.merged >= OWN_WORD and _base(top) not in VAGUE
    best = max(reported, key=lambda one: one.merged, default=None)
    if best is not None and best.merged >= OWN_WORD and not clear:
        found[_of_reports(reported, odds)] = max([best.log_e, *found.values()])
    return tuple(sorted(found.items(), key=lambda item: -item[1]))


def cause(evidence: Sequence[Evidence], *, structure: bool = False, odds: float | None = None) -> Cause:
    """Return the likely cause of a proved fault: the first of ``rank_causes``.

    If the tokens do not point to a specific fault, reported log-probs may determine the cause.
    """
    ranked = rank_causes(evidence, structure=structure, odds=odds)
    name = ranked[0][0] if ranked else "unknown"
    return Cause(name, CAUSES[name])


def _base(one: Evidence) -> str:
    """Return the direction without its place in the cycle."""
    return one.name.partition("@")[0]


def _of_direction(one: Evidence, all_of_them: Sequence[Evidence]) -> str:
    if one.group in WHITE_BOX:
        return one.group
    name = NAMED.get(_base(one), "unknown")
    temperature = max((other.log_e for other in all_of_them if NAMED.get(other.name) == "sharpness"), default=0.0)
    return (
        "sharpness" if one.name == "unprocessed" and temperature > one.log_e / 2 else name
    )  # an unapplied temperature


def _of_reports(evidence: Sequence[Evidence], odds: float | None) -> str:
    """Return the cause that wrong log-probs point to.

    Tokens drawn from the reported distribution have too high a reported log-prob. Tokens drawn from p have too low a
    reported log-prob. Small errors come from weights. An undeclared truncation raises the probability of every token
    that is left. For tokens drawn from the reported distribution, claimed over reported probability has mean 1. A
    larger mean says that the tokens come from another distribution.
    """
    log_e = {one.name: max(one.log_e, 0.0) for one in evidence}
    high, low = log_e["reported_high"], log_e["reported_low"]
    if max(log_e["reported_hot"], log_e["reported_cold"]) > log_e["reported"]:
        return "sharpness"
    if low == 0 and high > log_e["reported"]:
        return "truncation"
    if log_e["reported_far"] < FAR * log_e["reported"]:
        return "weights"
    if odds is not None and odds > FOLLOWED:
        return "reported_logprobs"
    lean, share = (high - low) / max(high + low, 1.0), {one.name: one.share or 1.0 for one in evidence}["reported"]
    return "context" if lean > (LEAN_OF_FEW if share < FEW else LEAN) else "reported_logprobs"


# ---- the verdict

LATE = 4  # directions to name among those that need more tokens
LOW_ACCEPTANCE = 0.2  # of tested drafts; below, drafting costs more than it gives


def merged(parts: Sequence[tuple[float, float]]) -> float:
    """Return ln of the weighted sum of e-values, given (weight, ln e) with weights that add up to at most 1."""
    if sum(weight for weight, _ in parts) > 1 + 1e-9:
        raise ValueError("weights of e-values may not add up to more than 1")
    logs = [math.log(weight) + log_e for weight, log_e in parts if weight > 0]
    top = max(logs, default=-math.inf)
    return top + math.log(sum(math.exp(one - top) for one in logs)) if math.isfinite(top) else top


def decide(
    log_e: float, alpha: float, limit_tv: float, structure: Sequence[str], bounds: Sequence[float | None]
) -> Verdict:
    """Return ``fail`` at ln E >= ln 1/alpha, or if a completion broke a rule that no sampler may break.

    Return ``pass`` only if all bounds lie below the limit: a lack of evidence against the claim is not evidence for it.
    """
    if structure or log_e >= math.log(1 / alpha):
        return "fail"
    known = [bound for bound in bounds if bound is not None]
    return "pass" if known and len(known) == len(bounds) and max(known) < limit_tv else "inconclusive"


def words(
    verdict: Verdict,
    *,
    engine: str,
    tokens: int,
    log_e: float,
    bound: float | None,
    limit_tv: float,
    cause: Cause | None,
    structure: Sequence[str],
    referenced: bool,
    complete: bool = True,
) -> tuple[str, str]:
    """Return the certificate's sentence (the finding) and its advice."""
    if verdict == "fail":
        return _failed(engine, tokens, log_e, cause, structure)
    if verdict == "pass":
        assert bound is not None
        return (
            f"Pass: the {engine} engine samples from the distribution that it claims, as far as {tokens:,} tokens can "
            f"tell: every fault that was looked for moves less than {share(bound)} of the probability of a token "
            f"(limit {share(limit_tv)}).",
            "Nothing is to be done; certify again after a change of engine, version, kernels or sampling settings.",
        )
    nothing = f"Inconclusive: {tokens:,} tokens show nothing against the {engine} engine"
    if not complete:
        return f"{nothing}, but it ended before every setting was examined.", "Let it run to its end."
    if not referenced or bound is None:
        return (
            f"{nothing}, but without a reference nothing bounds a fault that was not seen.",
            "Give reference=model with the checkpoint in model.path, or reference=server.",
        )
    need = max(tokens + 1, int(tokens * bound / limit_tv))
    digits = 10 ** max(0, len(str(need)) - 2)
    return (
        f"{nothing}, but they do not exclude faults that move up to {share(bound)} of the probability of a token "
        f"(limit {share(limit_tv)}).",
        f"Ask for more: about {math.ceil(need / digits) * digits:,} tokens in all, or raise limit_tv.",
    )


def _failed(engine: str, tokens: int, log_e: float, cause: Cause | None, structure: Sequence[str]) -> tuple[str, str]:
    if structure:
        more = f" ({len(structure) - 1} more like it)" if len(structure) > 1 else ""
        found = f"Fail: the {engine} engine breaks a rule that no sampler may break: {structure[0]}{more}."
    else:
        found = (
            f"Fail: the {engine} engine does not sample from the distribution that it claims: after {tokens:,} tokens "
            f"the odds against it are 10^{log_e / math.log(10):.0f} to 1."
        )
    advice = cause.sentence if cause is not None else "Look at the completions in the list of structural faults."
    return found, advice


def share(value: float) -> str:
    """Return a probability in per cent, with two significant digits."""
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def scope(settings: Sequence[SettingResult], limit_tv: float) -> tuple[str, ...]:
    """Return a sentence for each setting: the smallest fault that its tokens show, and which directions need more."""
    found = []
    for one in settings:
        if not one.visible:
            continue
        seen = [each for each in one.visible if each.share < 1]
        hardest = max(seen, key=lambda each: each.tv, default=None)
        line = f"{one.name}: {one.tokens:,} tokens would show nothing nine times in ten"
        if hardest is not None:
            line = (
                f"{one.name}: {one.tokens:,} tokens show nine times in ten a fault in any of {len(seen)} directions "
                f"that moves {share(hardest.tv)} of a token's probability; {hardest.name} is the hardest"
            )
        late = sorted((each.needs, each.name) for each in one.visible if (each.needs or 0) > one.tokens)
        if late:
            line += (
                f". To show {share(limit_tv)} takes a longer run in {len(late)} directions, up to {late[-1][0]:,} "
                f"tokens ({', '.join(name for _, name in late[: -LATE - 1 : -1])})"
            )
        found.append(f"{line}.")
    return tuple(found)


def warnings_of(settings: Sequence[SettingResult]) -> tuple[str, ...]:
    """Return warnings about conditions that are no fault of the distribution."""
    found = []
    for one in settings:
        if one.acceptance is not None and one.acceptance < LOW_ACCEPTANCE:
            found.append(
                f"{one.name}: {share(one.acceptance)} of the drafts are accepted: completions are right, but the draft "
                "head may be zeroed, stale or another model's, and drafting costs more than it gives"
            )
        if one.unfinished:
            found.append(f"{one.name}: {one.unfinished} completions did not end and count as far as they went")
    return tuple(found)

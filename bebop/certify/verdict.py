"""From evidence to a verdict, in two sentences: what was found, and what to do."""

import math
from collections.abc import Sequence

from bebop.certify.causes import Cause
from bebop.certify.certificate import SettingResult, Verdict

LOW_ACCEPTANCE = 0.2  # of tested drafts; below, drafting costs more than it gives


def merged(parts: Sequence[tuple[float, float]]) -> float:
    """ln of the weighted sum of e-values, given (weight, ln e) with weights that add up to at most 1."""
    if sum(weight for weight, _ in parts) > 1 + 1e-9:
        raise ValueError("weights of e-values may not add up to more than 1")
    logs = [math.log(weight) + log_e for weight, log_e in parts if weight > 0]
    top = max(logs, default=-math.inf)
    return top + math.log(sum(math.exp(one - top) for one in logs)) if math.isfinite(top) else top


def decide(
    log_e: float, alpha: float, limit_tv: float, structure: Sequence[str], bounds: Sequence[float | None]
) -> Verdict:
    """``fail`` at ln E >= ln 1/alpha or where a rule was broken that no sampler may break; ``pass`` only if all bounds
    lie below the limit: no evidence against is not evidence for."""
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
    """What was found, and what to do about it."""
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
    advice = cause.sentence if cause is not None else "Look at the answers in the list of structural faults."
    return found, advice


def share(value: float) -> str:
    """A probability in per cent, with two digits that mean something."""
    return f"{100 * value:.0f} %" if value >= 0.0995 else f"{100 * value:.2g} %"


def warnings_of(settings: Sequence[SettingResult]) -> tuple[str, ...]:
    """What is no fault of the distribution, and yet worth a line."""
    found = []
    for one in settings:
        if one.acceptance is not None and one.acceptance < LOW_ACCEPTANCE:
            found.append(
                f"{one.name}: {share(one.acceptance)} of the drafts are accepted: answers are right, but the draft "
                "head may be zeroed, stale or another model's, and drafting costs more than it gives"
            )
        if one.unfinished:
            found.append(f"{one.name}: {one.unfinished} answers did not end and count as far as they went")
    return tuple(found)

"""Checks vLLM by its own completions before the first prompt, since it fails silently.

Parameters of sampling may not arrive where drafts are verified (vllm#55005), draft distributions may not take part,
and a head may draft nothing.
"""

from collections.abc import Mapping
from math import inf
from typing import Any

from bebop.errors import UserError
from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.plugin import Verified
from bebop.rollout.vllm.suffixes import Suffixes
from bebop.trajectory import SamplingParams

PROMPT = (1, 2, 3, 1, 2, 3, 1, 2)  # with something to look up
TOP = 4  # tokens of a place whose log-probs are compared
# Of completions that are decoded side by side and end one after another: where parameters are not written to the memory
# that is read, that of the step before may hold those of the same rows.
TEMPERATURES = (0.5, 2.0, 2.0, 0.5, 0.5, 2.0)
CYCLES = (2, 3, 4, 5, 6, 7)
TOLERANCE = 0.1  # of the slope; half precision moves it by some hundredths
FLAT = 1e-6  # squares of differences that say nothing of a temperature
Row = Mapping[int, Any]  # token -> vLLM's Logprob


def self_test(core: Core, *, sampled: bool) -> None:
    """Raise ``UserError`` if something does not work; ``sampled``: drafts are to be draws from their distributions."""
    answers, seen = _answers(core)
    for temperature in sorted(set(TEMPERATURES)):
        found = [slope(rows, _scored(core, ids)) for t, ids, rows in answers if t == temperature]
        products, squares = sum(a for a, _ in found), sum(b for _, b in found)
        inverse = products / max(squares, FLAT)
        if squares > FLAT and not abs(temperature * inverse - 1) <= TOLERANCE:  # NaN is no temperature either
            raise UserError(
                f"vLLM decodes as if temperature={temperature} were {1 / inverse if inverse else inf:.3g}: sampling "
                "parameters do not arrive in this version; see docs/upstream.md"
            )
    if not core.drafts:
        return
    if core.past is not None:
        if not _accepted_drafts_of_past(core, core.past):
            raise UserError("vLLM drafts nothing of a past completion that it was told; use rollout=torch")
    elif not seen:
        raise UserError("vLLM verified no draft: the checkpoint's head does not draft there; use rollout=torch")
    if sampled and not all(one.sampled for one in seen):
        raise UserError("vLLM verifies drafts without the distributions they were drawn from; use rollout=torch")


def _answers(core: Core) -> tuple[list[tuple[float, list[int], list[Row]]], list[Verified]]:
    """Return temperature, tokens and log-probs of some completions, and the steps in which drafts were verified."""
    most, open_, seen = core.arguments["max_model_len"] - len(PROMPT) - 1, {}, list[Verified]()
    for temperature, cycles in zip(TEMPERATURES, CYCLES, strict=True):
        fresh = min(cycles * (core.drafts + 1), most)
        params = SamplingParams(temperature=temperature, max_new_tokens=fresh)
        open_[core.add(PROMPT, params, fresh, logprobs=TOP)] = (temperature, list[int](), list[Row]())
    waiting = set(open_)
    while waiting:
        outputs, steps = core.outputs()
        seen += steps.values()
        for output in outputs:
            _, ids, rows = open_[output.request_id]
            ids += output.outputs[0].token_ids
            rows += output.outputs[0].logprobs
            if output.finished:
                waiting.discard(output.request_id)
    for key in open_:
        core.abort(key)  # it has ended: forget it
    return list(open_.values()), seen


def _accepted_drafts_of_past(core: Core, past: Suffixes) -> int:
    """Return the drafts accepted in a greedy completion that was told before; none of the test's is kept."""
    past.clear()
    ids, _ = _greedy(core)
    past.clear()
    past.remember(PROMPT, [ids])
    _, accepted = _greedy(core)
    past.clear()
    return accepted


def _greedy(core: Core) -> tuple[list[int], int]:
    """Return a greedy completion, and how many drafts were accepted."""
    fresh = min(core.drafts + 2, core.arguments["max_model_len"] - len(PROMPT) - 1)
    key, ids, accepted = core.add(PROMPT, SamplingParams(temperature=0, max_new_tokens=fresh), fresh), list[int](), 0
    while len(ids) < fresh:
        outputs, steps = core.outputs()
        ids += [token for output in outputs for token in output.outputs[0].token_ids]
        accepted += sum(one.accepted for one in steps.values())
    core.abort(key)  # it has ended: forget it
    return ids, accepted


def _scored(core: Core, ids: list[int]) -> list[Row]:
    """Return log-probs of the same places without temperature, from a prefill."""
    key = core.add([*PROMPT, *ids], SamplingParams(max_new_tokens=1), 1, prompt_logprobs=TOP)
    rows: list[Row] = []
    while not rows:
        for output in core.outputs()[0]:
            rows = list(output.prompt_logprobs or [])[len(PROMPT) :]
    core.abort(key)
    return rows


def slope(rows: list[Row], plain: list[Row]) -> tuple[float, float]:
    """Return sums of products and of squares, whose ratio is 1 / temperature: differences of log-probs within a place
    are those of the plain ones, divided by it."""
    products = squares = 0.0
    for hot, cold in zip(rows, plain, strict=True):
        first, *rest = sorted(set(hot) & set(cold))
        for token in rest:
            change = cold[token].logprob - cold[first].logprob
            products += change * (hot[token].logprob - hot[first].logprob)
            squares += change * change
    return products, squares

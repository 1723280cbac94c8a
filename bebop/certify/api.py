"""A certificate from one function call, for the tests of other projects with any engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Answer, Block, make_block, seen
from bebop.certify.certificate import Certificate
from bebop.certify.declared import Rule, known_rule
from bebop.certify.function import FunctionEngine, Sample
from bebop.certify.model_reference import COLUMNS, claimed, narrowed
from bebop.certify.run import Plan, Run, plan_settings
from bebop.certify.white_box import WhiteBox
from bebop.errors import UserError
from bebop.trajectory import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cycle:
    """One decoding cycle of a completion: ``Cycle(tokens=[4, 7, 1], accepted=1, q=q)`` emits token 4 and one more."""

    tokens: Sequence[int]  # [K] drafts, in their order; K may be 0
    accepted: int  # number of accepted drafts, before a stop token or the limit cuts the completion
    q: Tensor | NDArray[Any] | None = None  # [K, V] distribution of each draft, fully processed; None: not sampled


# (prompt [P], completion [T]) -> logits [T, V] that each token of the completion was drawn under, teacher-forced.
Score = Callable[[Sequence[int], Sequence[int]], Tensor | NDArray[Any]]
# (prompt [P], seed, completion [T]) -> the cycles that wrote the completion, in their order.
Drafts = Callable[[Sequence[int], int, Sequence[int]], Sequence[Cycle]]
MASS = 1e-3  # allowed error of q's sum: more than rounding of half precision, less than logits would show


def certify(
    sample: Sample,
    score: Score | None,
    prompts: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    draft: Drafts | None = None,
    rule: Rule = "rejection",
    params: SamplingParams | None = None,
    tokens: int = 20_000,
    **options: Any,
) -> Certificate:
    """Certify that ``sample`` draws from the distribution that ``score`` gives at these sampling parameters.

    With ``draft`` it also bets on the draws inside verification. p comes from ``score``, and q comes from the engine.

    Args:
        sample: (prompts, seeds, max_new_tokens) -> a completion each, (token ids, log-probs or None). A stop token is
            the last token of a completion.
        score: (prompt, completion) -> logits [T, V] before temperature and truncation; None: no reference, so no pass.
        prompts: token ids; they repeat with other seeds once all have been used.
        vocabulary: V.
        draft: (prompt, seed, completion) -> its decoding cycles; called once for each completion after ``sample`` has
            returned a cohort. None: draws inside verification are not tested.
        rule: the rule that judges drafts. ``rejection`` accepts each with min(1, p / q), and ``one_hot`` treats each as
            a one-hot draft. ``whole`` judges a cycle at once, as block verification does; then only the draws and the
            bonus token can be tested.
        params: the claim: temperature, truncation, ``max_new_tokens``, ``stop_token_ids``; None: the defaults.
        tokens: number of completion tokens at which the run ends.
        options: further fields of ``Plan``: ``alpha``, ``limit_tv``, ``logprobs``, ``dtype``, ``cohort``, ``seed``,
            ``stop_when_found``, ``progress``.

    Raises:
        ValueError: ``prompts`` is empty, or ``score`` gives other shapes.
        UserError: ``sample`` gives no completions, ``draft`` no cycles that write them, or ``rule`` is unknown.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    known_rule(rule)
    if draft is not None and score is None:
        raise UserError("draft needs score: draws inside verification are held against its distributions")
    params = params or SamplingParams()
    settings, weight = plan_settings(params, 0.0, draft is not None)
    plan = Plan(settings=settings, white_box_weight=weight, vocabulary=vocabulary, tokens=tokens, **options)
    inside = None if draft is None else Inside(draft, rule, WhiteBox(plan.alpha), params.stop_token_ids)
    reference = None if score is None else ScoreReference(score, inside)
    engine = FunctionEngine(sample, white_box=None if inside is None else inside.box)
    return Run(engine, reference, lambda i: prompts[i % len(prompts)], plan).run()


class ScoreReference:
    """A ``Reference`` whose logits come from a function."""

    name = "function"

    def __init__(self, score: Score, inside: "Inside | None" = None) -> None:
        """Store the function; ``inside`` receives every completion with its distributions."""
        self.score, self.inside = score, inside

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"function": getattr(self.score, "__qualname__", repr(self.score))}

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of a cohort."""
        answers = [answer for answer in answers if len(answer.token_ids)]
        parts = [self._rows(answer, params) for answer in answers]
        if self.inside is not None:
            looks = [self.inside.look(answer, part["probs"]) for answer, part in zip(answers, parts, strict=True)]
            answers = [replace(answer, cycles=emitted) for answer, (emitted, _) in zip(answers, looks, strict=True)]
            parts = [part | {"draft": q} for part, (_, q) in zip(parts, looks, strict=True)]
        vocabulary = parts[0]["probs"].shape[1] if parts else 1
        fields = [{**narrowed(part, part["cells"], COLUMNS), "near": part["near"]} for part in parts]
        return make_block(answers, fields, vocabulary)

    def _rows(self, answer: Answer, params: SamplingParams) -> dict[str, Tensor]:
        logits, tokens = self._logits(answer), torch.from_numpy(answer.token_ids)
        written = seen([answer], None, logits.shape[1]) if params.repetition_penalty != 1 else None
        probs, near = claimed(logits, params, written)
        rows = {
            "probs": probs,
            "before": torch.cat([probs[:1], probs[:-1]]),  # before the first token there is no row
            "cells": tokens,
            "near": near,
            "logprobs": probs.gather(1, tokens[:, None])[:, 0].log(),
        }
        return rows if params.temperature == 1 and not params.truncated else rows | {"raw": logits.softmax(-1)}

    def _logits(self, answer: Answer) -> Tensor:
        """Return logits [T, V]; raise ``ValueError`` if there are not as many rows as tokens."""
        ids = answer.token_ids.tolist()
        rows = _table(self.score(answer.prompt, ids))
        if rows.ndim != 2 or len(rows) != len(ids):
            raise ValueError(f"score gave {tuple(rows.shape)} for a completion of {len(ids)} tokens: [T, V] is wanted")
        return rows


class Inside:
    """Passes the decoding cycles of completions to a white box, with p from a reference.

    It tests only draws whose outcome the completion shows: p is unknown for drafts behind a rejection, and behind a
    token that ends the completion. Whether it tests a draw depends only on earlier draws, so bets on the draw are fair.
    """

    def __init__(self, draft: Drafts, rule: Rule, box: WhiteBox, stops: Sequence[int]) -> None:
        self.draft, self.rule, self.box, self.stops = draft, rule, box, stops

    def look(self, answer: Answer, probs: Tensor) -> tuple[tuple[int, ...], Tensor]:
        """Test the draws of a completion, whose distributions are ``probs`` [T, V].

        Returns the number of tokens that each cycle emitted, and the distribution [T, V] of each token's draft. Tokens
        without a draft have their row of ``probs`` there.
        """
        cycles, ids = self._cycles(answer), torch.from_numpy(answer.token_ids)
        widest = max(len(one.tokens) for one in cycles)
        tokens = torch.zeros(len(cycles), widest, dtype=torch.long)
        q = torch.zeros(len(cycles), widest, probs.shape[1], dtype=torch.float64)
        emitted, outcomes, drawn, start, whole = [], [], probs.clone(), 0, self.rule == "whole"
        for i, one in enumerate(cycles):
            drafts, there = len(one.tokens), len(ids) - start
            tokens[i, :drafts] = torch.as_tensor(list(one.tokens), dtype=torch.long)
            q[i, :drafts] = self._drawn(one, tokens[i, :drafts], probs.shape[1])
            emitted.append(min(one.accepted + 1, there))
            own = min(drafts, emitted[-1])
            drawn[start : start + own] = q[i, :own]
            if there <= one.accepted:  # the last token is a draft, and of the rest of the cycle nothing is known
                outcomes.append((start, there, drafts if whole else there, -1))
            else:
                outcomes.append((start, one.accepted, drafts, int(ids[start + one.accepted])))
            start += emitted[-1]
        starts, accepted, lengths, following = torch.tensor(outcomes).unbind(1)
        p = probs[(starts[:, None] + torch.arange(widest + 1)).clamp_max(len(ids) - 1)]
        if whole:
            # All drafts of the cycle decide how many stand, and p comes from the resulting completion. A bet on a
            # draft may not depend on that draft: only p of the first one is known beforehand.
            later = (torch.arange(widest + 1) > 0) & (torch.arange(widest + 1) < lengths[:, None])
            p[:, :widest][later[:, :widest]] = q[later[:, :widest]]
        sampled = any(one.q is not None for one in cycles)
        self.box.update(
            tokens, q if sampled else None, p, accepted, following, lengths, self.stops,
            stepwise=not whole, one_hot=self.rule == "one_hot", reached_only=not whole,
        )  # fmt: skip
        return tuple(emitted), drawn

    def _cycles(self, answer: Answer) -> list[Cycle]:
        """Return the cycles of a completion; raise ``UserError`` if they do not write it."""
        ids = answer.token_ids.tolist()
        cycles, start = list(self.draft(answer.prompt, answer.seed or 0, ids)), 0
        for i, one in enumerate(cycles):
            stands = [int(token) for token in one.tokens[: one.accepted]][: len(ids) - start]
            if (
                not 0 <= one.accepted <= len(one.tokens)
                or start >= len(ids)
                or ids[start : start + len(stands)] != stands
            ):
                raise UserError(
                    f"draft gave cycle {i} with {one.accepted} of the drafts {list(one.tokens)} accepted, which does "
                    f"not write token {start} of {len(ids)} and those that follow: {ids[start : start + 8]}"
                )
            start += one.accepted + 1
        if start < len(ids):
            raise UserError(f"draft gave cycles of {start} tokens for a completion of {len(ids)}: give all of them")
        if len({one.q is None for one in cycles if len(one.tokens)}) == 2:
            raise UserError("draft gave q for some cycles of a completion and none for others: give all or none")
        return cycles

    def _drawn(self, one: Cycle, tokens: Tensor, vocabulary: int) -> Tensor:
        """Return q [K, V] of a cycle, one-hot where drafts are not sampled.

        Raises:
            UserError: Drafts or q are invalid.
        """
        if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
            raise UserError(f"draft gave the drafts {tokens.tolist()}: token ids go from 0 to {vocabulary - 1}")
        if one.q is None:
            return torch.nn.functional.one_hot(tokens, vocabulary).double()
        q = _table(one.q)
        if q.shape != (len(tokens), vocabulary):
            raise UserError(
                f"draft gave q of shape {tuple(q.shape)}: give [{len(tokens)}, {vocabulary}], a row a draft"
            )
        total = q.sum(-1, keepdim=True)
        if not bool((q >= 0).all() and ((total - 1).abs() < MASS).all()):
            raise UserError(f"draft gave q with rows of sum {total.flatten().tolist()}: give distributions, not logits")
        return q / total


def _table(given: Tensor | NDArray[Any]) -> Tensor:
    """Return a tensor of any type and device, or an array, as a table in fp64 on the CPU."""
    return (given.detach() if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))).cpu().double()

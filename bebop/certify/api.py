"""A certificate in a call: for the tests of other projects, whatever their engine is."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Answer, Block, make_block, seen
from bebop.certify.certificate import Certificate
from bebop.certify.function import FunctionEngine, Sample
from bebop.certify.model_reference import processed
from bebop.certify.run import Plan, Run, Setting
from bebop.trajectory import SamplingParams

# (prompt [P], completion [T]) -> logits [T, V] that each token of the completion was drawn under, teacher-forced.
Score = Callable[[Sequence[int], Sequence[int]], Tensor | NDArray[Any]]


def certify(
    sample: Sample,
    score: Score | None,
    prompts: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    params: SamplingParams | None = None,
    tokens: int = 20_000,
    **options: Any,
) -> Certificate:
    """Certify that ``sample`` draws from the distribution that ``score`` gives at these sampling parameters.

    Args:
        sample: (prompts, seeds, max_new_tokens) -> a completion each, (token ids, log-probs or None); a stop token is
            its last.
        score: (prompt, completion) -> logits [T, V] before temperature and truncation; None: no reference, so no pass.
        prompts: token ids; asked again, with other seeds, when there are no more.
        vocabulary: V.
        params: the claim: temperature, truncation, ``max_new_tokens``, ``stop_token_ids``; None: the defaults.
        tokens: of completions, at which it ends.
        options: further fields of ``Plan``: ``alpha``, ``limit_tv``, ``logprobs``, ``dtype``, ``cohort``, ``seed``,
            ``stop_when_found``, ``progress``.

    Raises:
        ValueError: ``prompts`` is empty, or ``score`` gives other shapes.
        UserError: ``sample`` gives no completions.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    setting = Setting(name="as asked", params=params or SamplingParams(), weight=1.0)
    plan = Plan(settings=(setting,), white_box_weight=0.0, vocabulary=vocabulary, tokens=tokens, **options)
    reference = None if score is None else ScoreReference(score)
    return Run(FunctionEngine(sample), reference, lambda i: prompts[i % len(prompts)], plan).run()


class ScoreReference:
    """A ``Reference`` made of a function that gives logits."""

    name = "function"

    def __init__(self, score: Score) -> None:
        self.score = score

    def describe(self) -> dict[str, Any]:
        """Return the function's name."""
        return {"function": getattr(self.score, "__qualname__", repr(self.score))}

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position of a cohort."""
        answers = [answer for answer in answers if len(answer.token_ids)]
        parts = [self._rows(answer, params) for answer in answers]
        return make_block(answers, parts, parts[0]["probs"].shape[1] if parts else 1)

    def _rows(self, answer: Answer, params: SamplingParams) -> dict[str, Tensor]:
        logits, tokens = self._logits(answer), torch.from_numpy(answer.token_ids)
        written = seen([answer], None, logits.shape[1]) if params.repetition_penalty != 1 else None
        probs = processed(logits, params, written)
        rows = {
            "probs": probs,
            "before": torch.cat([probs[:1], probs[:-1]]),  # before the first token there is no row
            "cells": tokens,
            "logprobs": probs.gather(1, tokens[:, None])[:, 0].log(),
        }
        return rows if params.temperature == 1 and not params.truncated else rows | {"raw": logits.softmax(-1)}

    def _logits(self, answer: Answer) -> Tensor:
        """Return logits [T, V]; raise ``ValueError`` if there are not as many rows as tokens."""
        ids = answer.token_ids.tolist()
        rows = torch.as_tensor(np.asarray(self.score(answer.prompt, ids))).double()
        if rows.ndim != 2 or len(rows) != len(ids):
            raise ValueError(f"score gave {tuple(rows.shape)} for a completion of {len(ids)} tokens: [T, V] is wanted")
        return rows

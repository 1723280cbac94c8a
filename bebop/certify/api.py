"""A certificate in a call: for the tests of other projects, whatever their engine is."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Answer, Block
from bebop.certify.certificate import Certificate
from bebop.certify.columns import columns, seen
from bebop.certify.function import FunctionEngine, Sample
from bebop.certify.model_reference import processed
from bebop.certify.plan import Plan, Setting
from bebop.certify.run import Run
from bebop.config_certify import LogprobMode
from bebop.trajectory import SamplingParams

# (prompt [P], answer [T]) -> logits [T, V] that each token of the answer was drawn under, teacher-forced.
Score = Callable[[Sequence[int], Sequence[int]], Tensor | NDArray[Any]]


def certify(
    sample: Sample,
    score: Score | None,
    prompts: Sequence[Sequence[int]],
    *,
    vocabulary: int,
    stops: Sequence[int] = (),
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    logprobs: LogprobMode = "auto",
    tokens: int = 20_000,
    cohort: int = 16,
    alpha: float = 1e-4,
    limit_tv: float = 0.01,
    dtype: str = "float32",
    seed: int = 0,
    stop_when_found: bool = True,
    progress: bool = False,
) -> Certificate:
    """Does ``sample`` draw from the distribution that ``score`` gives, at these sampling parameters?

    Args:
        sample: (prompts, seeds, max_new_tokens) -> an answer each, (token ids, log-probs or None); a stop token is
            its last.
        score: (prompt, answer) -> logits [T, V] before temperature and truncation; None: no reference, so no pass.
        prompts: token ids; asked again, with other seeds, when there are no more.
        vocabulary: V.
        stops: tokens that end an answer.
        max_new_tokens: the longest answer.
        temperature: with top_k, top_p, min_p and repetition_penalty the claim, see ``SamplingParams``.
        top_k: 0: all.
        top_p: 1: all.
        min_p: 0: all.
        repetition_penalty: 1: none.
        logprobs: what reported log-probs are of: raw, temperature, processed, none, or auto (found out).
        tokens: of answers, at which it ends.
        cohort: requests asked at once, an even number: two of a prompt.
        alpha: chance of a false alarm.
        limit_tv: largest total variation a token that passes.
        dtype: the engine's precision, float32 or bfloat16: how far log-probs may be off.
        seed: of the answers.
        stop_when_found: end as soon as a fault is proved.
        progress: show a progress bar.
    """
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(stops),
    )
    plan = Plan(
        settings=(Setting(name="as asked", params=params, weight=1.0),),
        white_box_weight=0.0,
        vocabulary=vocabulary,
        tokens=tokens,
        cohort=cohort,
        alpha=alpha,
        limit_tv=limit_tv,
        logprobs=logprobs,
        dtype=dtype,
        seed=seed,
        stop_when_found=stop_when_found,
        progress=progress,
    )
    reference = None if score is None else ScoreReference(score)
    return Run(FunctionEngine(sample), reference, lambda i: prompts[i % len(prompts)], plan).run()


class ScoreReference:
    """A ``Reference`` made of a function that gives logits."""

    name = "function"

    def __init__(self, score: Score) -> None:
        self.score = score

    def describe(self) -> dict[str, Any]:
        """See ``Reference``."""
        return {"function": getattr(self.score, "__qualname__", repr(self.score))}

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """See ``Reference``."""
        answers = [answer for answer in answers if len(answer.token_ids)]
        parts: dict[str, list[Tensor]] = {"probs": [], "before": [], "raw": []}
        for answer in answers:
            logits = self._logits(answer)
            written = seen([answer], None, logits.shape[1]) if params.repetition_penalty != 1 else None
            probs = processed(logits, params, written)
            parts["probs"].append(probs)
            parts["before"].append(torch.cat([probs[:1], probs[:-1]]))  # of the first token nobody has been asked
            parts["raw"].append(logits.softmax(-1))
        if params.temperature == 1 and not params.truncated:
            del parts["raw"]
        rows = {name: torch.cat(part) if part else torch.zeros(0, 1).double() for name, part in parts.items()}
        shared: dict[str, Any] = columns(answers)
        tokens = shared["tokens"]
        return Block(
            **shared,
            **rows,
            cells=tokens,
            logprobs=rows["probs"].gather(1, tokens[:, None])[:, 0].log(),
            stops=params.stop_token_ids,
            seen=seen(answers, None, rows["probs"].shape[1]),
        )

    def _logits(self, answer: Answer) -> Tensor:
        """[T, V]; ``ValueError`` if there are not as many rows as tokens."""
        ids = answer.token_ids.tolist()
        rows = torch.as_tensor(np.asarray(self.score(answer.prompt, ids))).double()
        if rows.ndim != 2 or len(rows) != len(ids):
            raise ValueError(f"score gave {tuple(rows.shape)} for an answer of {len(ids)} tokens: [T, V] is wanted")
        return rows

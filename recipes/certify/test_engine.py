"""Test of your own sampler: a correct one is certified, a faulty one is not.

Replace ``sample`` and ``logits`` by those of your engine.
"""

from collections.abc import Sequence

import numpy as np

from bebop.certify import certify
from bebop.trajectory import SamplingParams

VOCABULARY, STOP = 16, 0
TABLE = np.random.default_rng(0).normal(scale=1.5, size=(VOCABULARY, VOCABULARY))  # a model: logits by the last token
PROMPTS = [[i] for i in range(1, VOCABULARY)]
CLAIM = SamplingParams(temperature=1.0, max_new_tokens=64, stop_token_ids=(STOP,))


def logits(prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    """Return the logits [T, V] from which each token of the completion was sampled."""
    return TABLE[[prompt[-1], *answer[:-1]]]


def sample(
    prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_new_tokens: int, temperature: float = 1.0
) -> list[tuple[list[int], list[float]]]:
    """Return one completion per prompt, with the log-probs of its tokens; a ``temperature`` other than 1 is a fault."""
    answers = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        rng, ids, logprobs = np.random.default_rng(seed), [prompt[-1]], []
        while len(ids) <= max_new_tokens and (ids[-1] != STOP or len(ids) == 1):
            claimed, drawn = (np.exp(TABLE[ids[-1]] / t) for t in (1.0, temperature))
            token = int(rng.choice(VOCABULARY, p=drawn / drawn.sum()))
            ids.append(token)
            logprobs.append(float(np.log(claimed[token] / claimed.sum())))
        answers.append((ids[1:], logprobs))
    return answers


def test_the_engine_is_certified() -> None:
    """Certify the engine in one line; anything but a pass raises."""
    certify(sample, logits, PROMPTS, vocabulary=VOCABULARY, params=CLAIM).require_pass()


def test_an_engine_that_is_five_per_cent_too_hot_is_not() -> None:
    """Sample at temperature 1.05 and claim temperature 1: the certificate must fail."""

    def hot(prompts: Sequence[Sequence[int]], seeds: Sequence[int], most: int) -> list[tuple[list[int], list[float]]]:
        return sample(prompts, seeds, most, temperature=1.05)

    certificate = certify(hot, logits, PROMPTS, vocabulary=VOCABULARY, params=CLAIM)
    assert certificate.verdict == "fail" and "temperature" in certificate.advice, certificate.sentence

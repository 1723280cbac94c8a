"""Where answers end: what counts of the last cycle, why it ended, and who comes next."""

import numpy as np
import torch

from bebop.config import DecodingConfig
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import bare_policy, requests


def engine(slots: int = 50, seed: int = 1) -> TorchEngine:
    policy = bare_policy(seed=seed)
    return TorchEngine(policy, DecodingConfig(draft_tokens=3), slots=slots, max_length=64)


def test_drafts_after_the_end_of_an_answer_do_not_count() -> None:
    """Answers of one token: of three drafts the first at most was part of the answer, whatever was accepted."""
    long = generate(engine(), requests([[1, 2, 3]] * 50, max_new_tokens=12))
    assert sum(answer.stats.accepted[1] for answer in long) > 20  # later drafts do stand, where there is room
    for answer in generate(engine(), requests([[1, 2, 3]] * 50, max_new_tokens=1)):
        assert len(answer.token_ids) == 1 and answer.stats.cycles == 1
        for name in ("reached", "accepted", "overlap", "target_entropy"):
            assert not getattr(answer.stats, name)[1:].any(), name


def test_a_stop_token_cuts_statistics_as_the_limit_does() -> None:
    stop = 5
    for answer in generate(engine(), requests([[1, 2, 3]] * 50, max_new_tokens=40, stop_token_ids=(stop,))):
        ids = answer.token_ids.tolist()
        assert ids.count(stop) == (ids[-1] == stop) and len(ids) <= 40
        assert answer.finish_reason == ("stop" if ids[-1] == stop else "length")
        assert answer.stats.reached.sum() <= len(ids) == answer.stats.tokens


def test_the_queue_is_first_come_first_served() -> None:
    """With one slot answers end in the order in which they were asked for."""
    one = engine(slots=1)
    for request in requests([[1], [2], [3], [4]], max_new_tokens=3):
        one.add(request)
    order = []
    while one.unfinished:
        order += [finished.id for finished in one.step()]
    assert order == [0, 1, 2, 3]


def test_distributions_of_bfloat16_logits_are_single_precision() -> None:
    """A softmax in bfloat16 would be off by a hundredth in places, and so would every log-prob."""
    logits = (4 * torch.randn(50, 1, 300, generator=torch.Generator().manual_seed(0))).bfloat16()
    exact = logits.double().softmax(-1)
    for distributions in (
        BatchSampling(),
        BatchSampling(temperature=torch.ones(50)),
        BatchSampling(top_p=torch.ones(50)),
    ):
        got = distributions.probs(logits)
        assert got.dtype == torch.float32
        np.testing.assert_allclose(got.double().log(), exact.log(), atol=1e-5)
    assert (logits.softmax(-1).double().log() - exact.log()).abs().max() > 3e-3  # the broken variant


def test_a_stop_token_changes_nothing_before_it_and_is_kept() -> None:
    """Wherever in a cycle it falls, the answer is what it would have been, up to and with the stop token."""
    stop = 5
    free = generate(engine(), requests([[1, 2, 3]] * 50, max_new_tokens=40))
    cut = generate(engine(), requests([[1, 2, 3]] * 50, max_new_tokens=40, stop_token_ids=(stop,)))
    for whole, short in zip(free, cut, strict=True):
        ids = whole.token_ids.tolist()
        assert short.token_ids.tolist() == (ids[: ids.index(stop) + 1] if stop in ids else ids)

"""Truncation of targets inside of the losses against the distributions that rollouts sample from."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.kernels import truncation
from bebop.kernels.truncation import truncate_
from bebop.rollout.decoding.sampling import BatchSampling


def sampled(logits: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """What a rollout samples from [N, V]."""

    def each(number: float) -> Tensor | None:
        return torch.full((len(logits),), number) if number else None

    distributions = BatchSampling(temperature=each(temperature), top_p=each(top_p), top_k=each(top_k))
    return distributions.probs(logits[:, None])[:, 0]


def logits(rows: int, vocabulary: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(rows)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 20), (0.8, 50), (0.05, 0), (0.999, 0), (1.0, 1)])
def test_equals_the_distribution_of_the_rollout(dtype: torch.dtype, top_p: float, top_k: int) -> None:
    """bf16 logits of 3,000 tokens have ties everywhere, at the border too."""
    given_logits = logits(6, 3000, dtype)
    found = (truncate_(given_logits.clone(), 0.8, top_p, top_k).float() / 0.8).softmax(-1)
    wanted = sampled(given_logits, 0.8, top_p, top_k)
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-8)
    assert (wanted > 0).sum(-1).max() < 3000


def test_ties_at_the_border_are_kept_in_index_order() -> None:
    """BatchSampling (.3, .2, .2, .2, .1): the mass before the third .2 is .7. A border by value alone would keep all
    three."""
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.3, 0.2]])
    for top_p, top_k, kept in ((0.6, 0, [1, 2, 3]), (1.0, 2, [1, 3]), (0.69, 4, [1, 2, 3]), (0.3, 0, [3])):
        found = truncate_(probs.log(), 1.0, top_p, top_k)[0] > -torch.inf
        assert found.nonzero()[:, 0].tolist() == kept, (top_p, top_k)


def test_rows_that_keep_more_than_the_candidates_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flat row beside a peaked one; without the second look the flat one would end at the candidates."""
    rows = torch.stack([torch.zeros(3000), logits(1, 3000)[0] * 3])
    for candidates in (truncation.CANDIDATES, 7):
        monkeypatch.setattr(truncation, "CANDIDATES", candidates)
        found = (truncate_(rows.clone(), 1.0, 0.49995) > -torch.inf).sum(-1)
        assert found.tolist() == [1500, int((sampled(rows, 1.0, 0.49995, 0)[1] > 0).sum())]


def test_nothing_to_do_and_no_rows() -> None:
    rows = logits(2, 50)
    assert truncate_(rows, 0.5) is rows
    assert truncate_(rows[:0].clone(), 1.0, 0.5).shape == (0, 50)
    assert torch.equal(truncate_(rows.clone(), 1.0, 1.0, 50), rows)


@settings(max_examples=50, deadline=None)
@given(
    vocabulary=st.integers(1, 60),
    seed=st.integers(0, 10**6),
    levels=st.sampled_from([0, 3, 1000]),
    top_p=st.sampled_from([0.1, 0.35, 0.77, 0.95, 1.0]),
    top_k=st.integers(0, 70),
)
def test_any_values(vocabulary: int, seed: int, levels: int, top_p: float, top_k: int) -> None:
    """Few levels are many ties; masked logits stay masked."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, levels + 1, (3, vocabulary), generator=generator) / 300 * (3 if levels > 3 else 100)
    rows[0, 1:] = -torch.inf
    found = truncate_(rows.clone(), 1.3, top_p, top_k)
    kept, wanted = found > -torch.inf, sampled(rows, 1.3, top_p, top_k) > 0
    assert torch.equal(kept & (rows > -torch.inf), wanted)

"""Distributions that stay logits: drawing, verification and statistics work on logits in their own type.

With probabilities, a softmax in fp32 is written once and read several times. For 256 requests, 3 drafts and 152,000
tokens that moves 13 GB a cycle. Here a row of logits is read when it is normalised, and once more where a draft is
compared with the target. This file has the plain PyTorch reference; on a CUDA device ``draw_triton.py`` does the same.

What "the same" means: given exact uniforms, both draw a token by inverting the CDF in the order of the vocabulary, as
``verify.sample`` does from the softmax.

- *Law.* The kernels sum a tile of the vocabulary in fp32 and invert in fp64, first over tiles and then inside the tile
  that is hit. The probability of each token is that of its softmax in fp32 up to a relative error of 2^-19, however
  rare it is.
- *Tokens.* With the same uniforms they are those of the reference, unless a uniform lies within rounding of a border
  between two tokens: 1e-6 of the mass for sums in fp32.
- *Support.* A token whose probability is 0 in fp32 is never drawn. A uniform just below 1 gives the last token that
  has mass.
- *Log-probs* of given logits are within 1e-5 of their exact value where logits / temperature stay below 64. So they
  agree with the trainer's as far as the logits do.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from bebop.kernels.verify import one_hot, reference, sample

LN2 = math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRows:
    """Distributions softmax(logits / temperature) of B requests at n places each, given by logits and normalisers.

    Example: for one request at temperature 1 with logits [[[0.0, 0.0]]], ``stats`` is [[[1.44]], [[1.0]], [[0.69]]].
    """

    logits: Tensor  # [B, n, V] bf16, fp16 or fp32
    stats: Tensor  # [3, B, n] fp32: scale, normaliser and entropy
    best: Tensor  # [B, n] int64, the token of the largest logit; of equal ones the first
    tiles: Tensor | None = None  # [B, n, 4, tiles] sums of the kernels, see ``draw_triton.py``; None: the reference
    block: int = 0  # tokens in a tile

    @property
    def scale(self) -> Tensor:
        """Return log2(e) / temperature [B, n]; 0 marks a greedy row, whose distribution is one-hot at ``best``."""
        return self.stats[0]

    @property
    def normaliser(self) -> Tensor:
        """Return log2 of the sum of 2^(logit * scale) [B, n]; 0 in greedy rows."""
        return self.stats[1]

    @property
    def entropy(self) -> Tensor:
        """Return the entropies [B, n] in nats."""
        return self.stats[2]

    def probs(self) -> Tensor:
        """Return the probabilities [B, n, V] in fp32."""
        exponents = self.logits.float() * self.scale[..., None] - self.normaliser[..., None]
        greedy = (self.scale == 0)[..., None]
        return torch.where(greedy, one_hot(self.best, self.logits.shape[-1], torch.float32), exponents.exp2())

    def logprobs(self, tokens: Tensor) -> Tensor:
        """Return log p [B, m] in nats of tokens [B, m] at the first m <= n places; -inf where p is 0."""
        m = tokens.shape[1]
        taken = self.logits[:, :m].gather(-1, tokens[..., None])[..., 0].float()
        sampled = (taken * self.scale[:, :m] - self.normaliser[:, :m]) * LN2
        greedy = torch.where(tokens == self.best[:, :m], 0.0, -torch.inf)
        return torch.where(self.scale[:, :m] == 0, greedy, sampled)


def compiled(logits: Tensor) -> bool:
    """Return whether the Triton kernels take these logits; fp64 and machines without Triton stay with the reference."""
    return logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None


def normalise(logits: Tensor, temperature: Tensor | None) -> LogitRows:
    """Return the distributions of logits [B, n, V] at temperatures [B].

    A temperature of 0 is greedy; None is 1 in all rows. Logits in fp64 are rounded to fp32.
    """
    return _of(logits, temperature, None)[0]


def draw(logits: Tensor, temperature: Tensor | None, uniforms: Tensor) -> tuple[LogitRows, Tensor]:
    """Return the distributions of logits [B, V], as ``normalise`` does with n = 1, and one token [B] drawn from each.

    ``uniforms`` [B] lie in [0, 1).
    """
    rows, tokens = _of(logits[:, None], temperature, uniforms)
    assert tokens is not None
    return rows, tokens


def draw_from(rows: LogitRows, uniforms: Tensor) -> Tensor:
    """Return tokens [B] drawn from distributions with n = 1, at uniforms [B] in [0, 1)."""
    if rows.tiles is not None:
        from bebop.kernels import draw_triton

        return draw_triton.draw_from(rows, uniforms)
    return sample(rows.probs()[:, 0], uniforms)


def _of(logits: Tensor, temperature: Tensor | None, uniforms: Tensor | None) -> tuple[LogitRows, Tensor | None]:
    if compiled(logits):
        from bebop.kernels import draw_triton

        return draw_triton.normalise(logits, temperature, uniforms)
    rows = normalise_reference(logits.float() if logits.dtype == torch.float64 else logits, temperature)
    return rows, None if uniforms is None else sample(rows.probs()[:, 0], uniforms)


def verify(
    tokens: Tensor,
    drafts: Sequence[LogitRows] | None,
    target: LogitRows,
    uniforms: Tensor,
    lengths: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Verify chains as ``verify.chain_verify`` does, from logits.

    Args:
        tokens: [B, K] drafts; K = 0 draws from the target.
        drafts: K distributions with n = 1, one behind each draft; None: one-hot drafts.
        target: the target's distributions, n = K + 1.
        uniforms: [B, K + 2] in [0, 1): K tests, then one for the recovered and one for the bonus token.
        lengths: [B] drafts per row; None: K.
        measure: whether to compute the overlap.

    Returns:
        accepted [B], the token after the accepted drafts [B], and the overlap [B, K] of draft and target. The overlap
        holds for every tested draft; other numbers mean nothing. It is None without ``measure``, or for one-hot drafts.
    """
    if not tokens.shape[1]:
        return torch.zeros_like(target.best[:, 0]), draw_from(target, uniforms[:, 1]), None
    if target.tiles is not None:
        from bebop.kernels import draw_triton

        return draw_triton.verify(tokens, drafts, target, uniforms, lengths, measure)
    return verify_reference(tokens, drafts, target, uniforms, lengths, measure)


# ---- the reference


def normalise_reference(logits: Tensor, temperature: Tensor | None) -> LogitRows:
    """Compute ``normalise`` in plain PyTorch."""
    temperature = torch.ones(len(logits), device=logits.device) if temperature is None else temperature.float()
    greedy = (temperature == 0)[:, None]
    numbers = logits.float() / torch.where(greedy, 1.0, temperature[:, None])[..., None]
    best = logits.argmax(-1)
    scale = torch.where(greedy, 0.0, 1 / (LN2 * temperature[:, None])).expand_as(best)
    normaliser, entropy = numbers.logsumexp(-1) / LN2, torch.special.entr(numbers.softmax(-1)).sum(-1)
    stats = torch.stack([scale, *(torch.where(greedy, 0.0, part) for part in (normaliser, entropy))])
    return LogitRows(logits=logits, stats=stats, best=best)


def verify_reference(
    tokens: Tensor,
    drafts: Sequence[LogitRows] | None,
    target: LogitRows,
    uniforms: Tensor,
    lengths: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``verify`` in plain PyTorch."""
    p = target.probs()
    q = None if drafts is None else torch.cat([draft.probs() for draft in drafts], 1)
    accepted, token = reference(tokens, q, p, uniforms, lengths)
    overlap = None if q is None or not measure else torch.minimum(p[:, : tokens.shape[1]], q).sum(-1)
    return accepted, token, overlap

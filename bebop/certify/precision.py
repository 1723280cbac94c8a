"""Bounds of the difference between log-probs of an engine in bf16 or fp16 and those of the same weights in fp32.

An engine rounds in two parts, and each has a bound:

- **The pass** computes logits in the engine's precision. To first order, errors e of the logits move the log-prob of
  token x by e_x - sum_v p_v e_v. A logit l_v is rounded once, by at most ``unit`` |l_v|. Before that the hidden state
  is off by ``gain`` * ``unit`` of its length, in a random direction, which the head turns into errors of the logits.
  ``Sensitivity`` holds both for a token, and ``spread`` is the resulting standard deviation. Neither depends on the
  width.
- **The sampler** computes log-probs from logits, in fp32 for any type of the model: ``SAMPLER`` nats.

With random weights ``gain`` is 0.5 to 1 times that of independent roundings, ``gain_of(layers)``, sqrt(6 + 2 L).
Training changes it: to 0.2 times in SmolLM2, 2 times and more in the built-in model. So it is measured with
transformers' own forward in both precisions on the same texts (``measured_gain``). Any further error of an engine then
stands out. Measurements: ``python -m bebop.bench precision``, ``benchmarks/cpu/precision.json``.

None of this changes the distribution of a completion. Drafts, target and acceptance tests of an engine in bf16 use one
and the same p, that of the bf16 model. Its completions have exactly this distribution, up to the sampler's bound. The
bounds of the pass limit its distance from the distribution of the fp32 model: |TV(p, p')| <= E|e^d - 1| / 2 for
deviations d of log p, which is about E|d| / 2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

# The largest relative error of one rounding, and its standard deviation: uniform in the last place, over mantissas.
UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDING = 0.42

FLOOR = 3e-4  # least expected standard deviation, in nats: nearly certain tokens would have a smaller one
SAMPLER = 1e-4  # error, in nats, of a log-prob computed from its logits; measured: 2e-5 with 49,152 tokens, else 1e-6
# Bounds of deviations over ``spread``, each with the largest measurement of all models (benchmarks/cpu/precision.json):
RMS = 1.5  # root of the mean square: 1.1
P99 = 5.0  # 99 % of tokens: 3.1
MOST = 30.0  # single tokens: 10, by the built-in model
SLOPE = 0.004  # sharpening of distributions, as by a wrong temperature: 0.002
ENOUGH = 400  # tokens, from which on the bounds of many tokens apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Change of the log-probs of N tokens under relative errors of size 1."""

    through: Tensor  # [N] with errors of the hidden state, in a random direction
    own: Tensor  # [N] with errors of each logit by itself

    @classmethod
    def of(
        cls, hidden: Tensor, head: Tensor, logits: Tensor, probs: Tensor, tokens: Tensor, temperature: float
    ) -> Self:
        """Compute it from final states [N, d], the head's weight [V, d], raw logits and distributions [N, V].

        Logits and distributions are in fp64.
        """
        at = tokens[:, None]
        apart = head[tokens] - probs.to(head.dtype) @ head
        through = hidden.double().norm(dim=1) * apart.double().norm(dim=1) / math.sqrt(hidden.shape[1])
        chance, logit = probs.gather(1, at)[:, 0], logits.gather(1, at)[:, 0]
        others = ((probs * logits) ** 2).sum(1) - (chance * logit) ** 2
        own = (others.clamp_min(0) + ((1 - chance) * logit) ** 2).sqrt()
        return cls(through=through / temperature, own=own / temperature)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the sensitivities of all parts, in order."""
        return cls(through=torch.cat([p.through for p in parts]), own=torch.cat([p.own for p in parts]))

    def spread(self, dtype: str, gain: float) -> Tensor:
        """Return the standard deviation [N] of log-probs in nats, of a pass in ``dtype`` against one in fp32."""
        return UNIT[dtype] * ((ROUNDING * self.own) ** 2 + (gain * self.through) ** 2).sqrt()

    def measured_gain(self, off: Tensor, dtype: str) -> float:
        """Return the gain that explains deviations ``off`` [N] of log-probs, in nats."""
        seen = (off / UNIT[dtype]).square().mean() - (ROUNDING * self.own).square().mean()
        return math.sqrt(max(0.0, float(seen / self.through.square().mean())))


def gain_of(layers: int, amplification: float = 1.0) -> float:
    """Return the relative error of final states in units of one rounding, after ``layers`` layers."""
    return amplification * math.sqrt(6 + 2 * layers)


@dataclass(slots=True)
class Deviations:
    """Deviations of log-probs from fp32, with the deviations that a precision explains."""

    off: list[Tensor] = field(default_factory=list)  # [N] nats
    spread: list[Tensor] = field(default_factory=list)  # [N] expected standard deviation
    centred: list[Tensor] = field(default_factory=list)  # [N] log p + entropy, which a temperature scales

    def add(self, off: Tensor, spread: Tensor, centred: Tensor) -> None:
        """Add tokens, except those with an unknown deviation (nan)."""
        known = ~off.isnan()
        for mine, new in zip((self.off, self.spread, self.centred), (off, spread, centred), strict=True):
            mine.append(new[known].double().cpu())

    def __len__(self) -> int:
        return sum(map(len, self.off))

    def measured(self) -> dict[str, float]:
        """Return nats (mean, 99 %, most), ratios over the expected (rms, p99, most), and the slope with its error.

        The slope is that of deviations over ``centred``; each token's weight follows from its expected deviation.
        """
        off, spread, centred = (torch.cat(parts) for parts in (self.off, self.spread, self.centred))
        ratio = off.abs() / spread.clamp_min(FLOOR)
        weight = spread.clamp_min(float(spread.mean()) / 4) ** -2
        around = (weight * centred.square()).sum()
        slope = (weight * off * centred).sum() / around
        left = weight * centred * (off - slope * centred)
        return {
            "mean": float(off.abs().mean()),
            "99 %": float(off.abs().quantile(0.99)),
            "most": float(off.abs().max()),
            "expected": float(spread.square().mean().sqrt()),
            "rms ratio": float((off.square().mean() / spread.square().mean()).sqrt()),
            "99 % ratio": float(ratio.quantile(0.99)),
            "most ratio": float(ratio.max()),
            "slope": float(slope),
            "slope error": float(left.square().sum().sqrt() / around),
        }

    def beyond(self) -> list[str]:
        """Return a sentence for each exceeded bound; with fewer than ``ENOUGH`` tokens no bound applies."""
        if len(self) < ENOUGH:
            return []
        found, words = self.measured(), []
        for name, bound in (("rms ratio", RMS), ("99 % ratio", P99), ("most ratio", MOST)):
            if found[name] > bound:
                words.append(f"{found[name]:.2g} times as far from fp32 as the precision explains ({name})")
        if abs(found["slope"]) > SLOPE + 4 * found["slope error"]:
            words.append(f"of distributions that are sharper by {100 * found['slope']:+.2g} % than in fp32")
        return words


def entropy(probs: Tensor) -> Tensor:
    """Return the entropy [N] of distributions [N, V] in nats."""
    return torch.special.entr(probs).sum(-1)


def sampler_error(logits: Tensor, tokens: Tensor, logprobs: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the distance, in nats [N], between log-probs [N] and those that their logits [N, V] give in fp64."""
    exact = (logits.double() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return (logprobs.double() - exact).abs()

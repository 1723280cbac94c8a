# mypy: disable-error-code="untyped-decorator"
"""The losses of ``draft_losses.LOSSES`` for Triton: one twin per loss, with a Triton version of each function.

Logarithms are binary here, and their sums are converted to nats afterwards. The totals that a gradient gets are in
nats. A loss without a twin runs in eager PyTorch on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True, kw_only=True)
class Twin:
    """Compile-time constants of the kernels for one loss.

    Each function corresponds to the field of that name in ``draft_losses``.
    """

    value: Any  # (alpha, D, H(p), eta), scalars
    terms: Any = None  # tiles; None: no divergence, or that of a label, which is a single load
    second: Any = None
    gradient: Any = None
    tv: Any = None  # None: 0
    own: Any = None  # None: 0
    labels: bool = False
    early: bool = False  # whether the gradient needs no sum, and is written in the pass that makes them

    def constants(self) -> dict[str, Any]:
        """Return the fields by the upper-case names that the kernels use."""
        return {name.upper(): getattr(self, name) for name in self.__slots__}


@triton.jit
def one(alpha: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the coefficient 1."""
    return 1.0


@triton.jit
def inverse(alpha: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return 1 / alpha; 0 where no token is shared, or so little that the inverse would overflow."""
    return tl.where(alpha > 1.1754944e-38, 1.0 / alpha, 0.0)  # the smallest normal number


@triton.jit
def fading(alpha: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the weight of the divergence in ``hybrid``."""
    return tl.exp2(-eta * alpha / LN2)


@triton.jit
def rest(alpha: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the weight of TV in ``hybrid``."""
    return 1.0 - fading(alpha, eta)


@triton.jit
def kl_terms(q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor) -> tl.tensor:
    """Return a tile of the terms of KL(p||q)."""
    return tl.where(p > 0, p * (p_log - q_log), 0.0)


@triton.jit
def kl_gradient(
    q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor, hit: tl.tensor, total: tl.tensor, second: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a tile of the gradient of KL(p||q)."""
    return q - p


@triton.jit
def reverse_kl_terms(q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor) -> tl.tensor:
    """Return a tile of the terms of KL(q||p)."""
    return tl.where(q > 0, q * (q_log - p_log), 0.0)


@triton.jit
def reverse_kl_gradient(
    q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor, hit: tl.tensor, total: tl.tensor, second: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a tile of the gradient of KL(q||p); ``total`` is KL(q||p)."""
    return tl.where(q > 0, q * ((q_log - p_log) * LN2 - total), 0.0)


@triton.jit
def middle(q: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Return the binary logarithm of the mixture (p + q) / 2."""
    return tl.log2(p + q) - 1.0  # half of the smallest number would be 0


@triton.jit
def to_middle_terms(q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor) -> tl.tensor:
    """Return a tile of the terms of KL(q||m)."""
    return tl.where(q > 0, q * (q_log - middle(q, p)), 0.0)


@triton.jit
def jensen_shannon_terms(q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor) -> tl.tensor:
    """Return a tile of the terms of (KL(p||m) + KL(q||m)) / 2."""
    return (to_middle_terms(p, p_log, q, q_log) + to_middle_terms(q, q_log, p, p_log)) * 0.5


@triton.jit
def jensen_shannon_gradient(
    q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor, hit: tl.tensor, total: tl.tensor, second: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a tile of the gradient of (KL(p||m) + KL(q||m)) / 2; ``second`` is KL(q||m)."""
    return tl.where(q > 0, q * ((q_log - middle(q, p)) * LN2 - second) * 0.5, 0.0)


@triton.jit
def label_gradient(
    q: tl.tensor, q_log: tl.tensor, p: tl.tensor, p_log: tl.tensor, hit: tl.tensor, total: tl.tensor, second: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a tile of the gradient of -log q[label]."""
    return q - tl.where(hit, 1.0, 0.0)


@triton.jit
def missed(alpha: tl.tensor, d: tl.tensor, h: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return 1 - alpha, the value of ``tv``."""
    return 1.0 - alpha


@triton.jit
def surprise(alpha: tl.tensor, d: tl.tensor, h: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return -log alpha in nats, the value of ``nla``."""
    return -tl.log2(alpha) * LN2


@triton.jit
def alone(alpha: tl.tensor, d: tl.tensor, h: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the divergence alone, the value of ``hard_ce``, ``kl``, ``rkl`` and ``jsd``."""
    return d


@triton.jit
def cross(alpha: tl.tensor, d: tl.tensor, h: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the sum of the divergence and the target's entropy, the value of ``ce``."""
    return h + d


@triton.jit
def mixed(alpha: tl.tensor, d: tl.tensor, h: tl.tensor, eta: tl.tensor) -> tl.tensor:
    """Return the value of ``hybrid``."""
    return fading(alpha, eta) * d + rest(alpha, eta) * (1.0 - alpha)


_KL: dict[str, Any] = {"terms": kl_terms, "gradient": kl_gradient, "own": one}

TWINS = {
    "tv": Twin(value=missed, tv=one),
    "ce": Twin(value=cross, early=True, **_KL),
    "hard_ce": Twin(value=alone, gradient=label_gradient, own=one, labels=True, early=True),
    "kl": Twin(value=alone, early=True, **_KL),
    "rkl": Twin(value=alone, terms=reverse_kl_terms, gradient=reverse_kl_gradient, own=one),
    "jsd": Twin(
        value=alone, terms=jensen_shannon_terms, second=to_middle_terms, gradient=jensen_shannon_gradient, own=one
    ),
    "nla": Twin(value=surprise, tv=inverse),
    "hybrid": Twin(value=mixed, tv=rest, **{**_KL, "own": fading}),
}

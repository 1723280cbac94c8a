"""Products with weight matrices while decoding: the faster of two libraries, by the size of the product.

torch multiplies fp32 matrices on a CPU with MKL. oneDNN, which comes with torch as well, takes longer to call, and for
what is large half the time on processors that MKL has no kernels of their own for. By a rule of sizes and not by a
measurement at start-up, so that a job that goes on elsewhere rounds as before.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
LARGE = 2**20  # multiplications from which oneDNN is the faster one, whatever the shape ...
LARGE_MATRIX = 2**19  # ... and weights, even where each is used once: then reading them is what takes time


def onednn_rows(weight: Tensor) -> float:
    """Rows from which oneDNN is the faster one for ``weight`` [N, K]; infinite where it is not to be had."""
    if ONEDNN is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return math.inf
    return 0 if weight.numel() >= LARGE_MATRIX else math.ceil(LARGE / weight.numel())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` without gradients: [..., K], [N, K], [N] -> [..., N]."""
    if x.numel() >= onednn_rows(weight) * weight.shape[1]:
        out: Tensor = ONEDNN(x, weight, bias, "none", [], "")  # type: ignore[misc]
        return out
    return linear(x, weight, bias)


class Matrix:
    """A linear layer without gradients, of which all is settled that does not depend on what it is applied to."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """``weight`` [N, K] and ``bias`` [N]: seen, not copied, so that what is written into them counts."""
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.turned = self.weight.t()
        self.onednn = onednn_rows(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[n, K] -> [n, N]."""
        if x.shape[0] >= self.onednn:
            out: Tensor = ONEDNN(x, self.weight, self.bias, "none", [], "")  # type: ignore[misc]
            return out
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)

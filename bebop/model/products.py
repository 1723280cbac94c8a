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


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` without gradients: [..., K], [N, K], [N] -> [..., N]."""
    size = weight.numel()
    if ONEDNN is not None and (size >= LARGE_MATRIX or x.numel() * weight.shape[0] >= LARGE):
        if x.dtype == torch.float32 and x.device.type == "cpu":
            out: Tensor = ONEDNN(x, weight, bias, "none", [], "")
            return out
    return linear(x, weight, bias)


class Matrix:
    """A linear layer without gradients, of which all is settled that does not depend on what it is applied to."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """``weight`` [N, K] and ``bias`` [N]: seen, not copied, so that what is written into them counts."""
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.turned = self.weight.t()
        able = ONEDNN is not None and weight.dtype == torch.float32 and weight.device.type == "cpu"
        rows = 0 if weight.numel() >= LARGE_MATRIX else math.ceil(LARGE / weight.numel())
        self.onednn = rows if able else math.inf  # rows from which oneDNN is the faster one; see ``product``

    def __call__(self, x: Tensor) -> Tensor:
        """[n, K] -> [n, N]."""
        if x.shape[0] >= self.onednn:
            out: Tensor = ONEDNN(x, self.weight, self.bias, "none", [], "")  # type: ignore[misc]
            return out
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)

"""AdamW as every trainer here steps it: gradient clipped by its norm, and no step on a gradient that is not finite."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bebop.config import HeadConfig, TrainerConfig
from bebop.errors import UserError
from bebop.trainer.scorer import whole

MAX_SKIPPED = 3  # steps in a row without a finite gradient before training gives up


class GuardedAdamW(torch.optim.AdamW):
    """Over named parameters, sharded or not; norms and biases do not decay."""

    def __init__(
        self, named: Mapping[str, Tensor], config: TrainerConfig | HeadConfig, *, setting: str, loss: str, causes: str
    ) -> None:
        """``setting``, ``loss``, ``causes``: what the error names, as "trainer.lr", "the loss", "rewards"."""
        self.named, self.max_grad_norm = dict(named), config.max_grad_norm
        self.skipped = 0  # steps skipped in a row
        self._complaint = f"{setting}={config.lr}: {loss} is not finite in {MAX_SKIPPED} steps running"
        self._advice = f"lower it, or look for {causes} that are not finite"
        decay = [p for p in self.named.values() if p.ndim > 1]
        rest = [p for p in self.named.values() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        super().__init__(groups, lr=config.lr, betas=config.betas)

    def guarded_step(self, rate: float, norm: Tensor | None = None) -> dict[str, float]:
        """Clip and step at a learning rate; all ranks take part.

        ``norm``: of the gradient, where it is not that of these parameters alone.

        Returns:
            lr, skipped (0 or 1) and grad_norm (before clipping; left out where it is not finite).

        Raises:
            UserError: the third gradient in a row that is not finite.
        """
        parameters = [p for p in self.named.values() if p.grad is not None]
        if norm is None:
            norm = gradient_norm(parameters)
        finite = bool(norm.isfinite())
        for group in self.param_groups:
            group["lr"] = rate
        if finite:
            clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
            self.step()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise UserError(f"{self._complaint} (gradient norm {float(norm)}); {self._advice}")
        # A skipped step has no norm worth averaging: it would make that of a whole update NaN.
        return {"lr": rate, "skipped": float(not finite)} | ({"grad_norm": float(norm)} if finite else {})


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Of all gradients together, sharded or not; all ranks take part."""
    return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))

"""Training that evaluates fixed text after every step: its loss jumps with training, not with the batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.job import HeadConfig
from bebop.kernels.losses import tv_loss
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow, chain_rows, rows_of_step
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Objective, Sampling, Steps
from recipes.reproduce.study import Arm, backbone_states
from recipes.reproduce.top_k.losses import top_k_tv

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Curves of one training run of S steps."""

    grad_norm: Array  # [S], of the batch of each step, before clipping
    loss: Array  # [S], as trained (K tokens), on the fixed text after each step
    full: Array  # [S], over the whole vocabulary on the same text
    churn: Array  # [S], share of the set of K tokens that changed in the step


@dataclass(slots=True, kw_only=True)
class CurveRecorder:
    """Loss function that also records the numbers of ``Curves`` on the fixed text."""

    top_k: int | None
    mode: str
    before: Tensor | None = None  # [N, K] the set of K tokens at each place before the step
    seen: list[tuple[float, float, float]] = field(default_factory=list)

    def __call__(self, steps: Steps) -> Tensor:
        """Return the loss of an ``Objective``; called without gradients."""
        draft, target = chosen_logits(steps)
        loss = top_k_tv(draft, target, self.top_k, self.mode).mean()
        full = tv_loss(draft, target).loss.mean()
        now = draft.topk(min(self.top_k or draft.shape[-1], draft.shape[-1]), -1).indices
        changed = 0.0 if self.before is None else churn(self.before, now, draft.shape[-1])
        self.before = now
        self.seen.append((float(loss), float(full), changed))
        return loss


def chosen_logits(steps: Steps) -> tuple[Tensor, Tensor]:
    """Return the logits [N, V] of draft and target at the steps that exist."""
    return steps.draft[steps.mask] @ steps.weight.T, steps.target[steps.mask] @ steps.weight.T


def objective(top_k: int | None, mode: str) -> Callable[[Steps], Tensor]:
    """Return TV of single steps on the K largest draft logits, averaged over steps; None is the whole vocabulary."""

    def loss(steps: Steps) -> Tensor:
        return top_k_tv(*chosen_logits(steps), top_k, mode).mean()

    return loss


def churn(before: Tensor, now: Tensor, vocabulary: int) -> float:
    """Return the share of tokens in each new set [N, K] that the old set lacked, averaged over the N sets."""
    was = torch.zeros(len(before), vocabulary, dtype=torch.bool).scatter_(1, before, True)
    return float(1 - was.gather(1, now).double().mean())


def fit(
    model: Policy, arm: Arm, rows: Sequence[TokenRow], watched: Sequence[TokenRow], top_k: int | None, mode: str
) -> Curves:
    """Train the head of ``model`` in place, like ``study.train``; evaluate the ``watched`` text after every step."""
    config = HeadConfig(depth=arm.depth, lr=arm.lr, lr_warmup_steps=6, max_tokens=2048)
    trainer = HeadTrainer(FSDPBackend(model, Sampling()), config)
    states, recorder, norms = backbone_states(model, rows), CurveRecorder(top_k=top_k, mode=mode), []
    layout = chain_rows(watched, arm.depth)
    fixed = torch.nn.utils.rnn.pad_sequence(backbone_states(model, watched), batch_first=True)
    for step in range(arm.steps):
        chosen = rows_of_step(len(rows), arm.rows_per_step, 1000 * arm.seed + arm.order, step)
        learned = Objective(objective(top_k, mode))
        update = trainer.update([rows[i] for i in chosen], learned, [states[i] for i in chosen])
        norms.append(update.get("head/grad_norm", float("nan")))
        with torch.no_grad():
            trainer.backend.loss(layout, recorder, fixed)
    loss, full, changed = np.array(recorder.seen).T
    return Curves(grad_norm=np.array(norms), loss=loss, full=full, churn=changed)


def jumps(values: Array, skip: int) -> Array:
    """Return step-to-step changes of the logarithm from step ``skip`` on, so that losses of any size are comparable."""
    changes: Array = np.diff(np.log(values[skip:]))
    return changes


def spread(values: Array, skip: int) -> float:
    """Return the standard deviation of ``jumps``: 0 for a curve that falls by the same share in every step."""
    return float(np.nanstd(jumps(values, skip), ddof=1))


def numbers(curves: Curves, skip: int) -> dict[str, float]:
    """Return the numbers that sum up a curve, without ``skip`` steps of warm-up."""
    rises = jumps(curves.loss, skip)
    return {
        "loss spread": spread(curves.loss, skip),
        "largest rise": float(rises.max()),
        "gradient spread": spread(curves.grad_norm, skip),
        "churn": float(curves.churn[skip + 1 :].mean()),
        "final full TV": float(curves.full[-1]),
    }

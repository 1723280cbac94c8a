"""Cost of the losses with a large vocabulary: processor time and memory of the fused losses and of plain autograd.

Both get the same states of the same chains, in turns, in one process. Memory is that of tensors. Plain autograd makes
all logits at once.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.bench.memory import peak_bytes
from bebop.model.backbone import Policy
from bebop.trainer.chains import chain_rows, spaced
from bebop.trainer.objectives import OBJECTIVES, Sampling, Steps
from recipes.reproduce.real.states import Text
from recipes.reproduce.study import QUICK

ROWS, EVERY, DEPTH = 8, 8, 5  # one training step of the shared head, see ``runs.HeadRun``
TURNS = 1 if QUICK else 3

Loss = Callable[[Steps], Tensor]


def eager_tv(steps: Steps) -> Tensor:
    """Return the mean total variation of the existing steps."""
    return 1 - torch.minimum(*_probs(steps)).sum(-1).mean()


def eager_ce(steps: Steps) -> Tensor:
    """Return the mean cross-entropy with soft labels."""
    draft, target = _logits(steps)
    return -(target.softmax(-1) * draft.log_softmax(-1)).sum(-1).mean()


def eager_e2e_tv(steps: Steps) -> Tensor:
    """Return 1 - accepted drafts / K_eff, averaged over chains (SPEC Eq. 13)."""
    overlap = torch.minimum(*_probs(steps)).sum(-1)
    alpha = torch.zeros(steps.mask.shape, dtype=overlap.dtype).masked_scatter(steps.mask, overlap)
    length = steps.mask.sum(-1)
    chains = length > 0
    return (1 - alpha.cumprod(-1).sum(-1)[chains] / length[chains]).mean()


EAGER: Mapping[str, Loss] = {"ce": eager_ce, "tv": eager_tv, "e2e_tv": eager_e2e_tv}


def _logits(steps: Steps) -> tuple[Tensor, Tensor]:
    return steps.draft[steps.mask] @ steps.weight.T, steps.target[steps.mask] @ steps.weight.T


def _probs(steps: Steps) -> tuple[Tensor, Tensor]:
    draft, target = _logits(steps)
    return draft.softmax(-1), target.softmax(-1)


def example(model: Policy, text: Text) -> Steps:
    """Return the chains of one training step.

    The draft's states are those of the target one token earlier, with noise.
    """
    part = text.at(range(min(ROWS, len(text.answers))))
    rows = spaced(chain_rows([answer.row for answer in part.answers], DEPTH), EVERY, seed=0)
    hidden = torch.nn.utils.rnn.pad_sequence(list(part.states), batch_first=True)
    places = rows.anchors[..., None] + torch.arange(1, DEPTH + 1)
    gathered = [
        hidden[i][(places[i] - late).clamp_max(hidden.shape[1] - 1)] for late in (0, 1) for i in range(len(hidden))
    ]
    target, draft = torch.stack(gathered[: len(hidden)]), torch.stack(gathered[len(hidden) :])
    torch.manual_seed(0)
    return Steps(
        draft=(draft + 0.1 * torch.randn_like(draft)).requires_grad_(), target=target,
        weight=model.backbone.get_output_embeddings().weight.detach(),
        tokens=torch.stack([rows.tokens(step) for step in range(1, DEPTH + 1)], 2), mask=rows.mask(DEPTH),
        sampling=Sampling(),
    )  # fmt: skip


def measured(loss: Loss, steps: Steps) -> tuple[float, float]:
    """Run forward and backward; return the loss and the seconds of processor time."""
    steps.draft.grad = None
    began = time.process_time()
    value = loss(steps)
    value.backward()
    return value.item(), time.process_time() - began


def held(loss: Loss, steps: Steps) -> float:
    """Return the peak MB that forward and backward hold."""
    steps.draft.grad = None  # a gradient left by an earlier call would count as freed
    return peak_bytes(lambda: measured(loss, steps)) / 2**20


def compare_losses(place: Path, model: Policy, text: Text) -> list[dict[str, Any]]:
    """Return one line per loss and arm, also written to ``fused.json``.

    The time is the best of several turns after one uncounted turn.
    """
    steps = example(model, text)
    arms = [(name, arm) for name in EAGER for arm in ("fused", "eager")]
    losses = {(name, arm): OBJECTIVES[name].loss if arm == "fused" else EAGER[name] for name, arm in arms}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in tqdm(range(1 + TURNS), desc="fused", unit="turn"):
        for which, loss in losses.items():
            found[which].append(measured(loss, steps))
    lines = [
        {
            "loss": name, "arm": arm, "rows": int(steps.mask.sum()), "vocabulary": len(steps.weight),
            "value": turns[-1][0], "CPU seconds": min(t[1] for t in turns[1:]), "MB": held(losses[name, arm], steps),
        }
        for (name, arm), turns in found.items()
    ]  # fmt: skip
    (place / "fused.json").write_text(json.dumps(lines, indent=1) + "\n")
    return lines

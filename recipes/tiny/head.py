"""Stage 2 of the built-in model: hard-label cross-entropy training of the MTP head, the backbone frozen."""

import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from recipes.tiny.sft import IGNORE, batches


def head_loss(policy: Policy, token_ids: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Mean cross-entropy over recursive steps; ids and labels [B, T], prompts and padding ignored in the labels."""
    assert policy.mtp is not None
    with torch.no_grad():
        positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        hidden = policy.hidden(token_ids, positions, CausalContext())
        embeddings = policy.embed(token_ids)
    losses = []
    for step, out in enumerate(chain(policy.mtp, embeddings, hidden, steps), start=1):
        # The entry at anchor t predicts token t + step + 1; the last anchor has no label.
        target = labels[:, step + 1 :]
        chosen = target != IGNORE
        losses.append(cross_entropy(policy.logits(out[:, :-1][chosen]), target[chosen]))
    return torch.stack(losses).mean()


def train_head(policy: Policy, *, steps: int, batch_size: int = 32, depth: int = 3, lr: float = 1e-3) -> None:
    """Train the head of ``policy`` in place."""
    assert policy.mtp is not None
    policy.backbone.requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.mtp.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    started, tokens = time.time(), 0
    data = batches(policy.tokenizer, seed=50, steps=steps, batch_size=batch_size)
    progress = tqdm(data, total=steps, desc="mtp head")
    for token_ids, labels in progress:
        loss = head_loss(policy, token_ids, labels, depth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.mtp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tokens += token_ids.numel()
        progress.set_postfix(loss=f"{loss.item():.3f}", tok_s=f"{tokens / (time.time() - started):.0f}")

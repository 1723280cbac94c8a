"""Supervised training of the built-in model's backbone on demonstrations; its head is not trained."""

import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from recipes.guess.demonstrations import batches
from recipes.tiny.sft import IGNORE

SEED = 10**6  # of demonstrations: no job asks their questions in this order


def loss_of(policy: Policy, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of the labels [B, T] that are not ignored, each given the tokens before it."""
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    hidden = policy.hidden(token_ids, positions, CausalContext())
    target = labels[:, 1:]
    chosen = target != IGNORE
    return cross_entropy(policy.logits(hidden[:, :-1][chosen]).float(), target[chosen])


def train(policy: Policy, *, steps: int, slips: float, seed: int = 0, batch_size: int = 16, lr: float = 1.5e-3) -> None:
    """Train the backbone of ``policy`` in place."""
    policy.backbone.requires_grad_(True)
    optimizer = torch.optim.AdamW(policy.backbone.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=max(steps, 2), pct_start=0.08)
    stop = policy.eos_token_ids[0]
    data = batches(policy.tokenizer, stop, slips=slips, seed=SEED + seed, steps=steps, batch_size=batch_size)
    began, tokens = time.perf_counter(), 0
    progress = tqdm(data, total=steps, desc="supervised", unit="step")
    for token_ids, labels in progress:
        loss = loss_of(policy, token_ids, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.backbone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tokens += token_ids.numel()
        progress.set_postfix(loss=f"{loss.item():.3f}", tok_s=f"{tokens / (time.perf_counter() - began):.0f}")

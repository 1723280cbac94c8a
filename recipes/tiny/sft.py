"""The two training stages of the built-in model.

First comes supervised training of the backbone on worked solutions. Then the MTP head is trained by hard-label
cross-entropy with the backbone frozen.
"""

import itertools
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from recipes.tiny.data import Example, examples, make_tokenizer

IGNORE = -100


def encode(example: Example, tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], int]:
    """Return token ids of prompt + solution + end, and the length of the prompt."""
    messages = [{"role": "user", "content": example.question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    solution_ids = tokenizer.encode(example.solution, add_special_tokens=False)
    return [*prompt_ids, *solution_ids, tokenizer.eos_token_id], len(prompt_ids)


def collate(rows: list[tuple[list[int], int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return right-padded ids [B, T] and labels [B, T]; the labels ignore prompts and padding."""
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.full((len(rows), width), pad)
    labels = torch.full((len(rows), width), IGNORE)
    for row, (ids, prompt_length) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        labels[row, prompt_length : len(ids)] = torch.tensor(ids[prompt_length:])
    return input_ids, labels


def make_backbone(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Return a backbone of twelve thin layers: its depth makes drafting with one MTP layer cheap by comparison."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.04,
    )
    return Qwen2ForCausalLM(config)


def batches(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, steps: int, batch_size: int
) -> itertools.chain[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``steps`` batches; rows of similar length are grouped, 16 batches at a time, to save padding."""

    def generate():  # type: ignore[no-untyped-def]
        stream = examples(seed, steps * batch_size)
        shuffle = torch.Generator().manual_seed(seed)
        while block := [encode(e, tokenizer) for e in itertools.islice(stream, 16 * batch_size)]:
            block.sort(key=lambda row: len(row[0]))
            starts = torch.arange(0, len(block), batch_size)
            for start in starts[torch.randperm(len(starts), generator=shuffle)].tolist():
                yield collate(block[start : start + batch_size], tokenizer.pad_token_id)

    return itertools.chain(generate())


def train_backbone(out: Path, *, steps: int, batch_size: int = 32, lr: float = 2e-3, seed: int = 0) -> None:
    """Train from scratch and write a Hugging Face folder to ``out``."""
    torch.manual_seed(seed)
    texts = ((e.question, e.solution) for e in examples(seed + 100, 4000))
    tokenizer = make_tokenizer(itertools.chain.from_iterable(texts))
    model = make_backbone(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.05)
    started, tokens = time.time(), 0
    progress = tqdm(batches(tokenizer, seed=seed, steps=steps, batch_size=batch_size), total=steps, desc="backbone")
    for input_ids, labels in progress:
        loss = model(input_ids=input_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tokens += input_ids.numel()
        progress.set_postfix(loss=f"{loss.item():.3f}", tok_s=f"{tokens / (time.time() - started):.0f}")
    pad_vocabulary(model, tokenizer, 512)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


@torch.no_grad()
def pad_vocabulary(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, size: int) -> None:
    """Make room for the unknown token that transformers' Qwen2 tokenizer adds to any vocabulary, and round up.

    New rows are copies of the row of a byte that never occurs: training has pushed its logit down.
    """
    unused = tokenizer.convert_tokens_to_ids("\u00c0")  # byte 0xC0 occurs in no valid UTF-8 text
    rows = model.config.vocab_size
    model.resize_token_embeddings(size, mean_resizing=False)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        weight[rows:] = weight[unused]


# ---- stage 2: the MTP head


def head_loss(policy: Policy, token_ids: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return the mean cross-entropy over recursive steps, for ids and labels [B, T].

    The labels ignore prompts and padding.
    """
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

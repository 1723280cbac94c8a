"""Demonstrations as training rows: the token ids of the agent loop, with labels on the policy's turns."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.environment import Message
from bebop.tasks.environments.guess import demonstrations
from recipes.tiny.sft import IGNORE

Row = tuple[list[int], list[int]]  # ids and labels, of the same length


def encode(messages: Sequence[Message], tokenizer: Any, delta: ChatDelta, stop: int) -> Row:
    """Return ids and labels of a conversation between user and assistant, which ends with the assistant's turn.

    Labels equal the ids on the assistant's tokens, stop token included, and IGNORE elsewhere. The pieces are those of
    the agent loop: a first prompt, then a turn that ends with ``stop``, then the template's text before the next turn.
    """
    ids = delta.first(messages[:1])
    labels = [IGNORE] * len(ids)
    for place in range(1, len(messages), 2):
        turn = [*tokenizer(messages[place]["content"], add_special_tokens=False)["input_ids"], stop]
        said = messages[place + 1 : place + 2]
        observation = delta.observation(said) if said else []
        ids += turn + observation
        labels += turn + [IGNORE] * len(observation)
    return ids, labels


def collate(rows: Sequence[Row], pad: int) -> tuple[Tensor, Tensor]:
    """Return right-padded ids [B, T] and labels [B, T]; the labels ignore padding."""
    width = max(len(ids) for ids, _ in rows)
    input_ids, targets = torch.full((len(rows), width), pad), torch.full((len(rows), width), IGNORE)
    for row, (ids, labels) in enumerate(rows):
        input_ids[row, : len(ids)], targets[row, : len(ids)] = torch.tensor(ids), torch.tensor(labels)
    return input_ids, targets


def batches(
    tokenizer: Any, stop: int, *, slips: float, seed: int, steps: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``steps`` batches of games; no game occurs in two steps."""
    delta = ChatDelta.checked(tokenizer, [stop])
    for step in range(steps):
        games = range(step * batch_size, (step + 1) * batch_size)
        yield collate(
            [encode(demonstrations(game, seed, slips), tokenizer, delta, stop) for game in games],
            tokenizer.pad_token_id,
        )

"""The policy of each version of a job, and what it makes of an answer."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import ModelConfig
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.trajectory_db.reader import StoredAnswer


class Policies:
    """Of the versions of a job, read when asked for."""

    def __init__(self, model: ModelConfig, weights: Callable[[int], Mapping[str, Tensor] | None]) -> None:
        """``weights``: of a version from 1 on, those of its checkpoint; None without one."""
        self._weights = weights
        self._policy, self._version = load_policy(model), 0
        self._initial = {name: tensor.clone() for name, tensor in self._policy.weights().items()}

    def __call__(self, version: int) -> Policy | None:
        """The policy with the weights of a version; None if they were not kept."""
        if version != self._version:
            weights = self._initial if version == 0 else self._weights(version)
            if weights is None:
                return None
            self._policy.load({name: weights[name] for name in self._initial})
            self._version = version
        return self._policy


@torch.inference_mode()
def scored(policy: Policy, one: StoredAnswer) -> Any:
    """[T] log p of an answer's tokens at temperature 1, in one pass over the whole sequence."""
    ids = torch.from_numpy(np.concatenate([one.prompt_ids, one.ids]).astype(np.int64))[None]
    positions = torch.arange(ids.shape[1])[None]
    hidden = policy.hidden(ids, positions, PackedContext(torch.tensor([ids.shape[1]])))
    logits = torch.log_softmax(policy.logits(hidden[0, len(one.prompt_ids) - 1 : -1]).float(), dim=-1)
    return logits.gather(1, torch.from_numpy(one.ids.astype(np.int64))[:, None])[:, 0].numpy()

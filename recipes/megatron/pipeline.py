"""The frozen backbone over pipeline stages: states flow forward only, so that no schedule has to balance two ways."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bebop.megatron_job.parallel import Place


class FrozenPipeline:
    """Final hidden states of rows of text, on the last stage."""

    def __init__(self, model: nn.Module, place: Place) -> None:
        """``model``: this stage's part, ending in hidden states (``BackboneModel``)."""
        self.model: Any = model
        self.place = place
        self._sent: list[tuple[dist.Work | None, Tensor]] = []  # a message's tensor must live until it is taken

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> Tensor | None:
        """Token ids [B, L] -> states [B, L, d] on the last stage, None on the others, which run ahead of it."""
        positions = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        if not self.place.first:
            self.model.set_input_tensor(self._receive(token_ids))
        out = self.model(token_ids, positions, None)
        if self.place.last:
            return out.transpose(0, 1)
        self._sent = [(work, x) for work, x in self._sent if work is not None and not work.is_completed()]
        out = out.contiguous()
        self._sent.append((dist.isend(out, self._neighbour(1)), out))
        return None

    def finish(self) -> None:
        """Wait until the next stage has taken everything."""
        for work, _ in self._sent:
            if work is not None:
                work.wait()
        self._sent.clear()

    def _receive(self, token_ids: Tensor) -> Tensor:
        config = self.model.config
        shape = (token_ids.shape[1], token_ids.shape[0], config.hidden_size)
        states = torch.empty(shape, dtype=config.params_dtype, device=token_ids.device)
        dist.recv(states, self._neighbour(-1))
        return states

    def _neighbour(self, step: int) -> int:
        return dist.get_global_rank(self.place.pipeline_group, self.place.pipeline + step)

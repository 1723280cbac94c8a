"""Training of an MTP head beside a policy, within any loop over a megatron-core GPTModel.

    with head_left_out(chunks):                # Megatron's gradient buffers and optimizer do not see the head
        chunks = [DistributedDataParallel(...) for ...]
        optimizer = get_megatron_optimizer(...)
    head = HeadCotrainer(chunks, config, distribution, zero_first=True)
    ...                                        # forward and backward as usual, with loss_mask given to the model
    numbers = head.step()                      # after the policy's own step

The head's loss is computed at the end of the model, on constants (hidden states, embedding, language-model head). Its
backward pass runs right there, within the forward pass, and has no edge to the policy's graph. So the policy's
gradients are bit for bit the same with and without the head, under any pipeline schedule.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from bebop.config.job import HeadConfig
from bebop.errors import UserError
from bebop.megatron_job.backend import MegatronBackend
from bebop.megatron_job.context import share_of, whole_rows
from bebop.megatron_job.head import constant
from bebop.megatron_job.parallel import here
from bebop.trainer.chains import masked_rows, side_by_side
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling, make_objective


class HeadCotrainer:
    """Head of a model in training, with its loss, gradients and optimizer. Every rank has one."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        config: HeadConfig,
        sampling: Sampling,
        *,
        zero_first: bool,
        anchors: int = 0,
        logits: bool = False,
    ) -> None:
        """Hook into the model chunks of this rank, wrapped or not.

        ``anchors``: as ``most`` of ``masked_rows``.
        ``logits``: the model returns logits although it is given labels (verl does this, and computes the loss itself).

        Raises:
            UserError: a head in Megatron's gradient buffers, or a model without one MTP layer of a known kind.
        """
        self.context: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        self.config, self.anchors, self.logits, place = config, anchors, logits, here()
        self.objective = make_objective(config.objective)
        models: list[Any] = [plain(chunk) for chunk in chunks]
        self.model: Any = next((m for m in models if getattr(m, "mtp", None) is not None), None)
        if place.last and self.model is None:
            raise UserError("the model has no MTP layer: load a checkpoint with one, or set model.mtp.enable=false")
        if self.model is not None:
            check(self.model)
        self.backend = MegatronBackend(self.model or models[0], sampling, place, zero_first=zero_first)
        self.trainer = HeadTrainer(self.backend, config)
        if self.model is not None:
            self.model._postprocess = self._postprocess
        for parameter in self.backend.parameters.values():
            parameter.requires_grad_(False)  # see _needing_gradients
        self.sums = torch.zeros(2, device=self.backend.device)  # loss, what it was summed over
        self.seen = 0  # micro-batches

    def _postprocess(
        self,
        hidden_states: Tensor,
        input_ids: Tensor,
        labels: Tensor | None = None,
        loss_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        runtime_gather_output: bool | None = None,
        **_: Any,
    ) -> Tensor:
        """Replace GPTModel's method: run the head, then return logits [b, s, V] (or the loss, as GPTModel decides)."""
        if loss_mask is not None and torch.is_grad_enabled() and self.model.training:
            states = constant(hidden_states, self.model.config.sequence_parallel)
            self._learn(states, input_ids, loss_mask, packed_seq_params)
        return self._finish(hidden_states, labels, runtime_gather_output)

    def _finish(self, hidden_states: Tensor, labels: Tensor | None, gather: bool | None) -> Tensor:
        """Do the rest of GPTModel's method, after its MTP losses."""
        model = self.model
        tied = model.share_embeddings_and_output_weights
        weight = model.shared_embedding_or_output_weight() if tied else None
        logits, _ = model.output_layer(hidden_states, weight=weight, runtime_gather_output=gather)
        if labels is None or self.logits:
            return logits.transpose(0, 1).contiguous()
        return model.compute_language_model_loss(labels, logits)

    def _learn(self, hidden: Tensor, token_ids: Tensor, loss_mask: Tensor, packed: Any) -> None:
        """Add the gradient of one micro-batch: of the sum over its steps (or anchors), which ``step`` divides.

        ``loss_mask`` is Megatron's: its entry at t belongs to token t + 1.
        """
        parts = hidden, token_ids.T, loss_mask.T  # [s, b, ...]
        starts = None if packed is None else _starts(packed)
        split = dist.get_world_size(self.context) > 1
        if split:
            parts = tuple(whole_rows(x, starts, self.context) for x in parts)  # type: ignore[assignment]
        if starts is None:
            states, token_ids, mask = (x.transpose(0, 1) for x in parts)
        else:
            states, token_ids, mask = (side_by_side(x[:, 0], starts) for x in parts)
        answer = mask.roll(1, -1)
        answer[:, 0] = 0  # a row's first token is never drafted
        self.seen += 1
        rows = masked_rows(token_ids, answer, self.config.depth, self.anchors, self.seen)
        rows = share_of(rows, self.context) if split else rows
        count = rows.count(self.objective.per)
        if count == 0:
            return
        with torch.enable_grad(), self._needing_gradients():
            loss = self.objective.loss(self.backend.steps(rows, states)) * count
            loss.backward()
        self.sums += torch.stack([loss.detach(), loss.new_tensor(count)])

    @contextmanager
    def _needing_gradients(self) -> Iterator[None]:
        """Let the head's parameters require gradients within the block alone.

        Otherwise Megatron would sum gradients of q and k norms over tensor ranks, which the backend does itself.
        """
        parameters = self.backend.parameters.values()
        for parameter in parameters:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in parameters:
                parameter.requires_grad_(False)

    def step(self) -> dict[str, float]:
        """Step the head on the gradients since the last step; every rank calls it.

        Returns:
            head/loss, head/grad_norm (before clipping), head/lr, head/skipped; nothing if there was no chain.
        """
        loss, count = self.backend.total(self.sums).tolist()
        numbers = self.trainer.step(loss / count, 1 / count) if count else {}
        self.discard()
        return numbers

    def discard(self) -> None:
        """Drop the gradients since the last step."""
        self.sums.zero_()
        self.backend.zero_grad()


def _starts(packed: Any) -> Tensor:
    """Return the first positions of rows that lie end to end, padding included, and the end of the last row."""
    padded = getattr(packed, "cu_seqlens_q_padded", None)
    return packed.cu_seqlens_q if padded is None else padded


def plain(chunk: nn.Module) -> nn.Module:
    """Return the GPTModel inside of Megatron's wrappers."""
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    return getattr(inner, "language_model", inner)


def check(model: Any) -> None:
    """Raise ``UserError`` for a GPTModel whose head cannot be trained beside it."""
    if len(model.mtp.layers) != 1:
        raise UserError(f"the model has {len(model.mtp.layers)} MTP layers; one that is used recursively is known")
    if getattr(model.config, "num_moe_experts", None) and any("experts." in n for n, _ in model.mtp.named_parameters()):
        raise UserError(
            "the MTP head has experts, which are not trained beside a policy: adapt it before RL "
            "(python -m bebop.megatron_job.adapt), and set bebop.train_head=false"
        )
    if any(hasattr(p, "main_grad") for p in model.mtp.parameters()):
        raise UserError("the MTP head is in Megatron's gradient buffers: wrap the model within head_left_out")


@contextmanager
def head_left_out(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """Mark the head's parameters as frozen, so that buffers and optimizers made in this block leave them out."""
    models = [getattr(plain(chunk), "mtp", None) for chunk in chunks]
    parameters = [p for mtp in models if mtp is not None for p in mtp.parameters()]
    before = [p.requires_grad for p in parameters]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.requires_grad_(value)

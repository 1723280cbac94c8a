"""The ``HeadBackend`` of a GPTModel's head, over megatron-core's tensor, pipeline, expert and data parallel ranks.

AdamW steps fp32 copies of the head's parameters. They are in none of Megatron's gradient buffers, so neither its norm
nor its clipping nor its optimizer sees them. Left out: sharding of the optimizer's state over data parallel ranks (a
head is one layer), and losses that balance experts: a router learns from the head's own loss.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from bebop.errors import UserError
from bebop.kernels.linear_losses import linear_draft_loss
from bebop.megatron_job.context import SplitContext, own_pieces, share_of, whole_rows
from bebop.megatron_job.head import MegatronHead
from bebop.megatron_job.parallel import Place
from bebop.megatron_job.weights import gather, rule_of
from bebop.model.layouts import join_experts
from bebop.trainer.chains import ChainRows, TokenRow, chain_rows
from bebop.trainer.head_backend import ChainLoss
from bebop.trainer.heads import HeadTrainer, MicroBatch
from bebop.trainer.objectives import Sampling, Steps, unroll

OF_HEADS = ("q_layernorm.weight", "k_layernorm.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitSampling(Sampling):
    """Distribution over shards of logits, in the order of the group's ranks; objectives use it like any other."""

    group: dist.ProcessGroup | None = None  # None: the vocabulary is whole

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the losses."""
        names = ("temperature", "target_top_p", "target_top_k", "group")
        return {name: getattr(self, name) for name in names}


def split_sampling(sampling: Sampling, place: Place) -> SplitSampling:
    """Return ``sampling`` over the tensor ranks; truncated distributions need whole rows (``UserError``)."""
    group = place.tensor_group if place.tensors > 1 else None
    if group is not None and (sampling.target_top_p < 1 or sampling.target_top_k > 0):
        raise UserError("data.sampling: top_p and top_k need the whole vocabulary in one place: set parallel.tensor=1")
    return SplitSampling(
        temperature=sampling.temperature,
        target_top_p=sampling.target_top_p,
        target_top_k=sampling.target_top_k,
        group=group,
    )


class MegatronBackend:
    """One process's part of a head. Ranks of the last pipeline stage have one; the others only take part."""

    scale = 1.0

    def __init__(self, model: Any, sampling: Sampling, place: Place, *, zero_first: bool) -> None:
        """Set up this process's part ``model`` of a GPTModel; on a last stage its MTP layer is trained in place."""
        self.model, self.place, self.rank, self.world = model, place, place.data, place.datas
        self.sampling = split_sampling(sampling, place)
        mtp = getattr(model, "mtp", None)
        self.parameters: dict[str, nn.Parameter] = {}
        if mtp is not None:
            self.head: Any = MegatronHead(mtp.layers[0], model.rotary_pos_emb, zero_first)  # called as an MTPHead
            self.parameters = {f"mtp.{name}": p for name, p in mtp.named_parameters()}
        self.named = {name: p.detach().float().clone() for name, p in self.parameters.items()}
        # By name: Megatron marks parameters as split only where it initialises them itself.
        rules = {name: rule_of(name, 0) for name in self.named}
        self.split = {name: rule.split is not None for name, rule in rules.items()}
        self.of_experts = {name for name, rule in rules.items() if rule.expert is not None}

    @property
    def device(self) -> torch.device:
        """Return the device on which this process computes."""
        return next(self.model.parameters()).device

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Open one step of the trainer, without the gradients of the last step."""
        self.zero_grad()
        yield

    def loss(self, rows: ChainRows, loss: ChainLoss, hidden: Tensor | None) -> Tensor | None:
        """Return the loss of rows with known states [B, L, d], on the last stage."""
        return loss(self.steps(rows, hidden)) if self.place.last and hidden is not None else None

    def steps(self, rows: ChainRows, states: Tensor) -> Steps:
        """Unroll the head's chains over rows with known states [B, L, d]; last stage only."""
        model = self.model
        tied = model.share_embeddings_and_output_weights
        # This rank's rows of the language-model head [V / tensors, d].
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        with torch.no_grad():
            embeddings = embedded(model.embedding.word_embeddings, rows.token_ids)
        depth = rows.steps.max()
        if self.place.experts > 1:  # they exchange tokens at each step, so that all take as many
            dist.all_reduce(depth, dist.ReduceOp.MAX, group=self.place.expert_group)
        return unroll(self.head, embeddings, states, weight, rows, self.sampling, int(depth))

    @torch.no_grad()
    def reduce(self, scale: float) -> Tensor:
        """Sum gradients over data parallel ranks and return their norm, in which copies of a parameter count once."""
        sums = torch.zeros(3, device=self.device)  # split over tensor ranks, of experts, copied
        for name, master in self.named.items():
            grad = self.parameters[name].grad
            master.grad = torch.zeros_like(master) if grad is None else grad.float()
            if name in self.of_experts:
                # The ranks of the expert group have sent their tokens, each tensor rank a copy of the same ones.
                dist.all_reduce(master.grad, group=self.place.copies_group)
                master.grad *= scale / self.place.tensors
                sums[1] += master.grad.pow(2).sum()
                continue
            dist.all_reduce(master.grad, group=self.place.data_group)
            if name.endswith(OF_HEADS):  # a copy, of whose gradient each tensor rank has the part of its heads
                dist.all_reduce(master.grad, group=self.place.tensor_group)
            master.grad *= scale
            sums[0 if self.split[name] else 2] += master.grad.pow(2).sum()
        if self.named:
            dist.all_reduce(sums[:1], group=self.place.tensor_group)
            dist.all_reduce(sums[1:2], group=self.place.expert_group)
        return self._from_last(sums).sum().sqrt()

    def total(self, numbers: Tensor) -> Tensor:
        """Sum ``numbers`` over the data parallel ranks of the last stage; every stage gets the sum."""
        if self.place.last:
            dist.all_reduce(numbers, group=self.place.data_group)
        return self._from_last(numbers)

    @torch.no_grad()
    def stepped(self) -> None:
        """Copy the stepped fp32 weights into the model."""
        for name, master in self.named.items():
            self.parameters[name].copy_(master)

    @torch.no_grad()
    def loaded(self) -> None:
        """Take the model's weights as the fp32 ones, after somebody else has loaded them."""
        for name, master in self.named.items():
            master.copy_(self.parameters[name])

    def weights(self) -> dict[str, Tensor]:
        """Return the whole head in fp32 on the CPU by the names of ``MTPHead``, on every process."""
        config = self.model.config
        groups, heads = config.num_query_groups, config.num_attention_heads
        masters = [(rule_of(name, 0), master) for name, master in self.named.items()]
        mine = gather(masters, self.place, groups, heads // groups)
        boxed = [join_experts({name.removeprefix("mtp."): x for name, x in mine.items()})]
        dist.broadcast_object_list(boxed, dist.get_world_size() * (self.place.pipelines - 1) // self.place.pipelines)
        return boxed[0]

    def _from_last(self, numbers: Tensor) -> Tensor:
        """Broadcast the numbers of the last stage to every stage."""
        last = dist.get_global_rank(self.place.pipeline_group, self.place.pipelines - 1)
        dist.broadcast(numbers, last, group=self.place.pipeline_group)
        return numbers


class FrozenPipeline:
    """Computes final hidden states of rows of text on the last stage.

    States flow only forward, so no schedule has to balance two directions.
    """

    def __init__(self, model: Any, place: Place) -> None:
        """Set up this stage's part ``model``, which ends in hidden states (``BackboneModel``)."""
        self.model, self.place = model, place
        if place.context_group.size() > 1:
            for layer in model.decoder.layers:
                layer.self_attention.core_attention.context = SplitContext(place.context_group)
        self._sent: list[tuple[dist.Work | None, Tensor]] = []  # a message's tensor must live until it is received

    @torch.no_grad()
    def states(self, token_ids: Tensor) -> Tensor | None:
        """Return states [B, L, d] of token ids [B, L] on the last stage; None on the others, which run ahead of it."""
        positions, length = torch.arange(token_ids.shape[1], device=token_ids.device), token_ids.shape[1]
        group, parts = self.place.context_group, self.place.context_group.size()
        if parts > 1:
            token_ids = pad(token_ids, (0, -length % (2 * parts)))
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
            token_ids, positions = own_pieces(token_ids, 1, group), own_pieces(positions, 0, group)
        if not self.place.first:
            self.model.set_input_tensor(self._receive(token_ids))
        out = self.model(token_ids, positions.expand_as(token_ids), None)
        if self.place.last:
            return (out if parts == 1 else whole_rows(out, None, group)[:length]).transpose(0, 1)
        self._sent = [(work, x) for work, x in self._sent if work is not None and not work.is_completed()]
        out = out.contiguous()
        self._sent.append((dist.isend(out, self._neighbour(1)), out))
        return None

    def finish(self) -> None:
        """Wait until the next stage has received everything."""
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


class FrozenBackend(MegatronBackend):
    """Backend that trains only the head: its backbone is frozen and runs through the stages without gradients."""

    def __init__(self, model: Any, sampling: Sampling, place: Place, *, zero_first: bool) -> None:
        """Set up this process's part ``model`` of a ``BackboneModel`` with its weights."""
        model.eval().requires_grad_(False)
        super().__init__(model, sampling, place, zero_first=zero_first)
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self.pipeline = FrozenPipeline(model, place)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Open one step; it ends once the next stage has received everything."""
        with super().updating():
            yield
        self.pipeline.finish()

    def loss(self, rows: ChainRows, loss: ChainLoss, hidden: Tensor | None) -> Tensor | None:
        """Return the loss; unknown states come from a pass through the stages."""
        return super().loss(rows, loss, self.pipeline.states(rows.token_ids) if hidden is None else hidden)

    def backbone_states(self, rows: Sequence[TokenRow], size: int = 32) -> list[Tensor]:
        """Return states [L, d] of each row on the last stage (elsewhere empty); rows of like length share a batch."""
        by_row: dict[int, Tensor] = {}
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
        for start in range(0, len(order), size):
            part = order[start : start + size]
            states = self.pipeline.states(chain_rows([rows[i] for i in part], 1, self.device).token_ids)
            for place, i in enumerate(part):
                length = len(rows[i].token_ids)
                by_row[i] = torch.empty(0) if states is None else states[place, :length].clone()
        self.pipeline.finish()
        return [by_row[i] for i in range(len(rows))]

    @torch.no_grad()
    def overlaps(self, rows: Sequence[TokenRow], depth: int, size: int = 32) -> dict[str, float]:
        """Return eval/overlap/1..depth: mean acceptance of each step on rows of text, without decoding."""
        sums = torch.zeros(2, depth, dtype=torch.float64, device=self.device)  # overlaps, their number
        for start in range(0, len(rows), size):
            batch = chain_rows(rows[start : start + size], depth, self.device)
            states = self.pipeline.states(batch.token_ids)
            if states is not None and int(batch.steps.max()):
                steps = self.steps(batch, states)
                for k in range(steps.mask.shape[2]):
                    chosen = steps.mask[:, :, k]
                    draft, target = (x[:, :, k][chosen] for x in (steps.draft, steps.target))
                    tv = linear_draft_loss(draft, steps.weight, target, steps.weight, **steps.sampling.options())
                    sums[:, k] += torch.stack([tv.alpha.double().sum(), chosen.sum().double()])
        self.pipeline.finish()
        self._from_last(sums)
        return {f"eval/overlap/{k + 1}": float(sums[0, k] / sums[1, k]) for k in range(depth) if sums[1, k] > 0}


class FrozenTrainer(HeadTrainer):
    """Trains the head of a ``FrozenBackend``: context parallel ranks share the chains of each row."""

    backend: FrozenBackend

    def _batches(
        self, rows: Sequence[TokenRow], parts: Sequence[Sequence[int]], hidden: Sequence[Tensor] | None, every: int
    ) -> Iterator[MicroBatch]:
        for layout, known in super()._batches(rows, parts, hidden, every):
            yield share_of(layout, self.backend.place.context_group), known


def embedded(table: Any, token_ids: Tensor) -> Tensor:
    """Return whole embeddings [B, L, d], also where sequence parallelism would scatter them."""
    scatters, table.reduce_scatter_embeddings = table.reduce_scatter_embeddings, False
    try:
        return table(token_ids)
    finally:
        table.reduce_scatter_embeddings = scatters

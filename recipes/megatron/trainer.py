"""Training of an MTP head on megatron-core: what ``bebop.trainer.heads`` does, over tensor, pipeline and data ranks.

The backbone is frozen and runs without gradients through the stages; the last stage owns the head, the language-model
head and its own copy of the embedding, and trains.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bebop.config import HeadConfig
from bebop.errors import UserError
from bebop.kernels.linear_losses import linear_draft_loss
from bebop.megatron_job.checkpoint import load_head, save_head
from bebop.megatron_job.head import MegatronHead
from bebop.megatron_job.optimizer import HeadOptimizer
from bebop.megatron_job.parallel import Place
from bebop.megatron_job.pipeline import FrozenPipeline
from bebop.megatron_job.sampling import split_sampling
from bebop.megatron_job.weights import gather, rule_of
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import ChainRows, TokenRow, chain_rows
from bebop.trainer.heads import HeadTrainer, MicroBatch, Shared
from bebop.trainer.objectives import Objective, Sampling, Steps, unroll


class MegatronHeadTrainer(HeadTrainer):
    """One process of head training; all make the same calls with the same rows. ``update`` is that of HeadTrainer."""

    def __init__(self, model: Any, config: HeadConfig, sampling: Sampling, place: Place, *, zero_first: bool) -> None:
        """``model``: this process's part of a ``BackboneModel`` with its weights; its head changes in place."""
        self.model = model
        self.config, self.place = config, place
        self.rank, self.world, self.beside = place.data, place.datas, False
        self.sampling = split_sampling(sampling, place)
        model.eval().requires_grad_(False)
        self.pipeline = FrozenPipeline(model, place)
        self.head: MegatronHead | None = None
        named: dict[str, nn.Parameter] = {}
        if place.last:
            self.head = MegatronHead(self.model.mtp.layers[0], self.model.rotary_pos_emb, zero_first)
            named = {f"mtp.{name}": p for name, p in self.model.mtp.named_parameters()}
            for parameter in named.values():
                parameter.requires_grad_(True)
        self.named = named
        self.adam = HeadOptimizer(named, config, place, self.device)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return next(self.model.parameters()).device

    @property
    def version(self) -> int:  # type: ignore[override]
        """Finished updates."""
        return self.adam.version

    def _learn(
        self,
        batches: Iterable[MicroBatch],
        total: int,
        objective: Objective,
        scale: float = 1.0,
        shared: Shared | None = None,
    ) -> dict[str, float]:
        """Gradients of the micro-batches, each weighted by its share of ``total``; then a step."""
        if total == 0:
            raise UserError("no answer in these rows is long enough to draft a token of: answers of 1 token or more")
        self.adam.zero_grad()
        loss = torch.zeros((), device=self.device)
        for batch, known in batches:
            states = self._states(batch, known)
            if states is not None:
                value = objective.loss(self.steps(batch, states)) * (batch.count(objective.per) / total)
                value.backward()
                loss += value.detach()
        self.pipeline.finish()
        if self.place.last:
            dist.all_reduce(loss, group=self.place.data_group)
        self._from_last(loss)
        return {"head/loss": float(loss), **self.adam.step()}

    def steps(self, batch: ChainRows, states: Tensor) -> Steps:
        """The head's chains over rows with known states [B, L, d], as the objectives take them; last stage only."""
        assert self.head is not None
        with torch.no_grad():
            embeddings = self.model.embedding.word_embeddings(batch.token_ids)
        head: MTPHead = self.head  # type: ignore[assignment]  # called as one
        return unroll(head, embeddings, states, self.output_weight(), batch, self.sampling)

    def output_weight(self) -> Tensor:
        """This rank's rows of the language-model head [V / tensors, d]; last stage only."""
        tied = self.model.share_embeddings_and_output_weights
        return self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight

    def _states(self, batch: ChainRows, known: Tensor | None) -> Tensor | None:
        """The backbone's states [B, L, d] on the last stage: from the cache, or from a pass through the stages."""
        if known is None:
            return self.pipeline.states(batch.token_ids)
        return known if self.place.last else None

    def backbone_states(self, rows: Sequence[TokenRow], size: int = 32) -> list[Tensor]:
        """States [L, d] of each row on the last stage (elsewhere empty); rows of like length are computed together."""
        found: dict[int, Tensor] = {}
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
        for start in range(0, len(order), size):
            part = order[start : start + size]
            states = self.pipeline.states(chain_rows([rows[i] for i in part], 1, self.device).token_ids)
            for place, i in enumerate(part):
                length = len(rows[i].token_ids)
                found[i] = torch.empty(0) if states is None else states[place, :length].clone()
        self.pipeline.finish()
        return [found[i] for i in range(len(rows))]

    @torch.no_grad()
    def overlaps(self, rows: Sequence[TokenRow], depth: int, size: int = 32) -> dict[str, float]:
        """eval/overlap/1..depth: mean acceptance of each step on rows of text, without decoding."""
        sums = torch.zeros(2, depth, dtype=torch.float64, device=self.device)  # overlaps, their number
        for start in range(0, len(rows), size):
            batch = chain_rows(rows[start : start + size], depth, self.device)
            states = self.pipeline.states(batch.token_ids)
            if states is not None and int(batch.steps.max()):
                steps = self.steps(batch, states)
                for k in range(steps.mask.shape[2]):
                    chosen = steps.mask[:, :, k]
                    pair = (x[:, :, k][chosen] for x in (steps.draft, steps.target))
                    draft, target = pair
                    sampling = steps.sampling.options()
                    found = linear_draft_loss(draft, steps.weight, target, steps.weight, kind="tv", **sampling)
                    sums[:, k] += torch.stack([found.alpha.double().sum(), chosen.sum().double()])
        self.pipeline.finish()
        self._from_last(sums)
        return {f"eval/overlap/{k + 1}": float(sums[0, k] / sums[1, k]) for k in range(depth) if sums[1, k] > 0}

    def weights(self) -> dict[str, Tensor]:
        """The whole head in fp32 on the CPU by the names of ``MTPHead``, on every process."""
        config = self.model.config
        groups, heads = config.num_query_groups, config.num_attention_heads
        found = {name: (rule_of(name, 0), self.adam.masters[name]) for name in self.named}
        mine = gather(found, self.place, groups, heads // groups)
        boxed = [{name.removeprefix("mtp."): x for name, x in mine.items()}]
        dist.broadcast_object_list(boxed, dist.get_world_size() - self.place.datas * self.place.tensors)
        return boxed[0]

    def save(self, folder: Any) -> None:
        """Weights, moments and version as a distributed checkpoint; every process takes part."""
        save_head(folder, self.model, self.adam)

    def restore(self, folder: Any) -> None:
        """Take over what ``save`` wrote, over any number of processes."""
        load_head(folder, self.model, self.adam)

    def _from_last(self, numbers: Tensor) -> None:
        """What the last stage has, on every stage."""
        last = dist.get_global_rank(self.place.pipeline_group, self.place.pipelines - 1)
        dist.broadcast(numbers, last, group=self.place.pipeline_group)

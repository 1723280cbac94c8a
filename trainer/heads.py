"""Training of an MTP head: its own parameters, optimizer, learning rate and gradient norm; the backbone is a constant.

Used before RL (``bebop.adapt``) and beside it (co-training). Master weights are fp32; a bfloat16 model runs under
autocast. What it leaves out: dropout, and any gradient into embedding, language-model head or backbone.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pad_sequence

from bebop.config import HeadConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.trainer.chains import ChainRows, KnownRow, TokenRow, chain_rows, known_chains
from bebop.trainer.objectives import Objective, Sampling, Steps, make_objective, unroll
from bebop.trainer.optim import GuardedAdamW
from bebop.trainer.schedule import warm_up
from bebop.trainer.state import State, load_optimizer_state, optimizer_state, whole_copies

Shared = tuple[Tensor, Tensor]  # token embedding and language-model head, both [V, d]
MicroBatch = tuple[ChainRows, Tensor | None]  # with the hidden states [B, L, d], where they are known


class HeadLoss(nn.Module):
    """The whole pass, from tokens to the loss, in one ``forward``: FSDP2 gathers weights around it."""

    def __init__(self, policy: Policy, sampling: Sampling, mixed: bool) -> None:
        super().__init__()
        assert policy.mtp is not None
        self.policy, self.sampling, self.mixed = policy, sampling, mixed
        self.backbone, self.mtp = policy.backbone, policy.mtp

    def forward(
        self,
        rows: ChainRows,
        loss: Callable[[Steps], Tensor],
        hidden: Tensor | None = None,
        shared: Shared | None = None,
    ) -> Tensor:
        """The loss of some rows; ``hidden`` [B, L, d] saves the backbone's pass where its states are known.

        ``shared``: embedding and language-model head, where the backbone's own are split over the ranks.
        """
        with torch.autocast(rows.token_ids.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            with torch.no_grad():
                if hidden is None:
                    positions = torch.arange(rows.token_ids.shape[1], device=rows.token_ids.device)
                    hidden = self.policy.hidden(rows.token_ids, positions.expand_as(rows.token_ids), CausalContext())
                table = None if shared is None else shared[0]
                embeddings = self.policy.embed(rows.token_ids) if table is None else table[rows.token_ids]
            weight = self.backbone.get_output_embeddings().weight if shared is None else shared[1]
            if self.mixed:
                hidden, embeddings, weight = (x.to(torch.bfloat16) for x in (hidden, embeddings, weight))
            steps = unroll(self.mtp, embeddings, hidden, weight, rows, self.sampling)
            return loss(steps)


class HeadTrainer:
    """One rank of head training. With ``world`` > 1 a process group must be there and all ranks make the same calls."""

    def __init__(
        self,
        policy: Policy,
        config: HeadConfig,
        sampling: Sampling,
        rank: int = 0,
        world: int = 1,
        beside: bool = False,
    ) -> None:
        """Takes ``policy`` over: its head changes in place; with several ranks both are split over them (FSDP2).

        ``beside``: the backbone is being trained by somebody else. It is left alone, and every rank keeps a whole head.
        """
        assert policy.mtp is not None
        if getattr(policy.backbone.get_output_embeddings(), "bias", None) is not None:
            raise UserError("the model's language-model head has a bias, which head training does not have")
        self.policy, self.config, self.rank, self.world, self.beside = policy, config, rank, world, beside
        self.version = 0  # finished updates
        self.mixed = policy.backbone.dtype == torch.bfloat16
        if not beside:
            policy.backbone.eval().requires_grad_(False)
        policy.mtp.float().requires_grad_(True)
        self.module = HeadLoss(policy, sampling, self.mixed)
        if world > 1 and not beside:
            mesh = init_device_mesh(policy.device.type, (world,))
            for layer in policy.backbone.get_decoder().layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.module, mesh=mesh)
        self.named = dict(policy.mtp.named_parameters())
        self.optimizer = GuardedAdamW(
            self.named, config, setting="head.lr", loss="the loss of the MTP head", causes="weights"
        )

    @property
    def device(self) -> torch.device:
        """Where the head computes."""
        return self.policy.device

    def update(
        self, rows: Sequence[TokenRow], objective: str | Objective | None = None, hidden: Sequence[Tensor] | None = None
    ) -> dict[str, float]:
        """One optimizer step on the mean loss of all rows (of all ranks, which are given the same rows).

        ``objective``: its name in ``OBJECTIVES``, or one of another kind; None: the configuration's.
        ``hidden``: the backbone's states [L, d] of each row, where they are known; else they are computed.

        Returns:
            head/loss, head/grad_norm (before clipping), head/lr, head/skipped.

        Raises:
            UserError: fewer rows than ranks, no chain in any row, or the third gradient in a row that is not finite.
        """
        parts = self._micro_batches([len(row.token_ids) for row in rows])
        chosen = objective if isinstance(objective, Objective) else make_objective(objective or self.config.objective)
        total = chain_rows(rows, self.config.depth).count(chosen.per)
        # FSDP averages gradients over the ranks; the loss of the batch is the sum over them.
        return self._learn(self._batches(rows, parts, hidden), total, chosen, scale=self.world)

    def _batches(
        self, rows: Sequence[TokenRow], parts: Sequence[Sequence[int]], hidden: Sequence[Tensor] | None
    ) -> Iterator[MicroBatch]:
        """The rows of each part side by side, one part at a time."""
        for part in parts:
            known = None if hidden is None else pad_sequence([hidden[i] for i in part], batch_first=True)
            yield chain_rows([rows[i] for i in part], self.config.depth, self.device), known

    def update_share(self, rows: Sequence[KnownRow], shared: Shared | None = None) -> dict[str, float]:
        """``update`` with rows that are this rank's own, ``beside`` a policy."""
        assert self.beside
        chosen = make_objective(self.config.objective)
        parts = self._fitting(rows)
        layouts = [known_chains(part, self.config.depth) for part in parts]
        total = sum(layout.count(chosen.per) for layout in layouts)
        if self.world > 1:
            everybody = torch.tensor(total, device=self.policy.device)
            torch.distributed.all_reduce(everybody)
            total = int(everybody)
        hidden = (pad_sequence([row.hidden for row in part], batch_first=True) for part in parts)
        return self._learn(zip(layouts, hidden, strict=True), max(1, total), chosen, shared=shared)

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
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for batch, known in batches:
            value = self.module(batch, objective.loss, known, shared) * (batch.count(objective.per) / total)
            (value * scale).backward()
            loss += value.detach()
        return self._descend(loss)

    def _fitting(self, rows: Sequence[KnownRow]) -> list[list[KnownRow]]:
        """Rows by length, in micro-batches of at most ``max_tokens`` with padding."""
        parts: list[list[KnownRow]] = []
        for row in sorted(rows, key=lambda row: -len(row.token_ids)):
            if parts and (len(parts[-1]) + 1) * len(parts[-1][0].token_ids) <= self.config.max_tokens:
                parts[-1].append(row)
            else:
                parts.append([row])
        return parts

    def _micro_batches(self, lengths: Sequence[int]) -> list[list[int]]:
        """This rank's rows in micro-batches of at most ``max_tokens`` with padding; as many of them on every rank."""
        if len(lengths) < self.world:
            raise UserError(f"{len(lengths)} rows cannot be split over {self.world} ranks: give more rows a step")
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        shares = [order[rank :: self.world] for rank in range(self.world)]
        fit = max(1, self.config.max_tokens // max(lengths))
        count = min(len(shares[-1]), math.ceil(len(shares[0]) / fit))
        mine = shares[self.rank]
        ends = [math.ceil(len(mine) * i / count) for i in range(count + 1)]
        return [mine[a:b] for a, b in pairwise(ends)]

    def _descend(self, loss: Tensor) -> dict[str, float]:
        """Gradients summed over the ranks where each has a whole head, then the guarded step."""
        if self.beside and self.world > 1:
            for parameter in self.named.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(parameter.grad)
        numbers = self.optimizer.guarded_step(warm_up(self.config, self.version))
        self.version += 1
        if self.world > 1:
            torch.distributed.all_reduce(loss)
        return {"head/loss": float(loss), **{f"head/{name}": value for name, value in numbers.items()}}

    def weights(self) -> dict[str, Tensor]:
        """The head's full fp32 weights on the CPU, by the names of ``MTPHead``; all ranks take part."""
        return whole_copies(self.named)

    def state_dict(self) -> State:
        """All that an exact resume needs, unsharded: any number of ranks can load it."""
        return {"version": self.version, **optimizer_state(self.optimizer)}

    def load_state_dict(self, state: State) -> None:
        """Take over a ``state_dict``; ``UserError`` if it belongs to another head."""
        load_optimizer_state(self.optimizer, state, "head")
        self.version = state["version"]

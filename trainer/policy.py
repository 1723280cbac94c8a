"""The policy, its optimizer, and GRPO updates over any number of ranks: it takes batches and returns weights.

There is no dropout on purpose: the model stays in ``eval``, so that the trainer's distribution is the engine's. Master
weights are fp32; a bfloat16 model computes in bfloat16 (``Scorer``) and is published in bfloat16.

With ``trainer.lora`` the optimizer has the parameters of an adapter alone, and the model's own weights stay as they
were loaded. They are also the reference of the KL term, so no second copy is made.

The MTP head, or the drafter in its place, is frozen, or co-trained on the hidden states that the policy's own update
computes anyway. Everything of the policy is a constant there: hidden states, embedding and language-model head are
detached. Optimizer, learning rate, clipping and gradient norm are the head's own, so that the policy's update is the
same to the bit with and without it.
"""

import copy
import math
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from bebop.config.job import MAX_BATCH_TOKENS, DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.metrics.metrics import Mean, Metrics, Sum, merge
from bebop.model.backbone import Policy
from bebop.model.checkpoint import find_device, resolve
from bebop.model.fingerprint import fingerprint
from bebop.model.lora import Adapter, plain_name
from bebop.model.memory import checkpoints_layers, micro_batch, sums_once
from bebop.model.routing import Replay, check_routing
from bebop.model.sharded import fill, on_meta
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.systems import PARTS
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.losses import (
    AGGREGATIONS,
    advantages,
    busiest_expert,
    policy_loss,
    ratio_metrics,
    routing_metrics,
    same_weights_metrics,
    weight_metrics,
)
from bebop.trainer.objectives import Sampling
from bebop.trainer.old_policies import OldPolicies, evenly_spaced
from bebop.trainer.optim import (
    GuardedAdamW,
    State,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    random_state,
    set_random_state,
)
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.probe_set import ProbeReader
from bebop.trainer.scorer import Scorer, recompute_layers, shard, whole
from bebop.trajectory import Batch, Group, Trajectory


class TracedLogprobs:
    """The trainer's log-probs of the completions that the engine traced, kept from the passes of an update.

    For one update and one rank it maps the place of a completion in the batch, group by group, to log p [T] of its
    tokens. p is the distribution that is trained (temperature applied, no truncation), under the weights before any
    step.
    """

    def __init__(self, trajectories: Sequence[Trajectory] = ()) -> None:
        """Start without log-probs; ``trajectories`` are those of the whole batch."""
        traced = [all(turn.completion.trace is not None for turn in t.turns) for t in trajectories]
        self._wanted = {place for place, one in enumerate(traced) if one}
        self.found: dict[int, NDArray[np.float32]] = {}

    def add(self, first: int, rows: PackedRows, logp: Tensor) -> None:
        """Add the log-probs [A] of a micro-batch.

        Its minibatch begins with completion number ``first`` of the batch.
        """
        places = [first + number if number >= 0 else -1 for number in rows.rows.tolist()]
        if self._wanted.isdisjoint(places):
            return
        parts = logp.detach().float().cpu().split(rows.answers.tolist())
        for place, part in zip(places, parts, strict=True):
            if place in self._wanted:
                self.found[place] = part.numpy().copy()  # a view would keep the whole micro-batch


class PolicyTrainer:
    """One rank of the trainer. With ``world`` > 1 a process group must exist and all ranks make the same calls."""

    def __init__(self, policy: Policy, config: JobConfig, rank: int = 0, world: int = 1) -> None:
        """Use ``policy``, whose weights change in place (and are split over the ranks).

        A backbone on the meta device (``load_policy`` with ``sharded``) is filled once it is split.
        """
        self.policy, self.config, self.rank, self.world = policy, config, rank, world
        device = find_device(config.model) if on_meta(policy.backbone) else policy.device
        self.max_tokens, checkpointing, self.sum_once = self._fit(config, device)
        self.version = 0  # finished updates
        self.traced = TracedLogprobs()  # of the latest update
        self.loads: list[Tensor] = []  # of each micro-batch of this update and rank: [R, E] times that experts are used
        self.stopping = threading.Event()  # set by another thread: drop the update in progress, see ``update``
        self.mixed = config.model.dtype == "bfloat16"
        policy.backbone.eval().requires_grad_(True)
        if policy.head is not None:
            policy.head.requires_grad_(False)
        self.adapter: Adapter | None = None
        if (lora := config.trainer.lora).rank:
            base = resolve(config.model.path)
            self.adapter = Adapter(policy.backbone, lora, config.runtime.seed, base, policy.stock)
        elif self.mixed and world == 1:
            policy.backbone.float()  # several ranks convert after the split, see ``_shard``
        temperature = config.rollout.sampling.temperature
        self._trained_head: State | None = None  # of a run that co-trained before, while this one does not
        self._drafts_with_it = False  # else decoding has changed, and drafts are another head's or nobody's
        self.head_trainer: HeadTrainer | None = None
        if config.cotrain.mode != "off":
            make = PARTS[policy.drafting].backend if policy.drafting else None
            kind: type[WholeBackend] = WholeBackend if make is None else make()
            backend = kind(policy, Sampling.of(config.rollout.sampling), rank, world, self.mixed)
            self.head_trainer = HeadTrainer(backend, config.cotrain.head, "cotrain.head.lr")
        self.scorer, self.reference = Scorer(policy, temperature, self.mixed), None
        if self.head_trainer is not None:
            self.scorer.taps = backend.taps
        if config.algorithm.kl_coefficient and self.adapter is None:
            # Split over ranks it is in the type that it is gathered in: half of the memory.
            self.reference = Scorer(_frozen(policy, world), temperature, self.mixed)
        self._watch_routing()
        if checkpointing:
            recompute_layers(policy)  # of the policy alone: the reference has no backward pass
        if world > 1:
            self._shard(device)
        causes = "rewards and log-probs"
        self.optimizer = GuardedAdamW(
            {name: p for name, p in policy.weights().items() if p.requires_grad},
            config.trainer,
            setting="trainer.lr",
            loss="the loss",
            causes=causes,
        )
        looked = config.monitor.check_completions or config.monitor.certify_every
        past = config.rollout.staleness if looked and not config.algorithm.rescore else 0
        sent = torch.bfloat16 if self.mixed and self.adapter is None else None  # adapters are not sent, but merged
        self.old_policies = OldPolicies(self.scorer, past, sent)

    def update(self, batch: Batch, cotrain: bool = False) -> Metrics:
        """Learn from a batch in ``minibatches`` optimizer steps, increase ``version``, and return metrics.

        The metrics are the same on every rank. With ``cotrain`` the MTP head takes a step as well, on the hidden states
        of this update. Once ``stopping`` is set, an update that has taken no optimizer step ends between two
        micro-batches. Weights and ``version`` are as before then, and there are no metrics. An update of a large model
        takes many minutes, but a process that has to stop has only seconds.

        Raises:
            UserError: completions of an inexact system without ``algorithm.rescore``, or the third gradient in a row
                that is not finite.
        """
        self._check(batch)
        compared = self._compare_past(batch)
        self.old_policies.keep(self.version)
        parted = _split(batch.groups, self.config.algorithm.minibatches)
        minibatches = [self._packed(groups) for groups in parted]
        firsts = accumulate((sum(len(g.trajectories) for g in groups) for groups in parted), initial=0)
        self.traced = TracedLogprobs(batch.trajectories)
        weighted = any(not t.completion.exact for t in batch.trajectories)
        # Before any step. The first minibatch needs no pass of its own: its weights are still the proximal ones.
        proximal = [None, *(self._logprobs(rows) for rows in minibatches[1:])]
        self.scorer.kept = [] if cotrain and self.head_trainer is not None else None
        self.loads = []
        parts: list[Metrics] = []
        for minibatch in zip(firsts, minibatches, proximal, strict=False):
            learned = self._step(*minibatch, weighted)
            if learned is None:
                return {}
            parts.append(learned)
        if self.scorer.kept is not None and self.head_trainer is not None:
            kept, self.scorer.kept = self.scorer.kept, None
            rows = [row for packed, hidden in kept for row in packed.known(hidden) if row.answer.any()]
            numbers = self.head_trainer.update_share(rows)
            parts.append({name: Mean(value, 1.0) for name, value in numbers.items()} if self.rank == 0 else {})
        self.version += 1
        if self.scorer.routers is not None:
            loads = [one for own in self._all_ranks(self.loads) for one in own]
            parts.append(busiest_expert(torch.stack(loads).sum(0)))
        return self._gathered(merge(compared, *parts))

    def _shard(self, device: torch.device) -> None:
        """Split policy and reference over the ranks, and convert the rows of master weights to fp32.

        They are converted after the split: a whole model in fp32 may not fit on a GPU that holds it in bfloat16.
        """
        masters = self.mixed and self.adapter is None
        if masters and on_meta(self.policy.backbone):
            self.policy.backbone.float()  # takes no memory yet, and is filled in fp32
        mesh = init_device_mesh(device.type, (self.world,))
        for scorer in filter(None, (self.scorer, self.reference)):
            shard(scorer, mesh)
            if on_meta(scorer.backbone):
                fill(scorer.backbone, resolve(self.config.model.path), device)
        if masters:
            self.scorer.float()

    def _watch_routing(self) -> None:
        """Watch the routers of policy and reference, if the settings need it or the family is known.

        Raises:
            UserError: Settings need routers that the model does not have.
        """
        trainer, policy = self.config.trainer, self.policy
        if check_routing(policy.backbone, trainer.routing_replay, trainer.router_aux_loss, policy.stock):
            for scorer in filter(None, (self.scorer, self.reference)):
                scorer.watch_routing(trainer.routing_replay, trainer.router_aux_loss > 0)

    def _fit(self, config: JobConfig, device: torch.device) -> tuple[int, bool, bool]:
        """Return three settings, the same on every rank, that fit the memory of all ranks.

        They are the tokens of a micro-batch, whether layers are computed again in the backward pass, and whether
        gradients are summed up once a minibatch.
        """
        model, dtype, trainer = self.policy.backbone.config, getattr(torch, config.model.dtype), config.trainer
        again = trainer.checkpointing
        if again is None:
            wanted = checkpoints_layers(model, dtype, device, self.world, trainer.max_tokens or MAX_BATCH_TOKENS)
            again = any(self._all_ranks(wanted))
        tokens = trainer.max_tokens
        if tokens is None:
            fits = micro_batch(model, dtype, device, self.world, MAX_BATCH_TOKENS, checkpointing=again)
            tokens = int(min(self._all_ranks(fits)))
        once = trainer.gradient_sync == "minibatch"
        if trainer.gradient_sync == "auto":
            count = sum(p.numel() for p in self.policy.backbone.parameters())
            once = all(self._all_ranks(sums_once(count, device, self.world)))
        return tokens, again, once

    @property
    def head_changed(self) -> bool:
        """Return whether the head differs from the checkpoint's, so that it has to be sent to engines."""
        if self.head_trainer is None:
            return self._drafts_with_it
        return self.head_trainer.version > 0

    def head_fingerprint(self) -> str:
        """Return the fingerprint of the head that engines should have, in the model's dtype; empty without a head."""
        if self.policy.head is None:
            return ""
        dtype = torch.bfloat16 if self.mixed else None
        return fingerprint(dict(self.policy.head.named_parameters()), dtype)

    def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool = False, decoding: DecodingConfig | None = None
    ) -> tuple[ProbeReading, Sweep | None]:
        """Read the monitor's fixed texts under the current weights (``ProbeReader``). All ranks take part.

        ``decoding``: how drafts are made now; None: as configured.
        """
        reader = ProbeReader(
            policy=self.policy,
            scorer=self.scorer,
            sampling=self.config.rollout.sampling,
            decoding=decoding or self.config.decoding,
            max_tokens=self.max_tokens,
            rank=self.rank,
            world=self.world,
        )
        return reader.read(texts, sweep)

    def weights(self, mtp: bool = False) -> dict[str, Tensor]:
        """Return full weights on the CPU, in the model's dtype, by the names of ``Policy.weights()``.

        The result is empty on ranks above 0.
        """
        types = {name: dtype for name, (_, dtype) in self.layout(mtp).items()}
        full = self.full_weights(mtp)
        return {name: t.to("cpu", types[name], copy=True) for name, t in full if self.rank == 0}

    def layout(self, mtp: bool = False) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of each weight that is sent to engines, by the names of ``full_weights``."""
        dtype = torch.bfloat16 if self.mixed else None
        named = {plain_name(name): tensor for name, tensor in self.policy.weights(mtp).items()}
        return {name: (tuple(t.shape), dtype or t.dtype) for name, t in named.items() if name is not None}

    @torch.no_grad()
    def full_weights(self, mtp: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Yield full weights one after another, on the trainer's device and in its dtype; all ranks take part."""
        named = self.policy.weights(mtp)
        if self.adapter is not None:
            yield from self.adapter.merged(named, whole)
            return
        for name, tensor in named.items():
            yield name, whole(tensor.detach())

    def state_dict(self) -> State:
        """Return the state for an exact resume, by parameter name, unsharded: any number of ranks can load it.

        Weights and optimizer are empty on ranks above 0.
        """
        return {
            "version": self.version,
            "rng": self._all_ranks(random_state()),
            **optimizer_state(self.optimizer, keep=self.rank == 0),
            "head": self._trained_head if self.head_trainer is None else self.head_trainer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Load the ``state_dict`` of rank 0, the same on every rank; raise ``UserError`` if it is of another model."""
        load_optimizer_state(self.optimizer, state, f"model than model.path={self.config.model.path!r}")
        self.old_policies.forget()
        self.version = state["version"]
        if state.get("head") is not None:
            self._load_head(state["head"])
        if self.rank < len(state["rng"]):
            set_random_state(state["rng"][self.rank])

    def _load_head(self, state: State) -> None:
        """Continue with a co-trained head; if it is frozen or not used from now on, its state is kept for later."""
        if self.head_trainer is not None:
            self.head_trainer.load_state_dict(state)
        elif state["version"] > 0:
            self._trained_head = state
            own = {} if self.policy.head is None else dict(self.policy.head.named_parameters())
            self._drafts_with_it = own.keys() == state["weights"].keys()
            if self._drafts_with_it:
                with torch.no_grad():
                    for name, parameter in own.items():
                        parameter.copy_(state["weights"][name])

    def _check(self, batch: Batch) -> None:
        """Raise ``UserError`` for completions whose log-probs are of a distribution that the trainer does not know."""
        unknown = any(not t.completion.weighable for t in batch.trajectories)
        if unknown and not self.config.algorithm.rescore:
            system = self.config.decoding.system
            raise UserError(
                f"decoding.system={system!r} changes the distribution of completions, and does not say to which: set "
                "algorithm.rescore=true to train on them"
            )

    def _packed(self, groups: Sequence[Group]) -> list[PackedRows]:
        """Return this rank's micro-batches of a minibatch, on its device.

        Advantages and weights come from the whole minibatch.
        """
        algorithm, limit = self.config.algorithm, self.config.rollout.sampling.max_new_tokens
        pairs = [(group.prompt, t.completion) for group in groups for t in group.trajectories]
        lengths = np.array([int(completion.written.sum()) for _, completion in pairs])
        weights = AGGREGATIONS[algorithm.aggregation](lengths, limit)
        rows = [
            Row(prompt=prompt.token_ids, completion=completion, advantage=float(advantage), weight=float(weight))
            for (prompt, completion), advantage, weight in zip(
                pairs, advantages(groups, algorithm.advantage).ravel(), weights, strict=True
            )
        ]
        return self._share(rows)

    def _share(self, rows: Sequence[Row]) -> list[PackedRows]:
        """Return this rank's micro-batches of some rows, on its device; every rank gets as many."""
        packed = pack(rows, self.max_tokens, self.world)[self.rank :: self.world]
        return [part.to(self.policy.device, self.scorer.loss_dtype) for part in packed]

    def _compare_past(self, batch: Batch) -> Metrics:
        """Compare some tokens that older weights produced, under those weights, with the engine.

        Tokens of the current weights are compared during the update.
        """
        pairs = [(group.prompt, t.completion) for group in batch.groups for t in group.trajectories]
        rows = [
            Row(prompt=prompt.token_ids, completion=completion, advantage=0.0, weight=0.0)
            for prompt, completion in evenly_spaced(pairs, self.config.monitor.check_completions)
        ]
        versions = {int(v) for row in rows for v in np.unique(row.completion.versions)}
        return self.old_policies.compare(self._share(rows), versions)

    @torch.no_grad()
    def _logprobs(self, packed: Sequence[PackedRows]) -> list[Tensor]:
        """Return log-probs [A] of each micro-batch under the current weights."""
        return [self.scorer(rows)[0] for rows in packed]

    def _step(
        self, first: int, packed: Sequence[PackedRows], proximal: Sequence[Tensor] | None, weighted: bool
    ) -> Metrics | None:
        """Take one optimizer step on a minibatch, which begins with completion number ``first`` of the batch.

        Return None if ``stopping`` was set before the first step of the update. If ``proximal`` is None, the current
        weights are the proximal ones. ``weighted``: some completions are of an inexact system, so metrics of importance
        weights are added.
        """
        self.optimizer.zero_grad()
        parts: list[Metrics] = []
        tokens = self._tokens_of_ranks(packed)
        for i, rows in enumerate(packed):
            if first == 0 and any(self._all_ranks(self.stopping.is_set())):
                self.optimizer.zero_grad()
                return None
            reference = self._reference_logprobs(rows)
            logp, entropy = self.scorer(rows)
            prox = logp.detach() if proximal is None else proximal[i]
            self.traced.add(first, rows, prox)
            rollout_logprobs = prox if self.config.algorithm.rescore else rows.rollout_logprobs
            loss, metrics = policy_loss(
                self.config.algorithm,
                logp=logp,
                entropy=entropy,
                proximal=prox,
                rollout_logprobs=rollout_logprobs,
                advantages=rows.advantages,
                answers=rows.answers,
                weights=rows.weights,
                reference=reference,
            )
            balance: Tensor | float = 0.0
            if self.scorer.routing is not None:
                balance, more = self._balance(self.scorer.routing, _tokens(rows) / tokens)
                metrics |= more
            if isinstance(self.scorer, FSDPModule):  # else each backward pass sends a gradient of the whole model
                self.scorer.set_requires_gradient_sync(not self.sum_once or i == len(packed) - 1)
            # FSDP averages gradients over the ranks; the loss of the minibatch is the sum over them.
            ((loss + balance) * self.world).backward()
            # Counts add up to 1 over micro-batches and ranks, as the minibatch's loss is the sum of its parts.
            metrics["train/loss"] = Mean(float(loss.detach()), 1 / (len(packed) * self.world))
            parts += [metrics, ratio_metrics(prox, rollout_logprobs)]
            if not self.config.algorithm.rescore:
                parts.append(same_weights_metrics(rows, prox, self.version))
            if weighted and not self.config.algorithm.rescore:
                parts.append(weight_metrics(self.config.algorithm, prox, rollout_logprobs, rows.answers))
        return merge(*parts, self._descend())

    def _tokens_of_ranks(self, packed: Sequence[PackedRows]) -> int:
        """Return the tokens of a minibatch on all ranks if they weight a load balancing loss; else 1."""
        if not self.config.trainer.router_aux_loss:
            return 1
        return int(sum(self._all_ranks(sum(_tokens(rows) for rows in packed))))

    def _balance(self, routing: Replay, share: float) -> tuple[Tensor | float, Metrics]:
        """Return the load balancing loss that the latest pass adds, and metrics of its routers.

        ``share``: its part of the minibatch's tokens. The balance of a minibatch is the mean over its micro-batches.
        """
        self.loads.append(torch.stack([routing.loads[place] for place in range(routing.routers.count)]).cpu())
        metrics = routing_metrics(routing)
        if not (weight := self.config.trainer.router_aux_loss):
            return 0.0, metrics
        balance = routing.balancing_loss()
        metrics["train/router_aux_loss"] = Mean(float(balance.detach()) * share, share)
        return weight * share * balance, metrics

    def _descend(self) -> Metrics:
        """Take the guarded step; return metrics on rank 0 only."""
        numbers = self.optimizer.guarded_step(learning_rate(self.config.trainer, self.version))
        if self.rank:
            return {}
        metrics: Metrics = {f"train/{name}": Mean(value, 1) for name, value in numbers.items()}
        return metrics | {"train/skipped": Sum(numbers["skipped"])}

    @torch.no_grad()
    def _reference_logprobs(self, rows: PackedRows) -> Tensor | None:
        """Return log-probs [A] under the policy before the first update; None without a KL term."""
        if self.adapter is None or not self.config.algorithm.kl_coefficient:
            return None if self.reference is None else self.reference(rows)[0]
        kept, self.scorer.kept = self.scorer.kept, None  # the head learns from the states of the policy alone
        with self.adapter.disabled():
            logp: Tensor = self.scorer(rows)[0]
        self.scorer.kept = kept
        return logp

    def _all_ranks(self, value: Any) -> list[Any]:
        """Return the values of all ranks in a list, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def _gathered(self, metrics: Metrics) -> Metrics:
        return merge(*self._all_ranks(metrics))


def _tokens(rows: PackedRows) -> int:
    """Return the tokens of a micro-batch; 0 for a filler."""
    return len(rows.token_ids) if len(rows.targets) else 0


def _frozen(policy: Policy, world: int) -> Policy:
    """Return a copy of the backbone for the KL term, without gradients.

    With several ranks its weights are on the CPU, from which ``shard`` moves one layer at a time: a GPU may have no
    room for a second whole model.
    """
    copies: dict[int, Any] = {}  # copied weights, by the ``id`` of the original
    if world > 1 and not on_meta(policy.backbone):
        copies = {id(p): nn.Parameter(p.detach().to("cpu", copy=True)) for p in policy.backbone.parameters()}
    backbone = copy.deepcopy(policy.backbone, copies).requires_grad_(False)
    return Policy(backbone=backbone, tokenizer=policy.tokenizer, mtp=None, layout=policy.layout, stock=policy.stock)


def _split(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Split groups in order, as evenly as possible, into ``count`` minibatches (fewer if there are fewer groups)."""
    ends = [math.ceil(len(groups) * i / count) for i in range(count + 1)]
    return [list(groups[a:b]) for a, b in pairwise(ends) if a < b]

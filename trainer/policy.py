"""Batches in, weights out: the policy, its optimizer, and one GRPO update over any number of ranks.

What it leaves out on purpose: dropout (the model stays in ``eval``, so that the trainer's distribution is the
engine's). The MTP head is frozen, or co-trained beside the policy with an optimizer of its own (``cotrain.py``). Master
weights are fp32; a bfloat16 model is trained under autocast and published in bfloat16.
"""

import copy
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.metrics import Mean, Metrics, Sum, merge
from bebop.model.backbone import Policy
from bebop.model.fingerprint import fingerprint
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.trainer.advantages import advantages
from bebop.trainer.cotrain import CoTrainer
from bebop.trainer.losses import AGGREGATIONS, policy_loss, ratio_metrics, same_weights_metrics
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.past import PastWeights, some
from bebop.trainer.probe_set import ProbeReader
from bebop.trainer.schedule import learning_rate
from bebop.trainer.scorer import Scorer, like, shard, whole
from bebop.trajectory import Batch, Group

MAX_SKIPPED = 3  # optimizer steps in a row without a finite gradient before the run gives up

State = dict[str, Any]


class PolicyTrainer:
    """One rank of the trainer. With ``world`` > 1 a process group must be there and all ranks make the same calls."""

    def __init__(self, policy: Policy, config: JobConfig, rank: int = 0, world: int = 1) -> None:
        """Takes ``policy`` over: its weights change in place (and are split over the ranks)."""
        self.policy, self.config, self.rank, self.world = policy, config, rank, world
        self.version = 0  # finished updates
        self._skipped = 0  # steps skipped in a row
        self.mixed = config.model.dtype == "bfloat16"
        policy.backbone.eval().requires_grad_(True)
        if policy.mtp is not None:
            policy.mtp.requires_grad_(False)
        if self.mixed:
            policy.backbone.float()
        temperature = config.rollout.sampling.temperature
        self._trained_head: State | None = None  # of a run that co-trained before, while this one does not
        self.cotrainer: CoTrainer | None = None
        if config.cotrain.mode != "off":
            self.cotrainer = CoTrainer(policy, config.cotrain.head, temperature, rank, world)
        self.scorer = Scorer(policy, temperature, self.mixed)
        self.reference = Scorer(_frozen(policy), temperature, self.mixed) if config.algorithm.kl_coefficient else None
        if world > 1:
            mesh = init_device_mesh(policy.device.type, (world,))
            for scorer in filter(None, (self.scorer, self.reference)):
                shard(scorer, mesh)
        self.optimizer = self._make_optimizer()
        past = config.rollout.staleness if config.monitor.check_answers and not config.algorithm.rescore else 0
        self.past = PastWeights(self.scorer, past, torch.bfloat16 if self.mixed else None)

    def update(self, batch: Batch, cotrain: bool = False) -> Metrics:
        """Learn from a batch: ``minibatches`` optimizer steps, then ``version`` + 1. The same metrics on every rank.

        ``cotrain``: the MTP head takes a step as well, on the hidden states of this update.

        ``UserError`` for answers of an inexact system without ``algorithm.rescore``, and after the third step in a row
        whose gradient is not finite.
        """
        self._check(batch)
        compared = self._compare_past(batch)
        self.past.keep(self.version)
        count = self.config.algorithm.minibatches
        minibatches = [self._packed(groups) for groups in _split(batch.groups, count)]
        # Before any step. The first minibatch needs no pass of its own: its weights are still the proximal ones.
        proximal = [None, *(self._logprobs(rows) for rows in minibatches[1:])]
        self.scorer.kept = [] if cotrain and self.cotrainer is not None else None
        parts = [self._step(rows, prox) for rows, prox in zip(minibatches, proximal, strict=True)]
        if self.scorer.kept is not None and self.cotrainer is not None:
            kept, self.scorer.kept = self.scorer.kept, None
            learned = self.cotrainer.update(kept)
            parts.append(learned if self.rank == 0 else {})
        self.version += 1
        return self._gathered(merge(compared, *parts))

    @property
    def head_changed(self) -> bool:
        """Whether the head is another one than the checkpoint's, so that engines have to be sent it."""
        if self.cotrainer is None:
            return self._trained_head is not None
        return self.cotrainer.version > 0

    def head_fingerprint(self) -> str:
        """Of the head that engines should have, in the model's dtype; empty without a head."""
        if self.policy.mtp is None:
            return ""
        dtype = torch.bfloat16 if self.mixed else None
        return fingerprint(dict(self.policy.mtp.named_parameters()), dtype)

    def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool = False, decoding: DecodingConfig | None = None
    ) -> tuple[ProbeReading, Sweep | None]:
        """The monitor's fixed texts under the weights of now; see ``ProbeReader``. All ranks take part.

        ``decoding``: how drafts are made by now; None: as configured.
        """
        reader = ProbeReader(
            policy=self.policy,
            scorer=self.scorer,
            sampling=self.config.rollout.sampling,
            decoding=decoding or self.config.decoding,
            max_tokens=self.config.trainer.max_tokens,
            rank=self.rank,
            world=self.world,
        )
        return reader.read(texts, sweep)

    def weights(self, mtp: bool = False) -> dict[str, Tensor]:
        """Full weights on the CPU, in the model's dtype, named as in ``Policy.weights()``; empty on ranks above 0."""
        dtype = torch.bfloat16 if self.mixed else None
        return self._collected(self.policy.weights(mtp), dtype)

    def whole_policy(self, weights: dict[str, Tensor]) -> Policy:
        """The policy unsharded, on the CPU, with the given backbone weights (``state_dict()["weights"]``)."""
        backbone = self.policy.backbone
        with torch.device("meta"):
            twin = type(backbone)(copy.deepcopy(backbone.config))
        named = {name.removeprefix("backbone."): tensor for name, tensor in weights.items()}
        twin.load_state_dict(named, strict=False, assign=True)  # a tied head is not listed: it follows the embedding
        twin.tie_weights()
        twin.generation_config = backbone.generation_config
        return Policy(backbone=twin, tokenizer=self.policy.tokenizer, mtp=self.policy.mtp, layout=self.policy.layout)

    def state_dict(self) -> State:
        """All that an exact resume needs, by parameter name, unsharded: any number of ranks can load it.

        Weights and optimizer are empty on ranks above 0.
        """
        named = self.policy.weights()
        states = {name: self.optimizer.state[p] for name, p in named.items() if p in self.optimizer.state}
        moments = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
        return {
            "version": self.version,
            "skipped": self._skipped,
            "rng": self._all_ranks(_rng()),
            "weights": self._collected(named),
            "optimizer": self._collected(moments),
            "head": self._trained_head if self.cotrainer is None else self.cotrainer.state_dict(),
        }

    def load_state_dict(self, state: State) -> None:
        """Take over a ``state_dict`` of rank 0; every rank is given the same. ``UserError`` if the model is another."""
        named = self.policy.weights()
        found = {name: tuple(t.shape) for name, t in state["weights"].items()}
        wanted = {name: tuple(p.shape) for name, p in named.items()}
        if found != wanted:
            name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
            shapes = f"{name} has shape {found.get(name)}, the model needs {wanted.get(name)}"
            raise UserError(
                f"the checkpoint belongs to another model than model.path={self.config.model.path!r}: {shapes}"
            )
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(like(state["weights"][name], parameter))
        self.optimizer.state.clear()
        for key, value in state["optimizer"].items():
            name, field = key.rsplit("/", 1)
            # The step count is a scalar that AdamW keeps on the CPU; the moments live where their parameter lives.
            self.optimizer.state[named[name]][field] = (
                value.clone() if value.dim() == 0 else like(value, named[name]).clone()
            )
        self.past.forget()
        self.version, self._skipped = state["version"], state["skipped"]
        if state.get("head") is not None:
            self._load_head(state["head"])
        if self.rank < len(state["rng"]):
            _set_rng(state["rng"][self.rank])

    def _load_head(self, state: State) -> None:
        """Go on with a co-trained head; where it is frozen from now on, its state is kept for later."""
        if self.cotrainer is not None:
            self.cotrainer.load_state_dict(state)
        elif state["version"] > 0 and self.policy.mtp is not None:
            self._trained_head = state
            with torch.no_grad():
                for name, parameter in self.policy.mtp.named_parameters():
                    parameter.copy_(state["weights"][name])

    def _make_optimizer(self) -> torch.optim.AdamW:
        """AdamW over the backbone; norms and biases do not decay."""
        config = self.config.trainer
        parameters = list(self.scorer.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)

    def _check(self, batch: Batch) -> None:
        """Refuse answers whose recorded log-probs are not those of a distribution that the trainer knows."""
        inexact = any(not t.completion.exact for t in batch.trajectories)
        if inexact and not self.config.algorithm.rescore:
            system = self.config.decoding.system
            raise UserError(
                f"decoding.system={system!r} changes the distribution of answers: set algorithm.rescore=true "
                "to train on them"
            )

    def _packed(self, groups: Sequence[Group]) -> list[PackedRows]:
        """This rank's micro-batches of a minibatch, on its device; advantages and weights come from the whole of it."""
        algorithm, limit = self.config.algorithm, self.config.rollout.sampling.max_new_tokens
        pairs = [(group.prompt, t.completion) for group in groups for t in group.trajectories]
        lengths = np.array([len(completion.token_ids) for _, completion in pairs])
        weights = AGGREGATIONS[algorithm.aggregation](lengths, limit)
        rows = [
            Row(prompt=prompt.token_ids, completion=completion, advantage=float(advantage), weight=float(weight))
            for (prompt, completion), advantage, weight in zip(
                pairs, advantages(groups, algorithm.advantage).ravel(), weights, strict=True
            )
        ]
        return self._share(rows)

    def _share(self, rows: Sequence[Row]) -> list[PackedRows]:
        """This rank's micro-batches of some rows, on its device; every rank gets as many."""
        packed = pack(rows, self.config.trainer.max_tokens, self.world)[self.rank :: self.world]
        return [part.to(self.policy.device, self.policy.backbone.dtype) for part in packed]

    def _compare_past(self, batch: Batch) -> Metrics:
        """Some of the tokens that older weights produced, under these weights; those of now are compared in passing."""
        pairs = [(group.prompt, t.completion) for group in batch.groups for t in group.trajectories]
        rows = [
            Row(prompt=prompt.token_ids, completion=completion, advantage=0.0, weight=0.0)
            for prompt, completion in some(pairs, self.config.monitor.check_answers)
        ]
        versions = {int(v) for row in rows for v in np.unique(row.completion.versions)}
        return self.past.compare(self._share(rows), versions)

    @torch.no_grad()
    def _logprobs(self, packed: Sequence[PackedRows]) -> list[Tensor]:
        """Log-probs [A] of each micro-batch under the current weights."""
        return [self.scorer(rows)[0] for rows in packed]

    def _step(self, packed: Sequence[PackedRows], proximal: Sequence[Tensor] | None) -> Metrics:
        """One optimizer step on a minibatch. ``proximal`` None: the current weights are the proximal ones."""
        self.optimizer.zero_grad()
        parts: list[Metrics] = []
        for i, rows in enumerate(packed):
            logp, entropy = self.scorer(rows)
            prox = logp.detach() if proximal is None else proximal[i]
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
                reference=self._reference_logprobs(rows),
            )
            # FSDP averages gradients over the ranks; the loss of the minibatch is the sum over them.
            (loss * self.world).backward()
            # Counts add up to 1 over micro-batches and ranks, as the minibatch's loss is the sum of its parts.
            metrics["train/loss"] = Mean(float(loss.detach()), 1 / (len(packed) * self.world))
            parts += [metrics, ratio_metrics(prox, rollout_logprobs)]
            if not self.config.algorithm.rescore:
                parts.append(same_weights_metrics(rows, prox, self.version))
        return merge(*parts, self._descend())

    def _descend(self) -> Metrics:
        """Clip the gradient and step; skip the step if the gradient is not finite. Metrics on rank 0 only."""
        parameters = [p for p in self.scorer.parameters() if p.grad is not None]
        norm = whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))
        finite = bool(norm.isfinite())
        rate = learning_rate(self.config.trainer, self.version)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if finite:
            clip_grads_with_norm_(parameters, self.config.trainer.max_grad_norm, norm)
            self.optimizer.step()
        self._skipped = 0 if finite else self._skipped + 1
        if self._skipped >= MAX_SKIPPED:
            raise UserError(
                f"trainer.lr={self.config.trainer.lr}: the loss is not finite in {MAX_SKIPPED} optimizer steps running "
                f"(gradient norm {float(norm)}); lower it, or look for rewards and log-probs that are not finite"
            )
        if self.rank:
            return {}
        metrics: Metrics = {"train/lr": Mean(rate, 1), "train/skipped": Sum(float(not finite))}
        # A skipped step has no norm worth averaging: it would make that of the whole update NaN.
        return metrics | ({"train/grad_norm": Mean(float(norm), 1)} if finite else {})

    @torch.no_grad()
    def _reference_logprobs(self, rows: PackedRows) -> Tensor | None:
        return None if self.reference is None else self.reference(rows)[0]

    def _collected(self, named: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Full copies on the CPU, on rank 0 alone; all ranks take part, one tensor at a time."""
        full = {}
        for name, tensor in named.items():
            gathered = whole(tensor.detach())
            if self.rank == 0:
                full[name] = gathered.to("cpu", dtype or gathered.dtype, copy=True)
        return full

    def _all_ranks(self, value: Any) -> list[Any]:
        """One value a rank, on every rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def _gathered(self, metrics: Metrics) -> Metrics:
        return merge(*self._all_ranks(metrics))


def _frozen(policy: Policy) -> Policy:
    """A copy of the backbone for the KL term, without gradients."""
    backbone = copy.deepcopy(policy.backbone).requires_grad_(False)
    return Policy(backbone=backbone, tokenizer=policy.tokenizer, mtp=None, layout=policy.layout)


def _split(groups: Sequence[Group], count: int) -> list[list[Group]]:
    """Groups in order, as even as possible, in ``count`` minibatches (fewer if there are fewer groups)."""
    ends = [math.ceil(len(groups) * i / count) for i in range(count + 1)]
    return [list(groups[a:b]) for a, b in pairwise(ends) if a < b]


def _rng() -> dict[str, Any]:
    """States of torch's random generators in this process."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
